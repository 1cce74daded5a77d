"""The guard, end to end: small sites built by the real `python -m mkdocs` with the real hooks."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import small_project
from small_project import BLOCK

import hooks
from hooks import blocks, records

FLAGS = {"plain": [], "strict": ["--strict"], "quiet": ["-q"], "quiet strict": ["-q", "--strict"]}
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("REFRESH", "SMOKE")} | {"NO_MKDOCS_2_WARNING": "1"}


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def build(root, *flags, **environ):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *flags], cwd=root, env=ENVIRON | environ,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def written(root):
    return [p for p in (root / "site").rglob("*") if p.is_file()] if (root / "site").exists() else []


def fence(code="print('x')", options='exec="1" html="1" id="bad"', language="python"):
    return f"```{language} {options}\n{code}\n```"


CLAIM = """
- id: a
  page: index.md
  text: t
  source: spec
  expr: one("demo.squares", "squares", x="9").y
  accept: [0, 1]
"""

USES_ROW_2 = "from hooks.show import experiment\nprint(experiment('demo.squares').rows('squares', x='2')[0]['y'])"

# What stands on line 3 of the page; the message must hold every one of the texts.
FAULTS = {
    "raises": (fence("x = 1\nraise ValueError('boom')"), "docs/index.md:5 [bad]", "ValueError: boom"),
    "raises in an import": (fence("import no_such_module"), "docs/index.md:4 [bad]", "no_such_module"),
    "does not compile": (fence("x = 1\nif"), "docs/index.md:5 [bad]", "SyntaxError"),
    "sys.exit(0)": (fence("import sys\nsys.exit(0)"), "docs/index.md:5 [bad]", "sys.exit(0)"),
    "sys.exit(1)": (fence("import sys\nsys.exit(1)"), "docs/index.md:5 [bad]", "sys.exit(1)"),
    "os._exit(0)": (fence("import os\nos._exit(0)"), "docs/index.md:5 [bad]", "os._exit(0)"),
    "base exception": (fence("raise GeneratorExit"), "docs/index.md:4 [bad]", "GeneratorExit"),
    "prints nothing": (fence("x = 1"), "docs/index.md:3 [bad]", "printed nothing"),
    "unknown experiment": (
        fence("from hooks.show import experiment\nexperiment('demo.circle')"), "docs/index.md:5 [bad]", "demo.squares",
    ),
    "unknown table": (
        fence("from hooks.show import experiment\nexperiment('demo.squares').table('cubes')"),
        "docs/index.md:5 [bad]", "cubes", "squares",
    ),
    "unknown field": (
        fence("from hooks.show import experiment\nexperiment('demo.squares').table('squares', columns={'q': 'Q'})"),
        "docs/index.md:5 [bad]", "'q'",
    ),
    "unknown option": (fence(options='exec="1" html="1" id="bad" exec_on="gpu"'), "docs/index.md:3 [bad]", "exec_on"),
    "option without effect": (fence(options='exec="1" html="1" id="bad" workdir="x"'), "docs/index.md:3 [bad]", "workdir"),
    "bad option value": (fence(options='exec="1" html="1" id="bad" source="abve"'), "docs/index.md:3 [bad]", "abve", "above"),
    "misspelt exec": (fence(options='exce="1" html="1" id="bad"'), "docs/index.md:3", "exce"),
    "unquoted options": (fence(options="exec=1 html=1 id=bad"), "docs/index.md:3", "double quotes"),
    "half quoted": (fence(options='exec="1" html=1 id="bad"'), "docs/index.md:3", "double quotes"),
    "braces": (fence(options='{ exec="1" html="1" #bad }'), "docs/index.md:3", "{ ... }"),
    "no html": (fence(options='exec="1" id="bad"'), "docs/index.md:3 [bad]", 'html="1"'),
    "no id": (fence(options='exec="1" html="1"'), "docs/index.md:3", "no id"),
    "id with blanks": (fence(options='exec="1" html="1" id="a b"'), "docs/index.md:3", "a b"),
    "bash": (fence("true", language="bash"), "docs/index.md:3 [bad]", "'bash'"),
    "no language": (fence("true", language=""), "docs/index.md:3", "only python"),
    "duplicate id": (BLOCK, "docs/index.md:3 [squares]", "docs/last.md:3"),
    "missing include file": ('--8<-- "snippets/none.py"', "docs/index.md:3", "snippets/none.py"),
    "missing section": ('```python\n--8<-- "snippets/demo/helper.py:none"\n```', "docs/index.md:4", "none"),
    "section without end": ('```python\n--8<-- "part.py:open"\n```', "docs/index.md:4", "[end:open]"),
    "include without quotes": ("```python\n--8<-- snippets/demo/helper.py\n```", "docs/index.md:4", "not understood"),
    "include without a blank": ('--8<--"snippets/demo/helper.py"', "docs/index.md:3", "not understood"),
    "include amid text": ('Text --8<-- "snippets/demo/helper.py"', "docs/index.md:3", "not understood"),
    "include in a quotation": ('> --8<-- "snippets/demo/helper.py"', "docs/index.md:3", "not understood"),
    "element id twice": ('<p id="here">a</p>\n\n<p id="here">b</p>', "docs/index.md", "'here'"),
    "missing include in a block": (fence('--8<-- "none.py"'), "docs/index.md:4 [bad]", "none.py"),
    "never closed": ('```python exec="1" html="1" id="bad"\nprint(1)', "docs/index.md:3", "never closed"),
    "included block": ('--8<-- "block.md"', "docs/index.md [hidden]", "included file"),
    "not a fence to Markdown": ("- a\n\n      ```python exec=\"1\" html=\"1\" id=\"bad\"\n  print(1)\n      ```",
                                "docs/index.md:5 [bad]", "never ran"),
    "inline number": ("Text [[ one('demo.squares', 'cubes').y ]].", "docs/index.md:3", "cubes"),
}  # fmt: skip


def faulty(root, name):
    body = FAULTS[name][0]
    (root / "docs/index.md").write_text(f"# Page\n\n{body}\n\nThe end.\n")
    (root / "docs/last.md").write_text(f"# Last\n\n{BLOCK if name == 'duplicate id' else 'Fine.'}\n")
    (root / "part.py").write_text("# --8<-- [start:open]\nx = 1\n")
    (root / "block.md").write_text(fence(options='exec="1" html="1" id="hidden"') + "\n")


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_fails_the_build_and_is_named(root, name):
    # All four ways of building take long, and differ after the guard only: -q --strict here, all
    # four below. This one is the way in which MkDocs loses warnings.
    faulty(root, name)
    result = build(root, "-q", "--strict")
    assert result.returncode != 0, result.stderr
    for text in FAULTS[name][1:] if name != "duplicate id" else ("docs/last.md:3 [squares]", "docs/index.md:3"):
        assert text in result.stderr
    assert written(root) == []


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", ["raises", "sys.exit(0)", "os._exit(0)", "bad option value", "missing section", "duplicate id"])
def test_with_and_without_strict_and_quiet(root, name, flags):
    faulty(root, name)
    result = build(root, *FLAGS[flags])
    assert result.returncode != 0 and "nothing was written" in result.stderr and written(root) == []


@pytest.mark.parametrize("flags", FLAGS)
def test_a_sound_site_builds(root, flags):
    records.store(small_project.record())
    inner = fence(options='exec="1" html="1" id="b2"').replace("\n", "\n    ")
    example = "````markdown\n```python exec=1 id=example\n```\n````"
    include = '```python title="snippets/demo/helper.py"\n--8<-- "snippets/demo/helper.py"\n```'
    (root / "docs/index.md").write_text(
        f"---\ntitle: x\n---\n\n# Page\n\n{BLOCK}\n\n- item\n\n    {inner}\n\n{example}\n\n{include}\n\n"
        "Inline ```python exec=1``` code, `--8<-- \"none\"` too.\n\n;--8<-- \"shown\"\n\n```python\nprint('--8<--')\n```\n\n"
        + fence("import os\nif (pid := os.fork()) == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\nprint('forked')", 'exec="1" html="1" id="b3"')
    )
    result = build(root, *FLAGS[flags])
    assert result.returncode == 0, result.stderr
    html = (root / "site/index.html").read_text()
    assert "python -m snippets.demo.squares" in html and "hf-error" not in html and "return i * i" in re.sub("<.*?>", "", html)
    assert not (root / "runs").exists()


def test_all_faults_of_all_pages_are_listed_at_once(root):
    (root / "docs/index.md").write_text(f"# A\n\n{fence('1/0')}\n\n[[ 1 ]]\n")
    (root / "docs/b.md").write_text(f"---\na: 1\n---\n\n# B\n\n{fence('1/0')}\n\n--8<-- \"gone\"\n")
    said = build(root, "-q").stderr
    for text in ("docs/index.md:4 [bad]", "docs/index.md:7: [[ 1 ]]", "docs/b.md:7 [bad]", "docs/b.md:11", "4 errors"):
        assert text in said


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda root: small_project.put("{"), "records/cpu/demo.squares.json: not valid JSON"),
        (lambda root: small_project.put(small_project.record(), id="demo.gone"), "no experiment has this id"),
        (lambda root: small_project.put(small_project.record(), slug="gpu"), "comes from device 'cpu'"),
        (lambda root: (root / "snippets/bad.py").write_text("EXPERIMENT = 1\n"), "snippets/bad.py:1: EXPERIMENT"),
        (lambda root: (root / "snippets/demo/helper.py").write_text("def (\n"), "snippets/demo/helper.py:1: not valid Python"),
        (lambda root: (root / "claims.yml").write_text("- id: a\n"), "claims.yml, claim 1 (a): lacks"),
        (lambda root: (root / "claims.yml").write_text(CLAIM), "claims.yml, a, on cpu: demo.squares, table 'squares' has no row"),
        (lambda root: (records.path_of("cpu", "demo.squares").unlink(), records.path_of("cpu", "demo.squares").symlink_to("none")),
         "records/cpu/demo.squares.json: a link that leads nowhere"),
    ],
)
def test_what_is_damaged_fails_the_build_though_no_page_shows_it(root, prepare, said):
    (root / "docs/index.md").write_text("# Page\n")
    records.store(small_project.record())
    prepare(root)
    result = build(root, "-q")
    assert result.returncode != 0 and said in result.stderr and written(root) == []


def test_refresh_through_the_page(root):
    result = build(root, "-q", REFRESH="all")
    assert result.returncode == 0, result.stderr
    assert "[demo.squares" in result.stderr and (root / "runs").read_text() == "measuring\n"
    assert records.load("demo.squares")["cpu"].tables["squares"][2]["y"] == 4
    assert "CPU" in (root / "site/index.html").read_text()
    assert build(root, "-q", REFRESH="demo.nothing").returncode != 0


def test_a_failing_refresh_fails_the_build_and_keeps_the_record(root):
    before = records.store(small_project.record()).read_bytes()
    (root / "snippets/demo/helper.py").write_text("raise RuntimeError('no kernel')\n")
    result = build(root, "-q", REFRESH="all")
    assert result.returncode != 0 and "no kernel" in result.stderr and "docs/index.md:5 [squares]" in result.stderr
    assert records.path_of("cpu", "demo.squares").read_bytes() == before and written(root) == []


def test_a_refresh_measures_what_no_page_shows(root):
    (root / "docs/index.md").write_text("# Page\n")
    assert build(root, "-q", REFRESH="demo.squares").returncode == 0
    assert records.load("demo.squares")["cpu"].tables["squares"][2]["y"] == 4
    (root / "snippets/demo/helper.py").write_text("raise RuntimeError('no kernel')\n")
    result = build(root, "-q", REFRESH="demo.squares")
    assert result.returncode != 0 and "demo.squares" in result.stderr and "no kernel" in result.stderr


@pytest.mark.parametrize(
    "body",
    [
        fence("from hooks.show import experiment\nprint(experiment('demo.squares').table('squares'))"),
        fence("from hooks.show import experiment\nprint(experiment('demo.squares').rows('squares')[0]['y'])"),
        "Text [[ one('demo.squares', 'squares', x='0').y ]].",
    ],
)
@pytest.mark.parametrize("stale", [True, False])
def test_a_failure_on_an_old_record_says_to_measure_again(root, body, stale):
    # A new column: declared and used on the page, and not yet in any record.
    old = {"tables": {"other": [{"x": "0"}]}} if "table(" in body else {"tables": {"squares": [{"x": "0"}]}}
    if stale:
        small_project.put(small_project.record(digest="sha256:" + "0" * 64, **old))
    else:
        records.store(small_project.record())
        body = body.replace("x='0'", "x='9'").replace("[0]['y']", "[9]['y']").replace("table('squares')", "table('cubes')")
    (root / "docs/index.md").write_text(f"# Page\n\n{body}\n")
    result = build(root, "-q")
    assert result.returncode != 0
    assert ("measure again: make refresh ONLY=demo.squares" in result.stderr) == stale


def test_a_smoke_refresh_builds_a_site_that_quotes_full_runs(root):
    # Its one row is x="0"; the prose and the ledger want x="2".
    page = root / "docs/index.md"
    page.write_text(f"# Page\n\n[[ one('demo.squares', 'squares', x='2').y ]]\n\n{BLOCK}\n\n<!-- records -->\n")
    (root / "claims.yml").write_text(CLAIM.replace('"9"', '"2"'))
    result = build(root, "-q", REFRESH="all", SMOKE="1")
    assert result.returncode == 0 and records.load("demo.squares")["cpu"].smoke, result.stderr
    assert "冒烟" in (root / "site/index.html").read_text() and "未测" in (root / "site/index.html").read_text()
    page.write_text(f"# Page\n\n{fence(USES_ROW_2)}\n")
    result = build(root, "-q")
    assert result.returncode != 0 and "of a smoke run, measure again: make refresh ONLY=demo.squares" in result.stderr


def test_executing_by_environment_is_off(root):
    (root / "docs/index.md").write_text("# Page\n\n```python\nraise ValueError\n```\n")
    assert build(root, "-q", MARKDOWN_EXEC_AUTO="python").returncode == 0


class Server:
    """`mkdocs serve` on a free port."""

    def __init__(self, root, *flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}/"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mkdocs", "serve", "-a", self.url[7:-1], *flags], cwd=root, env=ENVIRON,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
        )  # fmt: skip
        self.said = []
        threading.Thread(target=lambda: self.said.extend(self.process.stdout), daemon=True).start()

    def wait(self, *texts, absent=(), seconds=25):
        """The home page once it holds every text."""
        html, deadline = "", time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "".join(self.said)
            try:
                html = urllib.request.urlopen(self.url, timeout=5).read().decode()
            except OSError:
                html = ""
            if html and all(t in html for t in texts) and not any(t in html for t in absent):
                return html
            time.sleep(0.1)
        raise AssertionError(f"{texts} not in {html}\n{''.join(self.said)}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)


def test_serve_shows_errors_at_their_place_and_lives_on(root):
    page = root / "docs/index.md"
    page.write_text(f"# Page\n\nBefore.\n\n{fence('raise SystemExit(0)')}\n\nBetween.\n\n--8<-- \"gone\"\n\nAfter.\n")
    records.store(small_project.record())
    with Server(root, "--strict") as server:  # the first build has errors already
        html = server.wait("hf-error", "docs/index.md:6 [bad]", "gone")
        order = [html.index(t) for t in ("Before.", "sys.exit(0)", "Between.", "gone", "After.")]
        assert order == sorted(order)
        page.write_text(f"# Page\n\n{BLOCK}\n")
        server.wait("python -m snippets.demo.squares", absent=("hf-error", "过期"))
        page.write_text(f"# Page\n\nOther prose.\n\n{BLOCK}\n")
        server.wait("Other prose.")
        start = time.monotonic()
        with (root / "snippets/demo/helper.py").open("a") as f:
            f.write("X = 1\n")
        server.wait("过期")
        assert time.monotonic() - start < 10
        small_project.put("<<<<<<< HEAD\n")
        server.wait("hf-error", "merge conflict")
        records.path_of("cpu", "demo.squares").unlink()
        server.wait("未测量", absent=("hf-error",))
        page.write_text("# Page\n\n[[ one('demo.squares', 'none').y ]]\n")
        server.wait("hf-error", "none")
        (root / "snippets/bad.py").write_text("EXPERIMENT = 1\n")
        server.wait("snippets/bad.py:1")
    assert not (root / "runs").exists()  # nothing of all this ran an experiment


def test_serve_refuses_refresh(root):
    result = subprocess.run([sys.executable, "-m", "mkdocs", "serve"], cwd=root, env=ENVIRON | {"REFRESH": "all"},
                            capture_output=True, text=True, timeout=60)  # fmt: skip
    assert result.returncode != 0 and "make refresh" in result.stderr and not (root / "runs").exists()


def test_mermaid_needs_its_local_script(root):
    config = (root / "mkdocs.yml").read_text().replace("plugins: [", "plugins: [{mermaid2: {javascript: js/m.js}}, ")
    (root / "mkdocs.yml").write_text(config)
    result = build(root, "-q")
    assert result.returncode != 0 and "js/m.js is not in docs/" in result.stderr and written(root) == []


@pytest.mark.parametrize(("html", "rewritten"), [
    ('<pre class="mermaid"><code>graph LR</code></pre> mermaid', False),
    ("<p>mermaid</p>", False),
    ('<div class="mermaid">graph LR</div>', True),
    ('<pre><code class="language-mermaid">graph LR</code></pre>', True),
    ("<pre><code id=a class=mermaid>graph LR</code></pre>", True),
])  # fmt: skip
def test_mermaid2_parses_only_pages_that_it_rewrites(html, rewritten):
    from hooks import plugin

    calls = []
    out = plugin._sparing(lambda output, **values: calls.append(values) or output.upper())(html, page=1)
    assert (out == html.upper() and calls == [{"page": 1}]) if rewritten else (out == html and not calls)


def test_print_in_a_block_is_python_s_own():
    text = blocks._execute("print(1, 2, sep='-', end='!')\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n  x: int\nprint(A(3))",
                           id="t")  # fmt: skip
    assert text == "1-2!A(x=3)\n"
    assert "block_t" not in sys.modules


@pytest.mark.parametrize("front", [0, 1, 4])
def test_a_fault_without_a_line_stands_below_the_front_matter(root, front):
    """The blank lines that stand for the front matter are cut off afterwards, by their number."""
    blocks.reset()
    fault = blocks.report("claims.yml is wrong", page="index.md")
    text = blocks.check_page("\n" * front + "# Page\n\ntext", "index.md", {}, [fault])
    blocks.reset()
    assert text[front:].startswith("# Page\n\n```") and text[:front] == "\n" * front
