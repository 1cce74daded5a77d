"""hooks/diagrams.py and hooks/draw.py: which drawing a page gets, and what becomes of the others."""

import re
from concurrent.futures import ThreadPoolExecutor
from html import escape

import pytest
import small_project

import hooks
from hooks import check, diagrams, draw, records
from hooks.diagrams import Diagram

SOURCE = """flowchart TD
    accTitle: 一张图
    accDescr: 从甲到乙
    A[甲 & 一]:::input -- 好 --> B{"乙<br/>two words?"}:::decision"""
SEQUENCE = """sequenceDiagram
    accTitle: 时序
    accDescr: 甲给乙
    participant A as 甲
    A->>B: 3.50 ms
    Note over B: 等"""
FENCES = """
  - pymdownx.superfences:
      custom_fences: [{name: mermaid, class: mermaid, format: !!python/name:pymdownx.superfences.fence_code_format }]
"""


@pytest.fixture
def root(tmp_path):
    before = hooks.root()
    small_project.make(tmp_path, f"---\ntitle: t\n---\n# Page\n\n{small_project.BLOCK}\n\n```mermaid\n{SOURCE}\n```\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(config.read_text().replace("\n  - pymdownx.superfences\n", FENCES))
    scripts = tmp_path / diagrams.SCRIPTS
    scripts.mkdir(parents=True)
    for name in ("diagrams.js", "mermaid.min.js", "mermaid.min.js.sha256", "README.txt"):
        (scripts / name).symlink_to(before / diagrams.SCRIPTS / name)
    (tmp_path / diagrams.FOLDER).mkdir()
    diagrams.reset()
    yield tmp_path
    hooks.use_root(before)
    diagrams.reset()


def apart(function, *arguments):
    """Call in a thread of its own: in this one the browser tests may have their Playwright running, and it stands no second."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def element(source):
    return f'<pre class="mermaid" data-search-exclude="1"><code>{escape(source)}</code></pre>'


def put(diagram, text):
    diagram.path.write_text(text, encoding="utf-8")


def test_a_drawing_is_found_by_its_source(root):
    diagram = Diagram("index.md", 0, SOURCE)
    put(diagram, f'<svg id="{diagrams.ident(diagram)}">x</svg>\n')
    html = diagrams.place(f"<p>a</p>{element(SOURCE)}<p>b</p>", "index.md", "")
    figure = f'<figure class="diagram" tabindex="0" data-search-exclude><svg id="{diagrams.ident(diagram)}">x</svg></figure>'
    assert html == f"<p>a</p>{figure}<p>b</p>"
    for changed in (SOURCE.replace("好", "坏"), SOURCE + "\n    B --> C"):
        assert diagrams.place(element(changed), "index.md", "") == element(changed)


def test_a_drawing_is_not_used_once_it_would_be_drawn_otherwise(root):
    path = Diagram("index.md", 0, SOURCE).path
    for name in ("diagrams.js", "mermaid.min.js.sha256"):
        file = root / diagrams.SCRIPTS / name
        text = file.read_bytes()
        file.unlink()
        file.write_bytes(text + b" ")
        assert Diagram("index.md", 0, SOURCE).path != path
        file.write_bytes(text)
        assert Diagram("index.md", 0, SOURCE).path == path


def test_the_same_diagram_twice_has_ids_of_its_own_each(root):
    diagram = Diagram("index.md", 0, SOURCE)
    name = diagrams.ident(diagram)
    put(diagram, f'<svg id="{name}"><marker id="{name}_end"/><path marker-end="url(#{name}_end)"/></svg>')
    html = diagrams.place(element(SOURCE) * 2, "index.md", "")
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids)) == 4
    assert re.findall(r"url\(#([^)]+)\)", html) == [ids[1], ids[3]]


def test_collect_finds_file_and_line_and_writes_nothing(root, monkeypatch):
    monkeypatch.setenv("REFRESH", "all")
    before = sorted(root.rglob("*"))
    assert diagrams.collect() == [Diagram("index.md", 13, SOURCE)]
    assert "accTitle" in (root / "docs/index.md").read_text().splitlines()[12]
    assert not (root / "site").exists() and not (root / "runs").exists()
    assert [path for path in sorted(root.rglob("*")) if "__pycache__" not in path.parts and path not in before] == []


def test_collect_says_when_the_pages_do_not_build(root):
    (root / "docs/index.md").write_text('# Page\n\n```python exec="1" html="1" id="a"\n1 / 0\n```\n')
    with pytest.raises(diagrams.DiagramError, match="do not build.*Remedy: make site"):
        diagrams.collect()


def test_check_lists_what_is_not_drawn_and_what_no_page_shows(root, capsys):
    records.store(small_project.record())
    assert check.main(["--root", str(root)]) == 1
    said = capsys.readouterr().out
    assert "docs/index.md:13" in said and "not drawn" in said and "make diagrams" in said
    assert apart(draw.main) == 0
    assert check.main(["--root", str(root)]) == 0
    (root / "diagrams/old.svg").write_text("<svg/>")
    capsys.readouterr()
    assert check.main(["--root", str(root)]) == 1 and "diagrams/old.svg: no page" in capsys.readouterr().out


def test_the_command_draws_deletes_and_leaves_alone(root, capsys):
    (root / "diagrams/index-000000000000.svg").write_text("<svg/>")
    assert apart(draw.main) == 0
    (file,) = (root / "diagrams").iterdir()
    assert file == Diagram("index.md", 0, SOURCE).path
    text = file.read_text(encoding="utf-8")
    for word in ("一张图", "从甲到乙", "甲 &amp; 一", "好", "乙", "two words?"):
        assert f">{word}</" in text, word
    file.write_text("<svg>kept</svg>")
    assert apart(draw.main) == 0 and file.read_text() == "<svg>kept</svg>"
    capsys.readouterr()


def test_a_faulty_diagram_is_named_and_nothing_is_deleted(root, capsys):
    (root / "docs/index.md").write_text("# Page\n\n```mermaid\nflowchart TD\n  accTitle: x\n  A --> --> B\n```\n")
    (root / "diagrams/old.svg").write_text("<svg/>")
    assert apart(draw.main) == 1
    said = capsys.readouterr().err
    assert "docs/index.md:5: Mermaid cannot draw this. Remedy: " in said and (root / "diagrams/old.svg").exists()


def test_drawing_again_gives_the_same_bytes_and_ids_never_clash(root):
    # A stadium's outline is drawn with random numbers unless they are seeded.
    wanted = [Diagram("a.md", 0, SOURCE + "\n    B --> C([丙])"), Diagram("b.md", 0, SEQUENCE)]
    first, second = ([svg for _, svg in apart(lambda o: list(draw.draw(o)), order)] for order in (wanted, wanted[::-1]))
    assert first == second[::-1]
    for diagram, svg in zip(wanted, first, strict=True):
        ids = re.findall(r'\bid="([^"]+)"', svg)
        assert ids and len(ids) == len(set(ids)) and all(diagrams.ident(diagram) in id for id in ids)
        assert set(re.findall(r'url\("?#([^")]+)"?\)', svg)) <= set(ids)
        assert 'role="img"' in svg and "foreignObject" not in svg and "data-" not in svg
    assert ">3.50 ms</" in first[1] and ">等</" in first[1]


def test_a_drawing_too_large_for_a_page_is_refused(root, monkeypatch):
    monkeypatch.setattr(draw, "_LARGEST", 2_000)
    with pytest.raises(diagrams.DiagramError, match=r"docs/a.md:3: the drawing has \d+ kB.*Remedy: "):
        apart(lambda: list(draw.draw([Diagram("a.md", 3, SOURCE)])))
