"""hooks/compare.py and hooks/history.py: what two sets of records differ in."""

import subprocess

import pytest
import small_project
from small_project import put, record

import hooks
from hooks import compare, history, records

CLAIM = """
- {id: largest, page: index.md, text: t, source: project, expr: 'one("demo.squares", "squares", x="2").y', accept: [3, 5]}
"""
TIMED = {"kernel": "a", "rows": 8, "median_us": 10.0, "p20_us": 9.0, "p80_us": 11.0, "ok": True}


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def commit(root):
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=n@example.org", "commit", "-qm", "m"]):
        subprocess.run(["git", *words], cwd=root, check=True)


def squares(*ys, **more):
    return record(tables={"squares": [{"x": str(i), "y": y} for i, y in enumerate(ys)]}, **more)


def run(root, capsys, *sides):
    status = compare.main(["--root", str(root), *sides])
    said = capsys.readouterr()
    return status, said.out + said.err


def of(rows, **more):
    return records.record_of(record(tables={"t": rows}, **more) | {"checksum": ""}, "r", stale=False)


def test_a_commit_beside_the_working_tree(root, capsys):
    (root / "claims.yml").write_text(CLAIM)
    records.store(squares(0, 1, 4))
    commit(root)
    records.store(squares(0, 1, 8, started="2026-12-01T08:00:00+00:00") | {"versions": record()["versions"] | {"torch": "2.0"}})
    status, said = run(root, capsys, "HEAD")
    assert status == 0
    assert "| demo.squares | 2026-11-30 → 2026-12-01 | 1 of 3 | +100.0% |" in said
    assert "| squares | 2 | y | 4 | 8 | +100.0% |" in said
    assert "| largest | holds (4) | fails (8) | 3 至 5 |" in said
    assert "torch: 1.0 → 2.0 (demo.squares)" in said
    status, said = run(root, capsys, "HEAD", "HEAD")
    assert status == 0 and "The same numbers in both: demo.squares." in said and "the same in both" in said


def test_two_devices(root, capsys):
    records.store(squares(0, 1, 4))
    records.store(squares(0, 1, 5, device=record()["device"] | {"slug": "gpu", "name": "GPU"}))
    status, said = run(root, capsys, "cpu", "gpu")
    assert status == 0 and "## cpu → gpu" in said and "device slug: cpu → gpu" in said and "+25.0%" in said


@pytest.mark.parametrize("wrong", ["nothing", ":gpu", "--upload-pack=x", "HEAD:gpu"])
def test_a_side_that_is_none(root, capsys, wrong):
    records.store(record())
    commit(root)
    try:
        status, said = run(root, capsys, wrong)
    except SystemExit as error:  # argparse on what looks like an option
        status, said = error.code, "compare: "
    assert status and said.startswith("compare: ")


def test_a_damaged_record_is_named(root, capsys):
    put("{")
    status, said = run(root, capsys, "cpu")
    assert status == 1 and "records/cpu/demo.squares.json (working tree): not valid JSON" in said


def test_smoke_records_are_not_compared(root, capsys):
    records.store(record(mode="smoke", settings={"n": 1}))
    assert run(root, capsys, "cpu") == (1, "compare: working tree has no full record of cpu; nothing to compare\n")


def test_overlapping_spreads_are_no_change():
    inside, outside = TIMED | {"median_us": 10.9, "p20_us": 10.5, "p80_us": 12.0}, TIMED | {"median_us": 13.0, "p20_us": 12.5, "p80_us": 14.0}
    assert compare.changes(of([TIMED]), of([inside]))[0] == []
    (change,), compared, notes = compare.changes(of([TIMED]), of([outside]))
    assert change.column == "median_us" and change.relative == pytest.approx(0.3) and change.spread == "9–11 → 12.5–14"
    assert compared == 3 and notes == []  # rows, time and verdict; the spread is no value of its own


def test_verdicts_text_and_absent_values_always_count():
    found, *_ = compare.changes(of([TIMED]), of([TIMED | {"ok": False, "median_us": None}]))
    assert {(c.column, c.before, c.after) for c in found} == {("ok", True, False), ("median_us", 10.0, None)}


def test_a_number_without_spread_from_two_percent_on():
    rows = lambda v: of([{"x": "a", "gib": v}])  # noqa: E731
    assert compare.changes(rows(10.0), rows(10.1))[0] == []
    assert compare.changes(rows(10.0), rows(9.5))[0][0].relative == pytest.approx(-0.05)
    assert compare.changes(rows(0.0), rows(1.0))[0][0].relative is None


def test_rows_are_matched_by_what_they_describe_not_by_place():
    rows = [{"kernel": k, "rows": n, "us": float(i)} for i, (k, n) in enumerate([("a", 1), ("a", 2), ("b", 1)], 1)]
    assert compare.changes(of(rows), of(rows[::-1]))[0] == []
    _, compared, notes = compare.changes(of(rows), of(rows[:2]))
    assert compared == 2 and notes == ["table t: rows only in A: b · 1"]


def test_rows_that_nothing_tells_apart_are_matched_by_place():
    rows = [{"us": 1.0}, {"us": 1.0}]
    found, compared, _ = compare.changes(of(rows), of([{"us": 1.0}, {"us": 3.0}]))
    assert compared == 2 and [c.row for c in found] == ["#2"]


def test_tables_and_columns_of_one_side():
    a = records.record_of(record(tables={"t": [{"x": "a", "y": 1}], "u": [{"x": "a"}]}) | {"checksum": ""}, "r", stale=False)
    b = of([{"x": "a", "z": 1}])
    assert compare.changes(a, b)[2] == ["table t: only one side has the columns y, z", "table u is only in A"]


def test_files_of_a_commit(root):
    records.store(record())
    commit(root)
    (root / "snippets/demo/helper.py").unlink()
    assert b"def square" in history.files("HEAD", "snippets", "nothing")["snippets/demo/helper.py"]
    assert history.files("HEAD", "nothing") == {}
    history.extract("HEAD", root / "then")
    assert (root / "then/snippets/demo/helper.py").is_file() and not (root / "then/records").exists()
