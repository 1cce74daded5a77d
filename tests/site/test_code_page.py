"""Listings in a browser: they name their file and link to its lines, long ones fold, and the copy button gives what runs."""

import ast
import importlib.util
import re
import subprocess
import textwrap

import pytest

from tests.site.browser import ROOT, pages

# [language, address behind the name, text that the button copies, why it may be missing] of every block of code.
COPIED = """async () => {
  let copied;
  document.execCommand = () => { copied = document.activeElement.value ?? String(getSelection()); return true; };
  for (const fold of document.querySelectorAll("details")) fold.open = true; // nobody can click a button that is folded away
  const out = [];
  for (const code of document.querySelectorAll(".md-content pre:not(.mermaid) > code")) {
    const button = code.parentElement.querySelector("button[data-clipboard-target], button.md-clipboard, .md-code__button[data-md-type=copy]");
    const box = code.closest("[class*=language-]");
    copied = null;
    button?.click();
    out.push({
      language: box?.className.match(/language-(\\w+)/)[1] ?? "",
      link: box?.querySelector(".filename a")?.getAttribute("href") ?? "",
      output: code.parentElement.matches(".hf-output"), button: !!button, copied, shown: code.textContent,
    });
  }
  return out;
}"""


def lines_of(link, text):
    """The lines of the file that a listing's link and its words name, without the marks of sections, as a page shows them."""
    path = re.search(r"code/(.*)/#L-\d+$", link)[1].replace("github/", ".github/", 1)
    first, last = map(int, re.search(r"第 (\d+)–(\d+) 行", text).groups())
    assert link.endswith(f"#L-{first}")
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()[first - 1 : last]
    return textwrap.dedent("\n".join(line for line in lines if "--8<--" not in line)).strip("\n")


@pytest.mark.parametrize("name", pages())
def test_what_the_button_copies_runs(visit, name):
    it = visit()
    it.open(pages()[name])
    found = it.page.evaluate(COPIED)
    files = it.page.locator(".filename").evaluate_all("all => all.map(e => [e.querySelector('a')?.getAttribute('href') ?? '', e.textContent])")
    named = {}
    for link, text in files:
        assert link, f"{text}: a listing names its file without a link"
        named.setdefault(link, []).append(text)
    for block in found:
        if block["output"]:
            assert not block["button"], f"output is nothing to run: {block['shown'][:60]!r}"
            continue
        copied = block["copied"]
        assert copied is not None, f"no button copies {block['shown'][:60]!r}"
        if block["link"]:
            assert copied.strip("\n") in [lines_of(block["link"], text) for text in named[block["link"]]], block["link"]
        if block["language"] == "python":
            ast.parse(copied)
        elif block["language"] == "bash":
            check_commands(copied)
        else:
            assert block["language"] in ("yaml",), block["shown"][:60]


def check_commands(text):
    """Nothing but commands: they parse, and each begins with a program or an assignment, not with a prompt or output."""
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, *rest = [w for w in line.split() if not re.fullmatch(r"[A-Z_0-9]+=\S*", w)] or [""]
        assert word in ("", "#", "python", "make", "pip", "git", "cd"), line
        if word == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), f"{line}: no module {rest[1]}"


def test_a_click_reaches_the_clipboard(visit):
    it = visit()
    it.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    it.open("reproduce/")
    command = "python -m snippets.precision.sources --smoke"
    block = it.page.locator(".language-bash", has_text=command).first
    block.hover()
    block.locator("button").first.click()
    assert it.page.evaluate("navigator.clipboard.readText()") == command


@pytest.mark.parametrize("width", ["desktop", "phone"])
def test_published_files(visit, width):
    """Every file that a page links to is there, whole, with an address for each line."""
    it = visit(width)
    places = {}
    for address in pages().values():
        it.open(address)
        for link in it.page.locator(".filename a").evaluate_all("all => all.map(e => e.href)"):
            place, _, line = link.partition("#")
            places.setdefault(place, set()).add(line)
    assert len(places) > 10
    for place, lines in places.items():
        it.open(place.removeprefix(f"{it.origin}/"))
        page = it.page
        path = page.title().split(" - ")[0]
        text = (ROOT / path).read_text(encoding="utf-8")
        assert page.locator(".hf-file code").evaluate("e => e.textContent") == text
        ids = page.locator(".hf-file [id]").evaluate_all("all => all.map(e => e.id)")
        assert lines <= set(ids)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
        response = page.request.get(page.locator("a[download]").evaluate("e => e.href"))
        assert response.ok and response.body() == (ROOT / path).read_bytes()
        back = page.locator(".md-content p a:not([download])")
        assert back.count() > 0
        assert page.request.get(back.first.evaluate("e => e.href")).ok


def test_long_listings_fold_without_script(chromium, origin):
    context = chromium.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{origin}/gradient-checkpointing/")
    page.locator("details.example", has=page.locator(".hf-long")).first.locator("> summary").click()
    listing = page.locator(".hf-long:visible").first
    pre, more = listing.locator("> pre"), listing.locator("> .hf-more > summary")
    height = "e => [e.clientHeight, e.scrollHeight]"
    shut, whole = pre.evaluate(height)
    assert shut < 500 < whole and re.fullmatch(r"展开全部 \d+ 行", more.inner_text())
    more.focus()
    page.keyboard.press("Enter")
    assert pre.evaluate(height) == [whole, whole] and more.inner_text() == "收起"
    page.keyboard.press("Enter")
    assert pre.evaluate(height)[0] == shut
    context.close()
