"""Without JavaScript everything that the articles say, show and tabulate can be read."""

import pytest

from tests.site.browser import VIEWPORTS, pages

# What must be seen, and which of it is not: without a box, hidden, transparent, or cut off.
SHOWN = "figure.diagram svg, .hf-canvas svg, table, pre, p, li, dt, dd, h1, h2, h3, h4"
UNSEEN = """([within, shown]) => [...document.querySelectorAll(within)].flatMap(root => [...root.querySelectorAll(shown)])
  .filter(e => e.textContent.trim() && !e.closest("title, desc, [hidden], .hf-sr"))
  .filter(e => !e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || e.getBoundingClientRect().height < 5
    || (["hidden", "clip"].includes(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight + 5))
  .map(e => `${e.tagName}.${e.getAttribute("class") ?? ""} ${e.textContent.trim().slice(0, 60)}`)"""


@pytest.fixture
def still(chromium, origin):
    """still(address, width="desktop") → a page opened with JavaScript off."""
    contexts = []

    def start(address, width="desktop"):
        context = chromium.new_context(viewport=VIEWPORTS[width], locale="zh-CN", java_script_enabled=False)
        contexts.append(context)
        page = context.new_page()
        page.goto(f"{origin}/{address}")
        return page

    yield start
    for context in contexts:
        context.close()


def unfold(page):
    """Open every fold: one by a click, which the browser understands without scripts, the rest as that click does."""
    summary = page.locator("article details:not([open]) > summary:visible").first
    if summary.count():
        summary.click()
        assert page.locator("article details[open]").count()
    page.evaluate("document.querySelectorAll('article details').forEach(e => { e.open = true })")


def unseen(page, within="article"):
    return page.evaluate(UNSEEN, [within, SHOWN])


@pytest.mark.parametrize("width", VIEWPORTS)
@pytest.mark.parametrize("name", pages())
def test_everything_can_be_read(still, name, width):
    page = still(pages()[name], width)
    assert page.locator("html.no-js").count() == 1, "scripts ran"
    assert page.locator("pre.mermaid").count() == 0, "a diagram is shown as its source. Remedy: make diagrams"
    unfold(page)
    for tabs in page.locator("article .tabbed-set").all():
        for number, label in enumerate(tabs.locator(":scope > .tabbed-labels > label").all()):
            label.click()
            block = tabs.locator(":scope > .tabbed-content > .tabbed-block").nth(number)
            assert block.is_visible()
            block.evaluate("e => e.dataset.read = ''")
            assert unseen(page, "[data-read]") == [], label.inner_text()
            block.evaluate("e => { delete e.dataset.read; e.dataset.seen = '' }")
    # The panels have been read one by one; they are the only thing that may be out of sight now.
    page.evaluate("document.querySelectorAll('[data-seen]').forEach(e => e.remove())")
    assert unseen(page) == []


def test_pages_do_hold_what_is_looked_for(still):
    found = dict.fromkeys(["figure.diagram svg", ".hf-canvas svg", "table", "pre > code", "details", ".tabbed-set"], 0)
    for address in pages().values():
        page = still(address)
        for selector in found:
            found[selector] += page.locator(f"article {selector}").count()
    assert all(found.values()), found


@pytest.mark.parametrize("style", ["display: none", "visibility: hidden", "opacity: 0", "max-height: 2em; overflow: hidden"])
def test_unseen_does_look(still, style):
    page = still("reproduce/")
    unfold(page)
    before = len(unseen(page))
    page.locator("article pre").first.evaluate("(e, style) => { e.style = style }", style)
    assert len(unseen(page)) > before == 0
