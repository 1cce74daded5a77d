"""hooks/records.py: nothing damaged is believed, and only RecordError escapes."""

import json

import pytest
import small_project
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_project import put, record

import hooks
from hooks import experiments, records
from hooks.records import RecordError


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def load():
    return records.load("demo.squares")


def test_store_then_load():
    assert load() == {}
    path = records.store(record())
    found = load()["cpu"]
    assert found.tables == record()["tables"] and not found.stale and not found.smoke
    assert found.path == "records/cpu/demo.squares.json" and f"{found.started:%Y-%m-%d %H}" == "2026-11-30 08"
    rows = [line for line in path.read_text().splitlines() if '"x"' in line]
    assert len(rows) == 3  # one row a line: a refresh leaves a readable diff
    assert [p.name for p in path.parent.iterdir()] == ["demo.squares.json"]


def test_each_device_has_its_record():
    records.store(record())
    records.store(record(device=record()["device"] | {"slug": "nvidia-h200"}))
    assert list(load()) == ["cpu", "nvidia-h200"] and records.devices() == ["cpu", "nvidia-h200"]


def test_edited_code_makes_it_stale(root):
    records.store(record())
    with (root / "snippets/demo/helper.py").open("a") as f:
        f.write("X = 1\n")
    assert load()["cpu"].stale


def test_an_older_record_may_lack_a_new_column(root):
    records.store(record())
    path = root / "snippets/demo/squares.py"
    path.write_text(path.read_text().replace('"y": "1"', '"y": "1", "z": "s"'))
    assert load()["cpu"].stale


def test_smoke_never_replaces_full():
    smoke = record(mode="smoke", settings={"n": 1})
    records.store(smoke)
    assert load()["cpu"].smoke
    records.store(record())
    records.store(smoke)
    assert not load()["cpu"].smoke
    path = put("{")
    with pytest.raises(RecordError):  # what stands there may be a full one
        records.store(smoke)
    assert path.read_text() == "{"
    records.store(record())
    assert not load()["cpu"].smoke


def test_an_invalid_record_is_not_stored_and_the_old_one_stays():
    path = records.store(record())
    before = path.read_bytes()
    for bad in (
        record(tables={"squares": [{"x": "0"}]}),
        record(tables={"squares": []}),
        record(tables={"other": [{"x": "0", "y": 1}]}),
        record(tables={"squares": [{"x": "0", "y": float("nan")}]}),
        record(tables={"squares": [{"x": "0", "y": [1]}]}),
        record(seconds=float("inf")),
        record(started="yesterday"),
        record(extra=1),
        record(settings={"n": 4}),
        record(device=record()["device"] | {"slug": "../x"}),
        record(settings={"n": object()}),
    ):
        with pytest.raises(RecordError, match="nothing was stored"):
            records.store(bad)
        assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_a_failing_disk_leaves_the_old_record(monkeypatch):
    path = records.store(record())
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        records.store(record(seconds=9.0))
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def signed(**changes):
    value = record(**changes)
    return value | {"checksum": records.checksum(value)}


TEXT = {
    "truncated": lambda: json.dumps(signed())[:-30],
    "empty": lambda: "",
    "not UTF-8": lambda: b"\xff\xfe{}",
    "a list": lambda: "[]",
    "NaN": lambda: json.dumps(signed()).replace('"y": 4', '"y": NaN'),
    "huge float": lambda: json.dumps(signed()).replace('"y": 4', '"y": 1e999'),
    "huge integer": lambda: json.dumps(signed()).replace('"y": 4', '"y": ' + "9" * 5000),
    "key twice": lambda: json.dumps(signed()).replace('"y": 4', '"y": 4, "y": 4'),
    "deep": lambda: "[" * 100_000,
}
VALUE = {
    "edited cell": lambda: signed() | {"tables": {"squares": [{"x": "0", "y": 1}]}},
    "wrong checksum": lambda: signed() | {"checksum": "sha256:" + "0" * 64},
    "settings edited": lambda: signed(settings={"n": 4}),
    "foreign experiment": lambda: signed(experiment="demo.other"),
    "foreign device": lambda: signed(device=record()["device"] | {"slug": "nvidia-h100"}),
    "ragged rows": lambda: signed(tables={"squares": [{"x": "0", "y": 1}, {"x": "0"}]}),
    "undeclared column": lambda: signed(tables={"squares": [{"x": "0", "z": 1}]}),
    "text as a number": lambda: signed(tables={"squares": [{"x": "0", "y": "fast"}]}),
    "flag as a number": lambda: signed(tables={"squares": [{"x": "0", "y": True}]}),
    "undeclared table": lambda: signed(tables={"cubes": [{"x": "0", "y": 1}]}),
    "bool as number": lambda: signed(seconds=True),
    "no time zone": lambda: signed(started="2026-11-30T08:00:00"),
    "field missing": lambda: {k: v for k, v in signed().items() if k != "commit"},
    "old schema": lambda: signed(schema=0),
}


