"""The sweep's bookkeeping: every combination once, a step that cannot be captured is a row that says so."""

import pytest

from snippets.cuda_graph import sweep, sweep_compiled
from snippets.cuda_graph.graphed import CaptureFailed
from snippets.measure import check_tables


def test_smoke():
    settings = sweep.EXPERIMENT["smoke"]
    tables = sweep.measure(**settings)
    check_tables(sweep.EXPERIMENT["tables"], tables)
    rows = tables["steps"]
    assert len(rows) == len(settings["tokens"]) * len(settings["recipes"]) * 4
    assert len({(r["tokens"], r["recipe"], r["way"], r["sync"]) for r in rows}) == len(rows)
    for r in rows:
        assert (r["median_ms"] is None) == (r["way"] == "graph") and ("CUDA" in r["failed"]) == (r["way"] == "graph")
        assert (r["host_ms"] is not None) == (r["way"] == "eager" and r["tokens"] == min(settings["tokens"]))


@pytest.mark.parametrize("first", [0, 1], ids=["eager first", "graph first"])
def test_after_a_broken_capture_nothing_is_measured_and_what_was_is_kept(monkeypatch, first):
    ran = []

    def breaks(self, ids):
        raise CaptureFailed("the capture failed: RuntimeError: no")

    monkeypatch.setattr(sweep.TrainStep, "captured", breaks)
    monkeypatch.setattr(sweep, "WAYS", sweep.WAYS if first == 0 else sweep.WAYS[::-1])
    monkeypatch.setattr(sweep, "timed", lambda *_: ran.append(1) or {"median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0})
    rows = sweep.measure(size="tiny", layers=1, steps=1, tokens=[8, 16], recipes=["hf none"])["steps"]
    assert len(rows) == 8 and len({(r["tokens"], r["way"], r["sync"]) for r in rows}) == 8
    measured = [r for r in rows if not r["failed"]]
    assert len(measured) == len(ran) == (2 if first == 0 else 0) and all(r["way"] == "eager" for r in measured)
    assert all("the capture failed: RuntimeError: no" in r["failed"] for r in rows if r["failed"])


def test_compiled():
    tables = sweep_compiled.measure(**sweep_compiled.EXPERIMENT["smoke"])
    check_tables(sweep_compiled.EXPERIMENT["tables"], tables)
    rows = {(r["way"], r["sync"]): r for r in tables["steps"]}
    assert set(rows) == {(w, s) for w in ("eager", "graph", "default") for s in (False, True)}
    assert rows["default", False]["median_ms"] > 0 and rows["default", False]["capture_s"] > 0 and "CUDA" in rows["graph", True]["failed"]


def test_a_compiler_that_fails_costs_its_own_rows_only(monkeypatch):
    settings = sweep_compiled.EXPERIMENT["smoke"]

    def broken(*_, **__):
        raise RuntimeError("no g++")

    monkeypatch.setattr(sweep_compiled.torch, "compile", lambda *_, **__: broken)
    rows = {(r["way"], r["sync"]): r for r in sweep_compiled.measure(**settings)["steps"]}
    assert rows["default", True]["failed"] == "RuntimeError: no g++" and rows["eager", False]["median_ms"] > 0
