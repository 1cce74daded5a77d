"""MkDocs hook: what every page has besides its text (a description, glossary terms, reading time, date),
links from its listings to the files they show, and these files.

It stands after hooks/plugin.py in mkdocs.yml, which makes the package importable.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from mkdocs.exceptions import PluginError

_terms: list = []
_committed: dict[str, str] = {}
_site: dict = {}


def on_pre_build(*, config):
    global _terms, _committed
    from hooks import glossary, reading

    try:
        _terms = glossary.read((Path(config.docs_dir) / glossary.PAGE).read_text(encoding="utf-8"))
    except (OSError, glossary.GlossaryError) as error:
        raise PluginError(str(error)) from error
    _committed = reading.commits()


def on_page_markdown(markdown, *, page, config, files):
    from hooks import blocks

    if not str(page.meta.get("description") or "").strip():
        blocks.report(
            "no description in the front matter: search engines and shared links would show the site's",
            "begin the file with\n---\ndescription: 一句话说明本页的结论\n---",
            page=page.file.src_uri,
        )
    return markdown


def on_page_content(html, *, page, config, files):
    from hooks import glossary, links, listings, reading

    src_uri = page.file.src_uri

    def address(term):
        target = term.target
        if target.startswith("series:"):
            return links.expand(f"[]({target})", glossary.PAGE, config.extra["series"])[3:-1]
        path, _, anchor = target.partition("#")
        file = files.get_file_from_path(path or glossary.PAGE)
        if not target or file is None or file is page.file:  # a page needs no link to itself
            file, anchor = files.get_file_from_path(glossary.PAGE), term.id
        return file.url_relative_to(page.file) + (f"#{anchor}" if anchor else "")

    html = listings.finish(html, page.url)  # before glossary terms are marked, which may occur in names of files
    minutes = reading.minutes(html)
    day = reading.updated(src_uri, reading.shown(html), _committed)
    if src_uri != glossary.PAGE:
        html = glossary.mark(html, _terms, address)
    html = re.sub(r'<a (?=[^<>]*?href="https?://)', "<a data-external ", html)
    page.meta["minutes"] = minutes
    page.meta["updated"] = day
    if day:
        page.update_date = day  # in the sitemap; MkDocs has the day of the build there
    if page.is_homepage:
        return html
    facts = [f"约 {minutes} 分钟"] + ([f'更新于 <time datetime="{escape(day)}">{escape(day)}</time>'] if day else [])
    line = f'<p class="page-facts" data-search-exclude>{" · ".join(facts)}</p>'
    return re.sub(r"</h1>", lambda end: f"{end[0]}\n{line}", html, count=1)


def on_env(env, *, config, files):
    _site.update(env=env, files=files)


def on_nav(nav, *, config, files):
    _site["nav"] = nav


def on_post_build(*, config):
    from hooks import listings

    listings.publish(**_site, config=config)
    _site.clear()
