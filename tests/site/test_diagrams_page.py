"""Diagrams as readers get them: drawn ahead of time, in the palette of the scheme, without a script."""

import re

import pytest

from tests.site import browser as tools
from tests.site.test_pages import palette, rgb

ROLES = ["input", "compute", "memory", "decision", "pass", "fail", "warning"]
WITH_DIAGRAMS = ["cuda-graph", "gradient-checkpointing", "precision-alignment", "reproduce"]
FILLS = """roles => Object.fromEntries(roles.map(role => {
  const style = getComputedStyle(document.querySelector(`figure.diagram .node.${role} .label-container, figure.diagram .node.${role} > path`));
  return [role, [style.fill, style.stroke]];
}))"""
# [text, effective size] of every label; labels that stick out of their node or note; arrows and lines all in the palette's colour.
DRAWN = """figure => {
  const svg = figure.querySelector("svg"), scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  const shown = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim());
  const frame = svg.getBoundingClientRect();
  return {
    sizes: shown.map(text => parseFloat(getComputedStyle(text).fontSize) * scale),
    outside: shown.filter(text => {
      const box = text.getBoundingClientRect(), node = text.closest(".node");
      return !inside(box, frame) || (node && !inside(box, node.querySelector(".label-container, :scope > path").getBoundingClientRect()));
    }).map(text => text.textContent),
    title: svg.querySelector(":scope > title")?.textContent, desc: svg.querySelector(":scope > desc")?.textContent,
    named: ["aria-labelledby", "aria-describedby"].map(name => document.getElementById(svg.getAttribute(name))?.localName),
    role: svg.getAttribute("role"),
  };
}"""


@pytest.fixture
def requests(visit):
    """open(address, **how) → (Visit, addresses that the page asked for)."""

    def start(address, **how):
        it, asked = visit(**how), []
        it.page.on("request", lambda request: asked.append(request.url))
        it.open(address)
        return it, asked

    return start


@pytest.mark.parametrize("width", tools.VIEWPORTS)
@pytest.mark.parametrize("name", WITH_DIAGRAMS)
def test_diagrams_are_drawn_legible_and_named(requests, name, width):
    it, asked = requests(f"{name}/", width=width)
    assert it.page.locator(".mermaid").count() == 0, "not drawn; remedy: make diagrams"
    assert [url for url in asked if "mermaid" in url] == []
    figures = it.page.locator("figure.diagram").all()
    assert figures
    for figure in figures:
        drawn = figure.evaluate(DRAWN)
        assert drawn["sizes"] and min(drawn["sizes"]) >= 10.99, drawn
        assert drawn["outside"] == [] and drawn["role"] == "img" and drawn["named"] == ["title", "desc"]
        assert len(drawn["title"]) >= 4 and len(drawn["desc"]) > len(drawn["title"])


@pytest.mark.parametrize("name", WITH_DIAGRAMS)
def test_labels_fit_in_a_wider_font(visit, name):
    """Fonts differ between machines; drawings do not."""
    it = visit()
    it.open(f"{name}/")
    it.page.add_style_tag(content="figure.diagram text { letter-spacing: 0.05em !important; }")
    assert [figure.evaluate(DRAWN)["outside"] for figure in it.page.locator("figure.diagram").all()] == [[]] * it.page.locator("figure.diagram").count()


def test_colours_follow_the_toggle(visit):
    it = visit()
    it.open("reproduce/")

    def expected(scheme):
        colours = palette()[scheme]
        return {role: [rgb(colours[f"hf-{role}-fill"]), rgb(colours[f"hf-{role}-stroke"])] for role in ROLES}

    svg = it.page.locator("figure.diagram svg").element_handle()
    assert it.page.evaluate(FILLS, ROLES) == expected("default")
    it.page.locator("form.md-header__option label:visible").click()
    it.page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    assert it.page.evaluate(FILLS, ROLES) == expected("slate")
    assert svg.evaluate("svg => svg.isConnected"), "drawn anew"
    ink = it.page.locator("figure.diagram .node text").first.evaluate("text => getComputedStyle(text).fill")
    assert ink == rgb(palette()["slate"]["hf-ink"])


def test_diagrams_need_no_javascript(chromium, origin):
    page = chromium.new_page(java_script_enabled=False)
    page.goto(f"{origin}/reproduce/")
    text = page.locator("figure.diagram svg .node text", has_text="独立进程测量")
    assert text.is_visible() and text.bounding_box()["height"] > 10
    page.close()


def test_instant_navigation_keeps_drawings(requests):
    it, asked = requests("")
    it.page.evaluate("window.kept = true")
    it.page.locator(".md-tabs a", has_text="复现与记录").click()
    it.page.wait_for_url("**/reproduce/")
    it.page.locator("figure.diagram svg").first.wait_for(timeout=20_000)
    it.settle()
    assert it.page.evaluate("window.kept") is True, "the page was loaded anew, so instant navigation is off"
    assert [url for url in asked if "mermaid" in url] == []


def test_a_wide_diagram_scrolls_in_its_box_and_says_so(visit):
    it = visit("phone")
    it.open("gradient-checkpointing/")
    figure = it.page.locator("figure.diagram").first
    figure.evaluate("f => f.firstElementChild.style.setProperty('--width', '900px')")
    assert figure.evaluate("f => f.scrollWidth > f.clientWidth && getComputedStyle(f).overflowX") == "auto"
    assert "radial-gradient" in figure.evaluate("f => getComputedStyle(f).backgroundImage")
    figure.focus()
    it.page.keyboard.press("ArrowRight")
    it.page.wait_for_function("document.querySelector('figure.diagram').scrollLeft > 0")
    assert it.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_changed_diagram_shows_live_and_loads_the_script_once(chromium, origin):
    """The page as the build leaves it where a drawing is missing: the source in place of the figure."""
    source = "flowchart TD\n accTitle: t\n accDescr: d\n A[新]:::compute --> B(改):::pass"
    context = chromium.new_context()
    context.add_init_script('const attach = Element.prototype.attachShadow; Element.prototype.attachShadow = function (o) { return attach.call(this, { ...o, mode: "open" }); };')
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))

    def undrawn(route):
        html = route.fetch().text()
        pre = f'<pre class="mermaid" data-search-exclude><code>{source.replace(">", "&gt;")}</code></pre>'
        route.fulfill(body=re.sub(r'<figure class="diagram".*?</figure>', lambda _: pre, html, flags=re.S), content_type="text/html")

    page.route(f"{origin}/gradient-checkpointing/", undrawn)
    page.goto(f"{origin}/gradient-checkpointing/")
    page.wait_for_function("document.querySelectorAll('div.mermaid').length === 2", timeout=20_000)
    shape = "document.querySelector('div.mermaid').shadowRoot.querySelector('.node.compute .label-container')"
    page.wait_for_function(shape, timeout=20_000)
    assert page.evaluate(f"getComputedStyle({shape}).fill") == rgb(palette()["default"]["hf-compute-fill"])
    assert [url.rsplit("/", 1)[1] for url in asked if "mermaid" in url] == ["mermaid.min.js"]
    assert all(url.startswith(f"{origin}/") for url in asked)
    context.close()


def test_every_diagram_of_the_pages_is_drawn_and_in_use():
    from hooks import diagrams

    found = diagrams.collect()
    assert [d.where for d in diagrams.undrawn(found)] == [], "remedy: make diagrams"
    assert diagrams.orphans(found) == [], "remedy: make diagrams"
