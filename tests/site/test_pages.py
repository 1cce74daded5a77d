"""The built site in a real browser: every page, both widths, both colour schemes."""

import re

import pytest

from tests.site.browser import ROOT, SCHEMES, VIEWPORTS, pages

# Elements that stick out of the window although no ancestor scrolls or clips them.
OVERFLOWING = """() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push(`page: ${document.documentElement.scrollWidth} > ${width}`);
  for (const element of document.querySelectorAll(".md-content *")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || (box.right <= width + 1 && box.left >= -1)) continue;
    let parent = element.parentElement;
    while (parent && getComputedStyle(parent).overflowX === "visible") parent = parent.parentElement;
    if (!parent || parent === document.body || parent === document.documentElement)
      found.push(`${element.tagName}.${element.getAttribute("class") ?? ""} ${Math.round(box.left)}..${Math.round(box.right)} ${element.textContent.slice(0, 40)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", VIEWPORTS)
@pytest.mark.parametrize("name", pages())
def test_page(visit, name, width, scheme):
    it = visit(width, scheme)
    it.open(pages()[name])
    page = it.page
    assert page.locator("body").get_attribute("data-md-color-scheme") == SCHEMES[scheme]
    assert page.locator(".md-content h1").count() == 1
    assert page.evaluate(OVERFLOWING) == []

    ids = page.locator(".md-content [id]").evaluate_all("all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)), sorted(i for i in set(ids) if ids.count(i) > 1)
    headings = page.locator(".md-content :is(h1, h2, h3, h4)").evaluate_all("all => all.map(e => [e.id, e.textContent])")
    for id, text in headings:
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", id) and not re.search(r"_\d+$", id), f"heading {text!r} has the id {id!r}"


def test_not_found_page(visit):
    it = visit()
    it.open("404.html")
    assert "404" in it.page.locator(".md-content").inner_text()


def search(page, query):
    box = page.locator("input.md-search__input")
    box.click()
    box.fill(query)
    box.press("End")  # Material searches on keyup, which fill() does not send


@pytest.mark.parametrize("query", ["梯度检查点", "精度对齐", "关卡", "归约顺序", "gradcheck"])
def test_search_finds(visit, query):
    it = visit()
    it.open("")
    search(it.page, query)
    results = it.page.locator(".md-search-result__item")
    results.first.wait_for(timeout=15_000)
    assert query in "".join(results.all_inner_texts()).replace("\u200b", "")  # words are joined with it


def test_search_says_when_nothing_is_found(visit):
    """Guards the test above: the results do depend on the query."""
    it = visit()
    it.open("")
    search(it.page, "zzqqxxyy")
    it.page.locator(".md-search-result__meta", has_text="没有").wait_for(timeout=15_000)
    assert it.page.locator(".md-search-result__item").count() == 0


def palette():
    """{scheme: {variable: #rrggbb}} as palette.css has it."""
    css = (ROOT / "docs/assets/stylesheets/palette.css").read_text(encoding="utf-8")
    return {
        scheme: dict(re.findall(r"--(hf-[\w-]+): (#[0-9a-f]{6});", re.search(rf'"{scheme}"\] \{{(.*?)\}}', css, re.S)[1]))
        for scheme in SCHEMES.values()
    }


def rgb(colour):
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("scheme", "background"), [("default", "#ffffff"), ("slate", "#1e2129")])
def test_palette_contrast(scheme, background):
    colours = palette()[scheme]
    assert len(colours) == 16
    for role in ("input", "compute", "memory", "decision", "pass", "fail", "warning"):
        fill, stroke = colours[f"hf-{role}-fill"], colours[f"hf-{role}-stroke"]
        assert contrast(colours["hf-ink"], fill) >= 9.3, role
        assert contrast(stroke, background) >= 3.2, role
        assert contrast(stroke, fill) >= 3.2, role
