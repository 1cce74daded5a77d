"""Home: one screen with the measured numbers, where they come from, and the ways in."""

import re

from tests.site.browser import ROOT, pages


def test_one_screen(visit):
    it = visit()
    it.page.set_viewport_size({"width": 1280, "height": 800})
    it.open("")
    bottom = it.page.locator(".md-content__inner > :not(form)").evaluate_all("all => Math.max(...all.map(e => e.getBoundingClientRect().bottom))")
    assert bottom <= 800


def test_every_card_has_a_number_its_device_and_the_article(visit):
    it = visit()
    it.open("")
    cards = it.page.locator(".articles > div")
    articles = ["precision-alignment", "gradient-checkpointing", "cuda-graph"]
    assert cards.count() == len(articles)
    for card, name in zip(cards.all(), articles, strict=True):
        assert card.locator("h2 a:not(.headerlink)").get_attribute("href").endswith(f"{name}/")
        numbers = card.locator(".stat a.num, .stat a.unmeasured")
        assert numbers.count() and all("reproduce/#" in href for href in numbers.evaluate_all("all => all.map(a => a.href)"))
        assert card.locator("small a.num, small a.unmeasured").count() == 1
        # Each number of a card is looked up; what is typed are sizes of the workload (1×4096), versions and names.
        typed = card.evaluate("""e => { const copy = e.cloneNode(true);
          copy.querySelectorAll("a.num, a.unmeasured, .headerlink").forEach(a => a.remove()); return copy.textContent; }""")
        assert not re.search(r"\d+(\.\d+)? (ms|µs|GiB|GB/s|%)|\d%|\d×(?!\d)", typed), typed


def test_the_other_ways_in(visit):
    it = visit()
    it.open("")
    links = it.page.locator(".md-content a").evaluate_all("all => all.map(a => a.href)")
    assert {f"{it.origin}/{pages()[name]}" for name in ("reproduce", "series")} <= set(links)


def test_a_draft_is_called_a_draft():
    draft = '<span class="status">草稿'
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    cards = dict(re.findall(r"## \[[^\]]*\]\(([\w-]+\.md)\)(.*?)\n</div>", home, re.S))
    assert len(cards) == 3
    for name, card in cards.items():
        article = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert (draft in card) == (draft in article), f"{name} and its card on the home page differ: is it a draft?"
