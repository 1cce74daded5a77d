"""The cases run compiled as eager, messages are read from inductor's own loggers, and a case that turns out otherwise is not ok."""

import pytest
import torch
from torch._inductor import cudagraph_utils

from snippets.cuda_graph import trees
from snippets.measure import check_tables

CPU = torch.device("cpu")


def test_smoke():
    tables = trees.measure(**trees.EXPERIMENT["smoke"])
    check_tables(trees.EXPERIMENT["tables"], tables)
    assert [(r["ok"], r["failed"]) for r in tables["cases"]] == [(False, "needs a CUDA device")]
    with pytest.raises(ValueError, match="no cases .'nonsense'."):
        trees.measure(names=["nonsense"])


@pytest.mark.parametrize("name", trees.CASES)
def test_cases_run(name):
    function, calls = trees.CASES[name].make(CPU)
    assert all(torch.isfinite(function(*arguments)).all() for arguments in calls)


def test_results_are_compared(monkeypatch):
    monkeypatch.setattr(trees, "recorded", lambda: 1)
    out = trees.seen(trees.CASES["static"], CPU)  # compiled for the CPU, which inductor counts as a skip
    assert out["same"] and out["skips"] == 1 and not out["ok"] and out["breaks"] == 0
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: lambda *a: compile_(f)(*a) + 1)
    assert not trees.seen(trees.CASES["static"], CPU)["same"]


def test_the_state_of_a_case_is_its_own(monkeypatch):
    monkeypatch.setattr(trees, "recorded", lambda: 1)
    assert trees.seen(trees.CASES["static_cache"], CPU)["same"]  # three calls add three times, in eager and compiled alike


def test_messages_are_inductors_own():
    with trees._messages() as seen:
        cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")
    assert seen == ["skipping cudagraphs due to a test"]


@pytest.mark.parametrize(
    ("change", "ok"), [({}, True), ({"graphs": 1}, False), ({"reason": "", "skips": 0}, False), ({"reason": "skipping cudagraphs due to cpu device"}, False), ({"same": False}, False)]
)
def test_judged(change, ok):
    out = {"graphs": 0, "skips": 1, "reason": "skipping cudagraphs due to mutated inputs (1 instances)", "same": True}
    assert trees.judged(trees.CASES["changed_input"], out | change) is ok
