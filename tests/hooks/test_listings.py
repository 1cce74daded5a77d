"""Listings: titles from includes, links to lines, folds, published files."""

import re

import pytest
import small_project

import hooks
from hooks import blocks, listings

FILE = """import os
# --8<-- [start:all]

# --8<-- [start:part]
def f():
    return 1 < 2
# --8<-- [end:part]
# --8<-- [end:all]
"""
SNIPPETS = {"base_path": ["."], "check_paths": True}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    before = hooks.root()
    small_project.make(tmp_path)
    (tmp_path / "snippets/demo/part.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    blocks.reset()
    listings.reset()
    yield tmp_path
    blocks.reset()
    listings.reset()
    hooks.use_root(before)


def page(*fences):
    return blocks.check_page("\n\n".join(fences), "article.md", SNIPPETS)


@pytest.mark.parametrize("opening", ["```python", '```python title="snippets/demo/part.py"', '```{ .python title="snippets/demo/part.py" }', "```{ .python }"])
@pytest.mark.parametrize("indent", ["", "    "])
def test_the_title_comes_from_the_include(opening, indent):
    lines = page("\n".join(indent + line for line in (opening, '--8<-- "snippets/demo/part.py:part"', "```"))).split("\n")
    assert blocks.faults() == []
    assert lines[0].startswith(indent + "```") and lines[0].count('title="snippets/demo/part.py:part"') == 1
    assert re.fullmatch(r" *```(\{ \.python [^{}]* \}|python title=\S+)", lines[0])
    assert lines[1:] == [f'{indent}--8<-- "snippets/demo/part.py:part"', f"{indent}```"]


@pytest.mark.parametrize(
    ("fence", "said"),
    [
        ('```python title="snippets/demo/other.py"\n--8<-- "snippets/demo/part.py:part"\n```', "remove the title"),
        ('```python\nimport os\n--8<-- "snippets/demo/part.py:part"\n```', "fence of its own"),
        ('```python\n--8<-- "snippets/demo/part.py:part"\n--8<-- "snippets/demo/part.py:all"\n```', "fence of its own"),
        ('```python\n--8<-- "snippets/demo/part.py:5:6"\n```', "mark a section"),
    ],
)
def test_a_listing_that_cannot_be_named_is_a_fault(fence, said):
    page("Text.", fence)
    (fault,) = blocks.faults()
    assert said in str(fault) and fault.where == "docs/article.md:3"


@pytest.mark.parametrize(("target", "first", "last"), [("part.py:part", 5, 6), ("part.py:all", 3, 7), ("part.py", 1, 8)])
def test_the_name_leads_to_the_lines(target, first, last):
    page(f'```python\n--8<-- "snippets/demo/{target}"\n```')
    html = listings.finish(f'<div class="language-python highlight"><span class="filename">snippets/demo/{target}</span><pre></pre></div>', "article/")
    assert f'<a href="../code/snippets/demo/part.py/#L-{first}">snippets/demo/part.py ' in html
    assert f"第 {first}–{last} 行" in html


def test_a_name_that_no_include_gave_stays():
    html = '<span class="filename">output</span>'
    assert listings.finish(html, "article/") == html


@pytest.mark.parametrize("lines", [listings.LONG, listings.LONG + 1])
def test_only_long_listings_fold(lines):
    html = '<div class="language-python highlight"><pre><span></span><code>' + "x\n" * lines + "</code></pre></div>"
    found = listings.finish(f"{html}\n<p>between</p>\n{html}", "")
    assert found.count("<details") == (2 if lines > listings.LONG else 0)
    assert found.count("<p>between</p>") == 1 and found.count("x\n") == 2 * lines


@pytest.mark.parametrize("text", [FILE, "\n\nx = '<b>'\n", "x = 1", 'a = """\n\n"""\n\n\n'])
def test_a_highlighted_file_has_its_lines(text):
    from html import unescape

    found = listings.highlighted("a.py", text)
    assert re.findall(r'id="L-(\d+)"', found) == [str(i) for i in range(1, len(text.splitlines()) + 1)]
    assert unescape(re.sub(r"<[^>]*>", "", found)).rstrip("\n") == text.rstrip("\n")


def test_hidden_folders_are_published_under_their_plain_name():
    assert listings.address(".github/workflows/ci.yml") == "code/github/workflows/ci.yml/"
