"""The matrix and the gates' experiment: enough kernels, declared rows, honest summary."""

import importlib

import pytest
import torch

from snippets.measure import MeasureError, check_tables
from snippets.precision import controls, gates, matrix, mutants


def test_there_are_enough_kernels_with_ids_of_their_own():
    ids = [e.id for e in [*mutants.MUTANTS, *controls.CONTROLS]]
    assert len(ids) == len(set(ids))
    assert len(mutants.MUTANTS) >= 20 and len(controls.CONTROLS) >= 8
    assert {m.expected for m in mutants.MUTANTS} == {"gate1", "gate2"}
    assert {m.op for m in mutants.MUTANTS} == {c.op for c in controls.CONTROLS}


def test_rows_match_the_declaration_and_the_verdicts_are_as_expected():
    settings = matrix.EXPERIMENT["smoke"] | {
        "only": ["swiglu_wrong_derivative", "swiglu_sigmoid_bf16", "rope_one_rounding"], "trained": [],
    }  # fmt: skip
    tables = matrix.measure(**settings)
    check_tables(matrix.EXPERIMENT["tables"], tables)
    rows = {r["id"]: r for r in tables["matrix"]}
    assert rows["swiglu_wrong_derivative"]["caught_by"] == "Gate 1"
    assert (rows["swiglu_sigmoid_bf16"]["gate1"], rows["swiglu_sigmoid_bf16"]["gate2"]) == ("通过", "拒绝")
    assert rows["rope_one_rounding"]["caught_by"] == "无" and rows["rope_one_rounding"]["gate3"] == "未跑"
    assert all(r["ok"] for r in rows.values())
    assert {s["kind"]: (s["count"], s["caught"]) for s in tables["summary"]} == {"变异": (2, 2), "对照": (1, 0)}


def test_a_mutant_caught_by_another_gate_than_expected_is_not_ok():
    entry = mutants.Mutant("x", "swiglu", mutants.swiglu_gelu, "gate2", "")
    row = matrix.row(entry, None, torch.device("cpu"), "tiny")
    assert row["caught_by"] == "Gate 1" and not row["ok"]


def test_an_unknown_id_is_refused():
    with pytest.raises(MeasureError, match="nobody"):
        matrix.measure(**(matrix.EXPERIMENT["smoke"] | {"only": ["nobody"]}))


def test_the_trained_ids_exist():
    known = {e.id for e in [*mutants.MUTANTS, *controls.CONTROLS]}
    for mode in ("full", "smoke"):
        assert set(matrix.EXPERIMENT[mode]["trained"]) <= known


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's sizes")
def test_the_gates_experiment_on_our_kernels():
    pytest.importorskip("snippets.kernels")
    tables = gates.measure(ops=["swiglu"], impls=["ours"], seed=0)
    check_tables(gates.EXPERIMENT["tables"], tables)
    assert all(r["ok"] for r in tables["verdict"] + tables["ratio"])
    assert tables["gradcheck"][0]["passed"] and "gradcheck(swiglu" in tables["gradcheck"][0]["text"]
    wrong = tables["gradcheck"][-1]
    assert wrong["impl"] == "mutant" and wrong["passed"] and "\nTrue\n" in wrong["text"] and "Gate 1 拒绝：out" in wrong["text"]
    with pytest.raises(MeasureError, match="CUDA"):
        gates.measure(ops=["swiglu"], impls=["liger"], seed=0)


def test_halved_blocks_are_restored():
    pytest.importorskip("snippets.kernels")
    swiglu = importlib.import_module("snippets.kernels.swiglu")
    c = controls.Control("x", "swiglu", lambda: None, "", config="swiglu")
    before = {k: dict(v) for k, v in swiglu.CONFIG.items()}
    with pytest.raises(RuntimeError), c.installed():
        assert swiglu.CONFIG["forward"]["elements"] * 2 == before["forward"]["elements"]
        raise RuntimeError
    assert swiglu.CONFIG == before
