"""hooks/experiments.py: discovery and digest, both without importing anything."""

import sys

import pytest
import small_project

import hooks
from hooks import experiments


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def edit(root, old, new, path="snippets/demo/squares.py"):
    text = (root / path).read_text()
    assert old in text
    (root / path).write_text(text.replace(old, new))


def digest():
    return experiments.find("demo.squares").digest


def test_find_reads_the_declaration_and_imports_nothing(root):
    (root / "snippets/demo/squares.py").write_text("import no_such_package\n" + small_project.EXPERIMENT)
    found = experiments.find("demo.squares")
    assert (found.id, found.path, found.title) == ("demo.squares", "snippets/demo/squares.py", "平方")
    assert found.tables == {"squares": {"x": "", "y": "1"}} and found.full == {"n": 3} and found.limit_seconds == 120
    assert list(experiments.all()) == ["demo.squares"]
    assert "snippets.demo.squares" not in sys.modules


def test_unknown_id_proposes_near_ones():
    with pytest.raises(experiments.UnknownExperiment, match="did you mean demo.squares"):
        experiments.find("demo.square")
    for strange in ("", "../x", "measure", "demo", "demo.helper", "a b"):
        with pytest.raises(experiments.UnknownExperiment):
            experiments.find(strange)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return i * i  # comment", "return (i\n            * i)"),
        ('"""Docstring."""', '"""Another."""'),
        ("import pathlib, sys", "# remark\nimport pathlib, sys"),
    ],
)
def test_comments_formatting_and_docstrings_do_not_age_a_record(root, old, new):
    before = digest()
    edit(root, old, new, "snippets/demo/helper.py")
    assert digest() == before


@pytest.mark.parametrize(("old", "new"), [("平方", "另一题"), ('"minutes": 0.1', '"minutes": 3'), ('{"n": 1}', '{"n": 2}')])
def test_what_cannot_change_a_number_does_not_age_a_record(root, old, new):
    before = digest()
    edit(root, old, new)
    assert digest() == before


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("snippets/demo/squares.py", "str(i)", "repr(i)"),
        ("snippets/demo/squares.py", '{"n": 3}', '{"n": 4}'),
        ("snippets/demo/squares.py", '"y": "1"', '"y": "s"'),
        ("snippets/demo/helper.py", "i * i", "i ** 2"),
        ("snippets/demo/helper.py", "i * i", "i * 1"),
        ("snippets/measure.py", '"smoke" if', '"full" if'),
    ],
)
def test_code_settings_and_imports_age_a_record(root, path, old, new):
    before = digest()
    edit(root, old, new, path)
    assert digest() != before


def test_indirect_relative_and_named_modules_belong_to_the_digest(root):
    (root / "snippets/demo/deep.py").write_text("X = 1\n")
    (root / "snippets/demo/named.py").write_text("def f(): return 1\n")
    (root / "snippets/demo/__init__.py").write_text("")
    edit(root, "import pathlib, sys", 'def late():\n    from . import deep\nF = "snippets.demo.named:f"', "snippets/demo/helper.py")
    assert experiments.sources("snippets/demo/squares.py") == [
        "snippets/__init__.py", "snippets/demo/__init__.py", "snippets/demo/deep.py", "snippets/demo/helper.py",
        "snippets/demo/named.py", "snippets/demo/squares.py", "snippets/measure.py",
    ]  # fmt: skip
    for path in ("deep", "named", "__init__"):
        before = digest()
        with (root / f"snippets/demo/{path}.py").open("a") as f:
            f.write("Y = 2\n")
        assert digest() != before


def test_data_files_belong_to_the_digest(root):
    (root / "data.bin").write_bytes(b"1")
    edit(root, '"tables"', '"data": ["data.bin"], "tables"')
    before = digest()
    (root / "data.bin").write_bytes(b"2")
    assert digest() != before
    (root / "data.bin").unlink()
    with pytest.raises(experiments.ExperimentError, match="data.bin.*does not exist"):
        experiments.find("demo.squares")


