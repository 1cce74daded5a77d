"""Reading: fonts, the length of lines, glossary terms, the printed page."""

import pytest

from tests.site.browser import pages

ARTICLES = ["precision-alignment", "gradient-checkpointing", "cuda-graph"]

# [characters that fit the longest line, start of the text] of every paragraph and list item with running text.
LINES = """() => [...document.querySelectorAll(".md-content :is(p, li, dd, blockquote)")]
  .filter(e => e.offsetParent && !e.closest("table, figure, .hf-prov, .md-typeset__table") && e.textContent.trim().length > 60)
  .map(e => {
    const range = document.createRange(); range.selectNodeContents(e);
    const boxes = [...range.getClientRects()].filter(b => b.width);
    const width = Math.max(...boxes.map(b => b.right)) - Math.min(...boxes.map(b => b.left));
    return [width / parseFloat(getComputedStyle(e).fontSize), e.textContent.trim().slice(0, 30)];
  })"""


@pytest.mark.parametrize("name", pages())
def test_length_of_lines(visit, name):
    it = visit()
    it.open(pages()[name])
    found = it.page.evaluate(LINES)
    assert [line for line in found if line[0] > 40.5] == []
    if name in ARTICLES:
        full = [characters for characters, _ in found if characters >= 34]
        assert len(full) > len(found) / 2, "most paragraphs should use the measure of 34 to 40 characters"
    style = it.page.locator(".md-content__inner > p:not([class])").first.evaluate(
        "e => [getComputedStyle(e).lineHeight, getComputedStyle(e).fontSize, getComputedStyle(e).fontFamily, getComputedStyle(e).textAutospace]"
    )
    line, size = (float(value.removesuffix("px")) for value in style[:2])
    assert 1.7 <= line / size <= 1.8 and size >= 15
    assert style[2].startswith("system-ui") and "PingFang SC" in style[2] and style[3] == "normal"


def test_no_web_font(visit):
    it = visit()
    for address in pages().values():
        it.open(address)
        assert it.page.evaluate("[...document.fonts].length") == 0
        assert it.page.evaluate("performance.getEntriesByType('resource').filter(r => /[.](woff2?|ttf|otf)/.test(r.name)).length") == 0


@pytest.mark.parametrize("name", ARTICLES)
def test_terms_lead_to_their_explanation(visit, name):
    it = visit()
    it.open(pages()[name])
    terms = it.page.locator("a.hf-term")
    assert terms.count() >= 3
    for href in set(terms.evaluate_all("all => all.map(a => a.href)")):
        if not href.startswith(it.origin):
            continue
        it.open(href.removeprefix(f"{it.origin}/"))
        assert it.page.evaluate("!location.hash || !!document.getElementById(location.hash.slice(1))"), href


def test_a_term_explains_itself_at_the_keyboard(visit):
    it = visit()
    it.open("gradient-checkpointing/")
    term = it.page.locator("a.hf-term").first
    term.focus()
    tooltip = it.page.locator(".md-tooltip2[role=tooltip]")
    tooltip.wait_for(timeout=5_000)
    assert "重算" in tooltip.inner_text()


@pytest.mark.parametrize("name", ARTICLES)
def test_printed_page(visit, name):
    it = visit()
    it.open(pages()[name])
    page = it.page
    page.emulate_media(media="print")
    for frame in (".md-header", ".md-tabs", ".md-sidebar--secondary", ".md-footer", ".headerlink", ".md-top"):
        assert page.locator(f"{frame}:visible").count() == 0, frame
    hidden = page.locator(".tabbed-block").evaluate_all("all => all.filter(e => !e.offsetHeight).length")
    assert hidden == 0
    folded = page.locator("details > :not(summary)").evaluate_all(
        "all => all.filter(e => e.textContent.trim() && !e.closest('.tabbed-block, .hf-sr') && !e.checkVisibility({ contentVisibilityAuto: true })).length"
    )
    assert folded == 0
    # On paper nothing scrolls: what does not fit is lost.
    page.set_viewport_size({"width": 680, "height": 960})
    lost = page.evaluate("""() => [...document.querySelectorAll(".md-content :is(pre, pre code, .hf-table, .md-typeset__scrollwrap, .hf-canvas)")]
      .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 2)
      .map(e => `${e.tagName}.${e.className} ${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.trim().slice(0, 40)}`)""")
    assert lost == []
    urls = page.locator(".md-content a:not([href^='data:'])").evaluate_all("all => all.map(a => [a.href, getComputedStyle(a, '::after').content])")
    assert any("github.com" in url for url, _ in urls)
    assert [url for url, after in urls if (after != "none") == url.startswith(f"{it.origin}/")] == []


def test_dark_pages_print_dark_on_white(visit):
    it = visit(scheme="dark")
    it.open("reproduce/")
    it.page.emulate_media(media="print", color_scheme="dark")
    ink = "e => getComputedStyle(e).color"
    assert it.page.locator(".md-content h1").evaluate(ink) == "rgb(31, 41, 55)"
    assert it.page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert it.page.locator("body").evaluate("e => getComputedStyle(e).getPropertyValue('--hf-ink').trim()") == "#1f2937"
