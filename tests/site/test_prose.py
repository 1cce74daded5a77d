"""The pages' source text: spaces between Chinese and Latin, and heading ids that last.

Spacing is judged by AutoCorrect. Its own Markdown reader stops at inline markup, so 用`code`算 and **GPU**算 would pass; it
gets plain lines instead.
"""

import json
import re

import autocorrect_py
import pytest

from tests.site.browser import ROOT

RULES = {
    "halfwidth-punctuation": 0,  # would turn "Gate 3：1000 步" into "Gate 3:1000 步"
    "halfwidth-word": 0,
    "spellcheck": 0,
}
FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,}).*?^(?P=indent)(?P=mark) *$", re.M | re.S)


def prose(markdown):
    """The text of a page with its line numbers: no code, no targets of links, no markup; lookups and code as one word."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), markdown)
    text = re.sub(r"\[\[.*?\]\]", "0", text)
    text = re.sub(r"(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)", "x", text)
    text = re.sub(r"<https?:[^<>]*>", "x", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^()\n]*\)", r"\1", text)
    text = re.sub(r"</?[a-z][^<>\n]*>|\{[^{}\n]*\}", "", text)
    # A bold sentence that heads a paragraph needs the space after it: Markdown renderers differ without.
    return re.sub(r"(?<=[。！？])\*\* ", "", text).replace("**", "")


def complaints(markdown):
    """["line: as it stands → as it should be"]"""
    autocorrect_py.load_config(json.dumps({"rules": RULES}))
    return [
        f"{number}: {line.strip()} → {better.strip()}" for number, line in enumerate(prose(markdown).split("\n"), 1)
        if (better := autocorrect_py.format_for(line, "text")) != line
    ]  # fmt: skip


PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Every heading id that was ever published, one `page#id` a line. Links from elsewhere rely on them.
PUBLISHED = ROOT / "tests/site/heading_ids.txt"


@pytest.mark.parametrize("page", PAGES + [ROOT / "README.md"], ids=lambda path: path.name)
def test_spacing(page):
    found = complaints(page.read_text(encoding="utf-8"))
    assert not found, "\n".join(f"{page.relative_to(ROOT)}:{line}" for line in found)


@pytest.mark.parametrize(
    "wrong",
    ["用GPU算", "共 3层", "用`code`算", "**GPU**加粗", "**加粗**GPU", "[链接](a.md)GPU", "占[[ one('x', 'y').z ]] GiB", "中文,中文",
     "| 中文GPU | b |", "## 用GPU { #gpu }", "??? note \"用GPU\"", "    缩进的GPU", "你好 ，世界", "<span>用</span>GPU"],
)  # fmt: skip
def test_complains(wrong):
    assert [line.split(":")[0] for line in complaints(f"行一。\n{wrong}\n行三。")] == ["2"]


@pytest.mark.parametrize(
    "right",
    ["用 GPU 算", "用 `code` 算", "用 `a`、`b` 与 [[ one('中x', 'y') ]] GiB。", "```python\nx = '用GPU'\n```", "    ```\n    用GPU\n    ```",
     "`用GPU`", "[链接](用GPU.md) 后", "**结论。** 正文", "Gate 3：1000 步", "（SAC）之后"],
)  # fmt: skip
def test_accepts(right):
    assert complaints(right) == []


def headings(markdown):
    """[(text, id or None)] of a page, in order."""
    lines = re.findall(r"^#{1,6} +(.+)$", FENCE.sub("", markdown), re.M)
    return [(line, id[1] if (id := re.search(r"\{ #([A-Za-z][\w.-]*) \}\s*$", line)) else None) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_headings_have_ids_of_their_own(page):
    found = headings(page.read_text(encoding="utf-8"))
    assert found
    bare = [text for text, id in found if id is None]
    assert not bare, f"{page.name}: these headings need an English id, such as {{ #gate-1 }}: {bare}"
    ids = [id for _, id in found]
    assert len(set(ids)) == len(ids), f"{page.name}: an id stands twice: {ids}"


def test_heading_ids_last():
    name = PUBLISHED.relative_to(ROOT)
    published = PUBLISHED.read_text(encoding="utf-8").split()
    present, pages = set(), {}
    for path in PAGES:
        text = pages[path.relative_to(ROOT / "docs").as_posix()] = path.read_text(encoding="utf-8")
        present |= {f"{path.relative_to(ROOT / 'docs').as_posix()}#{id}" for _, id in headings(text)}
    new = sorted(present - set(published))
    assert not new, f"add to {name} (they are promises from now on): {' '.join(new)}"
    # An old id may live on as <span id="..."></span> where its section went.
    gone = [link for link in published if link not in present and f'id="{link.split("#")[1]}"' not in pages.get(link.split("#")[0], "")]
    assert not gone, f'links to these break; keep the id, or leave <span id="..."></span> in its place: {gone}'


def test_headings_are_found():
    assert headings("# a { #a }\n```\n# no\n```\n## 用 b\n### [c](d.md) { #c-1 }\n") == [
        ("a { #a }", "a"), ("用 b", None), ("[c](d.md) { #c-1 }", "c-1"),
    ]  # fmt: skip