@pytest.mark.parametrize("name", [*TEXT, *VALUE])
def test_a_damaged_record_is_named_with_a_remedy(name):
    put(TEXT[name]() if name in TEXT else VALUE[name](), sign=False)
    with pytest.raises(RecordError, match=r"^records/cpu/demo.squares.json: .*(delete|make refresh)"):
        load()


def test_merge_conflict_and_newer_schema_have_their_own_remedies():
    whole = records.dumps(signed())
    put(whole.replace(' "tables"', '<<<<<<< HEAD\n "tables"'))
    with pytest.raises(RecordError, match="merge conflict.*git checkout"):
        load()
    put(signed(schema=2), sign=False)
    with pytest.raises(RecordError, match="newer.*update the project"):
        load()


def test_a_directory_in_a_records_place():
    records.path_of("cpu", "demo.squares").mkdir(parents=True)
    with pytest.raises(RecordError, match="cannot be read"):
        load()


def test_strays(root):
    records.store(record())
    assert records.strays() == []
    put(record(), id="demo.gone")
    (root / "records/notes.txt").write_text("x")
    said = "\n".join(records.strays())
    assert "records/cpu/demo.gone.json: no experiment" in said and "records/notes.txt: is no record" in said


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def only_record_error():
    try:
        load()
    except RecordError as error:
        assert str(error).startswith("records/cpu/demo.squares.json: ")


@quick
@given(st.binary(max_size=200))
def test_any_bytes(data):
    put(data)
    only_record_error()


@quick
@given(st.sampled_from(sorted(records._FIELDS)), json_values, st.booleans())
def test_any_value_in_any_field(field, value, sign):
    changed = record() | {"checksum": "x"} | {field: value}
    try:
        if sign and field != "checksum":
            changed["checksum"] = records.checksum(changed)
    except ValueError:
        pass  # NaN: the reader must say so itself
    put(json.dumps(changed), sign=False)
    only_record_error()


@quick
@given(st.data())
def test_any_damage_to_a_good_file(data):
    good = records.dumps(signed()).encode()
    at = data.draw(st.integers(0, len(good) - 1))
    put(good[:at] + data.draw(st.binary(max_size=8)) + good[at + data.draw(st.integers(0, 8)) :])
    only_record_error()


@quick
@given(json_values)
def test_store_refuses_or_keeps_what_it_got(value):
    try:
        records.store(record(tables={"squares": [{"x": "0", "y": value}]}))
    except RecordError:
        return
    assert load()["cpu"].tables["squares"][0]["y"] == value


def test_digest_of_another_project_is_not_confused(root, tmp_path_factory):
    """The cache of parsed files must follow the root."""
    first = experiments.find("demo.squares").digest
    other = small_project.make(tmp_path_factory.mktemp("other"))
    (other / "snippets/demo/helper.py").write_text("def square(i): return 0\n")
    assert experiments.find("demo.squares").digest != first


@pytest.mark.parametrize("times", [(-1.0, -2.0, 1.0), (0.0, 0.0, 0.0), (5.0, 1.0, 4.0), (5.0, 6.0, 7.0)])
def test_times_that_no_clock_gives_are_not_stored(root, times):
    source = (root / "snippets/demo/squares.py").read_text()
    (root / "snippets/demo/squares.py").write_text(source.replace('"y": "1"}', '"median_us": "µs", "p20_us": "µs", "p80_us": "µs"}'))
    row = dict(zip(("x", "median_us", "p20_us", "p80_us"), ("0", *times), strict=True))
    with pytest.raises(records.RecordError, match=r"row 0 column 'median_us'.*nothing was stored"):
        records.store(record(tables={"squares": [row]}))
    assert not records.path_of("cpu", "demo.squares").exists()
    records.store(record(tables={"squares": [row | {"median_us": 2.0, "p20_us": 1.5, "p80_us": 2.0}]}))
