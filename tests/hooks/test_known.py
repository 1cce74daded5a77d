"""hooks/known.py: what may be published although it is not as it should be, and that known.yml says exactly that."""

from pathlib import Path

import pytest
import small_project
from hypothesis import given
from hypothesis import strategies as st
from small_project import record

import hooks
from hooks import check, experiments, known, records

ROOT = Path(hooks.__file__).resolve().parent.parent
ALL = [(state, id) for state in known.STATES for id in ("demo.squares", "demo.cubes")]


@pytest.fixture
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def run(root, capsys):
    status = check.main(["--root", str(root)])
    return status, capsys.readouterr().out


def test_this_projects_list_is_exact():
    excused, bad, unneeded = known.judge(check.states(), known.load())
    assert not bad, f"measure again (make refresh ONLY=...), or give a reason in {known.FILE}: {bad}"
    assert not unneeded, f"python -m hooks.known takes these out of {known.FILE}: {unneeded}"
    assert {id for _, id in excused} <= set(experiments.all())


def test_a_reason_lets_one_state_of_one_experiment_pass(root, capsys):
    (root / "known.yml").write_text("# why\nmissing:\n  demo.squares: no GPU yet\n")
    status, said = run(root, capsys)
    assert status == 0 and "missing: demo.squares; known: no GPU yet" in said and "but for the 1 in known.yml" in said
    records.store(record())
    with (root / "snippets/demo/helper.py").open("a") as f:
        f.write("X = 1\n")
    status, said = run(root, capsys)
    assert status == 1 and "stale: demo.squares" in said and "or give a reason in known.yml" in said


def test_a_record_that_is_smoke_and_stale_needs_both_reasons(root, capsys):
    records.store(record(mode="smoke", settings={"n": 1}))
    with (root / "snippets/demo/helper.py").open("a") as f:
        f.write("X = 1\n")
    (root / "known.yml").write_text("stale:\n  demo.squares: a\n")
    assert run(root, capsys)[0] == 1
    (root / "known.yml").write_text("stale:\n  demo.squares: a\nsmoke:\n  demo.squares: b\n")
    assert run(root, capsys)[0] == 0


def test_a_reason_without_need_is_in_the_way_and_can_be_taken_out(root, capsys):
    records.store(record())
    (root / "known.yml").write_text("# why\nstale:\n  demo.squares: a\n  demo.gone: b\n")
    status, said = run(root, capsys)
    assert status == 1 and "known.yml: no longer so, and needs no reason: demo.gone (stale), demo.squares (stale)" in said
    assert known.main() == 0 and "taken out: stale: demo.gone" in capsys.readouterr().out
    assert (root / "known.yml").read_text() == "# why\n" and run(root, capsys)[0] == 0


def test_nothing_excuses_a_file_that_cannot_be_read(root, capsys):
    small_project.put("{")
    (root / "known.yml").write_text("unreadable:\n  demo.squares: a\n")
    assert check.main(["--root", str(root)]) == 1
    assert "known.yml: unknown state 'unreadable'; write missing, stale, smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "must map missing, stale, smoke"),
        ("stale:\n", "known.yml, stale: must map experiments to reasons"),
        ("stale:\n  demo.squares:\n", "demo.squares has no reason"),
        ("stale:\n  demo.squares: ' '\n", "demo.squares has no reason"),
        ("stale:\n  demo.squares: [a]\n", "demo.squares has no reason"),
        ("stale:\n  demo.squares: a\n  demo.squares: b\n", "given twice"),
        ("stale: {\n", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_words(root, text, says):
    (root / "known.yml").write_text(text)
    with pytest.raises(known.KnownError, match=says.replace("[", r"\[")):
        known.load()


@given(st.sets(st.sampled_from(ALL)), st.sets(st.sampled_from(ALL)), st.sampled_from(["a", "a: b", "long\n    and longer", "# no comment"]))
def test_taking_out_leaves_the_rest(tmp_path_factory, entries, gone, reason):
    before = hooks.root()
    folder = tmp_path_factory.mktemp("known")
    try:
        hooks.use_root(folder)
        lines = ["# head"]
        for state in known.STATES:
            if ids := sorted(id for s, id in entries if s == state):
                lines += [f"{state}:", *(f"  {id}: {'>-' if reason != 'a' else reason}" + ("" if reason == "a" else f"\n    {reason}") for id in ids), "# between"]
        (folder / known.FILE).write_text("\n".join(lines) + "\n")
        reasons = known.load()
        assert reasons.keys() == entries
        known.prune(sorted(entries & gone))
        assert known.load() == {key: why for key, why in reasons.items() if key not in gone}
        assert (folder / known.FILE).read_text().startswith("# head\n")
    finally:
        hooks.use_root(before)


def test_a_file_that_cannot_be_edited_by_lines_stays(root):
    (root / "known.yml").write_text("stale: {demo.squares: a, demo.cubes: b}\n")
    with pytest.raises(known.KnownError, match=r"delete demo\.squares by hand"):
        known.prune([("stale", "demo.squares")])
    assert known.load() == {("stale", "demo.squares"): "a", ("stale", "demo.cubes"): "b"}
