"""What the built search index must not hold: the source of diagrams."""

import json
import re

from tests.site import browser as tools

FENCE = re.compile(r"^```[^\n]*\bmermaid\b[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def plain(text):
    return re.sub(r"\W+", "", text)  # jieba's joints, tags' remains and spaces aside


def test_no_diagram_source_is_searchable(tmp_path):
    tools.build(tmp_path, "http://127.0.0.1:8000")
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    indexed = plain(" ".join(re.sub(r"<[^>]+>|&\w+;", " ", entry["text"]) for entry in entries))
    diagrams = [source for path in sorted(tools.ROOT.glob("docs/**/*.md")) for source in FENCE.findall(path.read_text())]
    assert diagrams
    titles = [title for source in diagrams for title in re.findall(r"accTitle:(.*)", source)]
    assert len(titles) == len(diagrams), "every diagram has an accTitle, by which it is looked for here"
    found = [title for title in titles if plain("accTitle" + title) in indexed]
    assert not found, f'in the search index: {found}; write the fence as ```{{ .mermaid data-search-exclude="1" }}'
