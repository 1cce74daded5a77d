"""hooks/check.py: what stops a release."""

import json

import pytest
import small_project
from small_project import put, record

import hooks
from hooks import check, records


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def run(root, capsys):
    status = check.main(["--root", str(root)])
    return status, capsys.readouterr().out


def device(slug):
    return record()["device"] | {"slug": slug}


def test_current_full_records_pass(root, capsys):
    records.store(record())
    status, said = run(root, capsys)
    assert status == 0 and "demo.squares" in said and "ok" in said and "2026-11-30" in said


def test_missing(root, capsys):
    status, said = run(root, capsys)
    assert status == 1 and "missing: demo.squares" in said and "make refresh ONLY=demo.squares" in said


def test_stale(root, capsys):
    records.store(record())
    with (root / "snippets/demo/helper.py").open("a") as f:
        f.write("X = 1\n")
    status, said = run(root, capsys)
    assert status == 1 and "stale: demo.squares" in said


def test_smoke(root, capsys):
    records.store(record(mode="smoke", settings={"n": 1}))
    status, said = run(root, capsys)
    assert status == 1 and "smoke: demo.squares" in said


def test_unreadable_and_stray(root, capsys):
    put("{")
    put(record(), id="demo.gone")
    status, said = run(root, capsys)
    assert status == 1
    assert "unreadable" in said and "records/cpu/demo.squares.json: not valid JSON" in said and "demo.gone.json" in said


def test_every_device_is_listed_and_judged(root, capsys):
    records.store(record())
    put(record(device=device("nvidia-h100"), mode="smoke", settings={"n": 1}), slug="nvidia-h100")
    status, said = run(root, capsys)
    assert status == 1 and "nvidia-h100" in said and "smoke" in said
    records.store(record(device=device("nvidia-h100")))
    assert run(root, capsys)[0] == 0


def test_a_second_device_may_be_incomplete(root, capsys):
    records.store(record())
    (root / "records/nvidia-h100").mkdir()
    status, said = run(root, capsys)
    assert status == 0 and "not measured here" in said


def test_a_cuda_experiment_is_not_measured_by_a_cpu_record(root, capsys):
    path = root / "snippets/demo/squares.py"
    path.write_text(path.read_text().replace('"needs": "cpu"', '"needs": "cuda"'))
    records.store(record())
    status, said = run(root, capsys)
    assert status == 1 and "missing: demo.squares" in said


def test_versions_are_information(root, capsys):
    records.store(record(versions=record()["versions"] | {"torch": "2.11.0+cu129", "triton": "3.7.1"}))
    (root / "requirements.txt").write_text("-r x.txt\ntorch==2.13.0\ntriton==3.7.1\n")
    status, said = run(root, capsys)
    assert status == 0 and "torch 2.11.0 recorded, requirements.txt pins 2.13.0" in said and "triton" not in said


@pytest.mark.parametrize(
    ("accept", "known", "status", "says"),
    [
        ([4, 4], "", 0, "All 1 experiments"),
        ([5, 9], "", 1, "way of a release:\n  claim four on cpu: 4, accepted 5 至 9"),
        ([5, 9], "rounds down", 0, "Note:\n  claim four on cpu: 4, accepted 5 至 9; known: rounds down"),
        ([4, 4], "rounds down", 1, "claim four holds; remove its known: from claims.yml"),
    ],
)
def test_a_failing_claim_needs_a_reason(root, capsys, accept, known, status, says):
    records.store(record())
    (root / "docs/page.md").write_text("x\n")
    claim = {"id": "four", "page": "page.md", "text": "four", "source": "project", "accept": accept,
             "expr": 'one("demo.squares", "squares", x="2").y'}  # fmt: skip
    (root / "claims.yml").write_text(json.dumps([claim | ({"known": known} if known else {})]))
    assert run(root, capsys)[0] == status
    assert says in run(root, capsys)[1]


def test_a_reason_may_wait_for_its_record_and_a_broken_ledger_is_an_error(root, capsys):
    (root / "docs/page.md").write_text("x\n")
    claim = {"id": "four", "page": "page.md", "text": "four", "source": "project", "accept": [5, 9], "known": "rounds down",
             "expr": 'one("demo.squares", "squares", x="2").y'}  # fmt: skip
    (root / "claims.yml").write_text(json.dumps([claim]))
    status, said = run(root, capsys)
    assert status == 1 and "missing: demo.squares" in said and "claim" not in said
    (root / "claims.yml").write_text("[{}]")
    assert check.main(["--root", str(root)]) == 1
    assert "claims.yml, claim 1: lacks id" in capsys.readouterr().err


def test_a_malformed_module_is_an_error(root, capsys):
    (root / "snippets/bad.py").write_text("EXPERIMENT = 1\n")
    assert check.main(["--root", str(root)]) == 1
    assert "snippets/bad.py:1" in capsys.readouterr().err
