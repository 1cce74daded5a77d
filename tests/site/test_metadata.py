"""What search engines, shared links and browsers read of a page: metadata, sitemap, the page that is not there."""

import json
import re
import struct
import urllib.request
import xml.etree.ElementTree as ElementTree
from html import unescape

import pytest

from tests.site.browser import pages

ARTICLES = {"precision-alignment", "gradient-checkpointing", "cuda-graph"}


def fetch(address):
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.read()


def metadata(html):
    """{name or property: content} of a page's <meta> elements."""
    found = re.findall(r'<meta (?:name|property)="([^"]+)" content="([^"]*)">', html)
    assert len({key for key, _ in found}) == len(found), f"a <meta> stands twice: {sorted(key for key, _ in found)}"
    return {key: unescape(value) for key, value in found}


@pytest.mark.parametrize("name", pages())
def test_metadata(origin, name):
    url = f"{origin}/{pages()[name]}"
    html = fetch(url).decode()
    meta = metadata(html)
    assert 15 <= len(meta["description"]) <= 120
    assert meta["og:description"] == meta["description"]
    assert meta["og:url"] == url and f'<link rel="canonical" href="{url}">' in html
    assert meta["og:title"] and meta["og:site_name"] and meta["og:locale"] == "zh_CN"
    assert "robots" not in meta
    image = fetch(meta["og:image"])
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", image[16:24]) == (1200, 630)

    data = json.loads(re.search(r'<script type="application/ld\+json">(.*?)</script>', html, re.S)[1])
    assert (data["url"], data["description"], data["inLanguage"]) == (url, meta["description"], "zh-CN")
    if name == "index":
        assert data["@type"] == "WebSite" and meta["og:type"] == "website"
        return
    assert data["@type"] == "TechArticle" and data["headline"] == meta["og:title"] and meta["og:type"] == "article"
    minutes, day = re.search(r'class="page-facts"[^>]*>约 (\d+) 分钟 · 更新于 <time datetime="([\d-]+)">\2</time>', html).groups()
    assert data["timeRequired"] == f"PT{minutes}M"
    assert data["dateModified"] == meta["article:modified_time"] == day
    assert int(minutes) >= 5 or name not in ARTICLES


def test_descriptions_differ(origin):
    found = [metadata(fetch(f"{origin}/{address}").decode())["description"] for address in pages().values()]
    assert len(set(found)) == len(found)


def test_sitemap(origin):
    space = {"s": "http://www.sitemaps.org/schemas/sitemap/0.9"}
    entries = ElementTree.fromstring(fetch(f"{origin}/sitemap.xml")).findall("s:url", space)
    days = {entry.findtext("s:loc", None, space): entry.findtext("s:lastmod", None, space) for entry in entries}
    assert set(days) == {f"{origin}/{address}" for address in pages().values()}
    for url, day in days.items():
        shown = re.search(r'<time datetime="([\d-]+)">', fetch(url).decode())
        assert shown is None and url == f"{origin}/" or shown[1] == day


def test_feed(origin):
    """Atom, with all that RFC 4287 demands, and the same dates as the pages; never the day of the build."""
    home = fetch(f"{origin}/").decode()
    assert '<link rel="alternate" type="application/atom+xml"' in home and 'href="feed.xml"' in home
    space = {"a": "http://www.w3.org/2005/Atom"}
    feed = ElementTree.fromstring(fetch(f"{origin}/feed.xml"))
    assert feed.tag == "{http://www.w3.org/2005/Atom}feed" and feed.findtext("a:author/a:name", None, space)
    assert feed.findtext("a:id", None, space) == f"{origin}/" and feed.findtext("a:title", None, space)
    assert feed.find("a:link[@rel='self']", space).get("href") == f"{origin}/feed.xml"
    entries = feed.findall("a:entry", space)
    days = [entry.findtext("a:updated", None, space) for entry in entries]
    assert days == sorted(days, reverse=True) and feed.findtext("a:updated", None, space) == days[0]
    assert {entry.findtext("a:id", None, space) for entry in entries} == {f"{origin}/{a}" for a in pages().values() if a}
    for entry, day in zip(entries, days, strict=True):
        html = fetch(entry.find("a:link", space).get("href")).decode()
        assert f'<time datetime="{day.removesuffix("T00:00:00Z")}">' in html
        assert entry.findtext("a:summary", None, space) == metadata(html)["description"] and entry.findtext("a:title", None, space)


def test_previous_and_next_run_through_all_pages(origin):
    seen, address = [], ""
    while address is not None and len(seen) < 20:
        html = fetch(f"{origin}/{address}").decode()
        seen.append(address)
        onward = re.search(r'<a href="([^"]+)" class="md-footer__link md-footer__link--next"', html)
        back = re.search(r'<a href="([^"]+)" class="md-footer__link md-footer__link--prev"', html)
        assert bool(back) == (len(seen) > 1)
        address = onward and onward[1].removeprefix("../")
    assert sorted(seen) == sorted(pages().values())


def test_not_found_page_leads_on(visit):
    it = visit()
    it.open("404.html")
    page = it.page
    assert "没有这一页" in page.title() and page.locator("h1").inner_text() == "没有这一页（404）"
    assert page.locator('meta[name="robots"]').get_attribute("content") == "noindex"
    links = page.locator(".md-content li a").evaluate_all("all => all.map(a => a.href)")
    assert set(links) == {f"{it.origin}/{address}" for address in pages().values()}

    page.get_by_label("搜索本站").fill("归约顺序")
    page.get_by_label("搜索本站").press("Enter")
    page.wait_for_url(f"{it.origin}/?q=*")
    results = page.locator(".md-search-result__item")
    results.first.wait_for(timeout=15_000)
    assert "归约顺序" in "".join(results.all_inner_texts()).replace("\u200b", "")