def test_python_among_the_data_counts_as_code(root):
    (root / "checks.py").write_text("from snippets.demo import extra\n", encoding="utf-8")
    (root / "snippets/demo/extra.py").write_text("A = 1\n", encoding="utf-8")
    edit(root, '"tables"', '"data": ["checks.py"], "tables"')
    before = digest()
    (root / "checks.py").write_text("# a comment\nfrom snippets.demo import extra\n", encoding="utf-8")
    assert digest() == before
    (root / "snippets/demo/extra.py").write_text("A = 2\n", encoding="utf-8")
    assert digest() != before


def test_digest_is_the_same_on_every_python(root):
    """The value was computed on Python 3.11; 3.12 to 3.14 parse f-strings and type parameters differently."""
    (root / "snippets/demo/golden.py").write_text(
        'def f(a, *, b: int = 1, **c):\n    """d"""\n    x = "é" f"{a!r:>{b}} and {{}} {c=}" "" u"z"\n'
        "    return [*x], {**c}, a[1:, ...], 1e400, b'\\x00', -0.0, 3j, lambda: (yield)\n"
        "class C(object, metaclass=type):\n    async def g(self):\n        async with a as b, c: await d\n"
        "    match_ = 1\nmatch C:\n    case None | {'k': [1, *_], **r} if r: pass\ntry:\n    pass\nexcept* OSError: ...\n"
        "with open(f'{1}{2}') as h: print(f'''\n{h:{'a'}{\"b\"}}''')\n"
    )
    value = experiments._source("snippets/demo/golden.py").digest
    assert value == "8e66d012bd548bca43dce38c1b5af56b22d5ae36534d94c27a3df5454d8cd80f"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def measure(*, n)", "def measure(n)", "keyword-only"),
        ("def measure(*, n)", "def measure(*, m)", "measure\\(\\) takes"),
        ("def measure(", "def measured(", "without a function measure"),
        ('"needs": "cpu"', '"needs": "tpu"', "needs='tpu'"),
        ('"minutes": 0.1', '"minutes": "long"', "minutes='long'"),
        ('"smoke": {"n": 1}', '"smoke": {"m": 1}', "different keys"),
        ('"full": {"n": 3}', '"full": {"n": (3,)}', "JSON"),
        ('"full": {"n": 3}', '"full": {"n": min(3, 4)}', "not a literal"),
        ('"title": "平方", ', "", "lacks title"),
        ('"title": "平方"', '"titel": 1, "title": "x"', "unknown keys titel"),
        ('{"squares": {"x": "", "y": "1"}}', "{}", "no tables"),
        ("def measure", "def def", "not valid Python"),
    ],
)
def test_a_malformed_module_is_named_with_its_line(root, old, new, said):
    edit(root, old, new)
    with pytest.raises(experiments.ExperimentError, match=rf"snippets/demo/squares.py:\d+: .*{said}"):
        experiments.all()


def test_a_file_that_comes_or_goes_is_noticed(root):
    # `from snippets.demo import extra` is an attribute or a file, whichever exists now.
    edit(root, "import helper", "import helper, extra")
    experiments.notice_files()
    without = digest()
    (root / "snippets/demo/extra.py").write_text("X = 1\n")
    experiments.notice_files()
    assert digest() != without
    (root / "snippets/demo/extra.py").unlink()
    experiments.notice_files()
    assert digest() == without


def test_a_found_experiment_has_the_digest_of_now(root):
    # Declarations are remembered; the digest must still follow the files that the module imports.
    before = digest()
    edit(root, "i * i", "i ** 2", "snippets/demo/helper.py")
    assert digest() != before
    edit(root, '"n": 3', '"n": 4')
    assert experiments.find("demo.squares").full == {"n": 4}


@pytest.mark.parametrize("text", ["def (", "x = 1\0", "x = " + "+".join(["1"] * 5000), "x = " + "(" * 500 + ")" * 500])
def test_an_imported_file_that_python_refuses_is_named(root, text):
    (root / "snippets/demo/helper.py").write_text(text)
    with pytest.raises(experiments.ExperimentError, match="snippets/demo/helper.py:.*not valid Python"):
        digest()
