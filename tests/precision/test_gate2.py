"""Gate 2: rounding that PyTorch doesn't do is rejected; other correct roundings are not."""

import math

import pytest
import torch

from snippets.precision import controls, gate2, judge, mutants, references
from snippets.precision import stand_ins as s
from snippets.precision.cases import OPS, Setup, build, generic, parse_inputs

CPU = torch.device("cpu")
FAST = {"rms_square_in_storage_dtype": "cpu", "rms_dw_bf16_accumulation": "cpu"}  # these need long rows or many


@pytest.mark.parametrize("m", [m for m in mutants.MUTANTS if m.expected == "gate2" and m.id not in FAST], ids=lambda m: m.id)
def test_mutants_meant_for_gate_2_are_rejected_at_small_sizes_already(m):
    v = gate2.check(OPS[m.op], m.kernel, "cpu", level="tiny", structure=False)
    assert not v.ok


@pytest.mark.parametrize("id", FAST)
def test_mutants_that_need_size_are_rejected_in_bf16(id):
    m = next(m for m in mutants.MUTANTS if m.id == id)
    v = gate2.check(OPS[m.op], m.kernel, "cpu", level="cpu", dtypes=[torch.bfloat16], structure=False)
    assert not v.ok and any("bf16" in f.check for f in v.failed)


@pytest.mark.parametrize("c", [c for c in controls.CONTROLS if c.op not in ("rms_norm", "head_norm")], ids=lambda c: c.id)
@pytest.mark.parametrize("seed", [0, 5])
def test_controls_are_accepted_in_bf16_and_fp32(c, seed):
    v = gate2.check(OPS[c.op], c.kernel, "cpu", level="cpu", structure=seed == 0, seed=seed)
    assert v.ok, v.failed
    assert {m.dtype for m in v.measured} == {"bf16", "fp32"}


@pytest.mark.parametrize("c", [c for c in controls.CONTROLS if c.op == "rms_norm"], ids=lambda c: c.id)
def test_norm_controls_are_accepted_on_small_tensors_under_many_seeds(c):
    # Small tensors are where luck decides: a lucky baseline must not fail a correct kernel.
    op = OPS["rms_norm"]
    for seed in range(40):
        for r, h in ((1, 7), (3, 33), (9, 64)):
            case = build(op, Setup({"R": r, "H": h}, seed=seed), torch.bfloat16, CPU)
            p = judge.prepare(case)
            for stat in judge.stats(p, judge.run(lambda x, w, eps: c.kernel(x, w, eps), case)):
                assert stat.ok, (seed, r, h, stat)


def test_rounding_the_inner_value_is_hidden_in_bf16_and_plain_in_fp32():
    # On plain data at Qwen3's order of rounding, output: the error of rstd drowns in that of the result.
    case = {d: judge.prepare(build(OPS["rms_norm"], Setup({"R": 300, "H": 256}), d, CPU)) for d in (torch.bfloat16, torch.float32)}
    ratio = {d: judge.stats(p, judge.run(mutants.rms_rstd_bf16, p.case))[0] for d, p in case.items()}
    assert ratio[torch.bfloat16].ok and ratio[torch.bfloat16].rms_ratio < 1.5
    assert not ratio[torch.float32].ok and ratio[torch.float32].rms_ratio > 100


def test_the_reference_itself_has_ratio_one_at_most():
    v = gate2.check(OPS["rope"], references.rope, "cpu", level="cpu", structure=False)
    assert v.ok and max(m.stat.max_ratio for m in v.measured) <= 1.0 + 1e-9


def test_a_nan_is_rejected_where_the_reference_is_finite():
    def poisoned(gate, up):
        y = references.swiglu(gate, up)
        return y.index_put((torch.tensor(0),), torch.full_like(y[0], math.nan))

    v = gate2.check(OPS["swiglu"], poisoned, "cpu", level="tiny", structure=False)
    assert any("NaN" in f.text for f in v.failed)


def test_a_baseline_without_any_error_fails_nobody():
    # Copying is exact, so the baseline's error is 0 and the ratio would be x/0 without a floor.
    op = generic(parse_inputs("x[R,H]"), lambda x: x * 1)
    v = gate2.check(op, lambda x: (x.double() * (1 + 2.0**-40)).to(x.dtype), "cpu", level="cpu", structure=False)
    assert v.ok, v.failed
    v = gate2.check(op, lambda x: (x.double() * 1.02).to(x.dtype), "cpu", level="cpu", structure=False)
    assert not v.ok


def test_ulp_is_the_spacing_of_the_dtype():
    x = torch.tensor([1.0, 1.5, 2.0, 3.9, 0.0], dtype=torch.float64)
    assert judge.ulp(x, torch.bfloat16)[:4].tolist() == [2**-7, 2**-7, 2**-6, 2**-6]
    assert judge.ulp(x, torch.bfloat16)[4] > 0


def test_every_order_of_addition_is_accepted_in_fp32():
    orders = [lambda t: t.sum(0), lambda t: t.cumsum(0)[-1], lambda t: t.flip(0).cumsum(0)[-1], lambda t: s.sum_chunks(t, 7)]
    for dw in orders:
        for setup in (Setup({"R": 2050, "H": 32}), Setup({"R": 2050, "H": 32}, family="positive", dy="positive")):
            case = build(OPS["rms_norm"], setup, torch.float32, CPU)
            p = judge.prepare(case)
            for stat in judge.stats(p, judge.run(lambda x, w, eps, dw=dw: s.rms(x, w, eps, dw=dw), case)):
                assert stat.ok, stat


def test_the_interpreter_is_told_apart_from_plain_pytorch(monkeypatch):
    k = pytest.importorskip("snippets.kernels")
    if torch.cuda.is_available():
        pytest.skip("without a GPU only")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert judge.level_of(k.swiglu, OPS["swiglu"], CPU) == "tiny"
    assert judge.level_of(references.swiglu, OPS["swiglu"], CPU) == "cpu"


def test_the_interpreter_s_bf16_is_left_out_with_a_note():
    v = gate2.check(OPS["swiglu"], references.swiglu, "cpu", level="tiny", structure=False)
    assert v.ok and {m.dtype for m in v.measured} == {"fp32"} and any("bf16" in n for n in v.notes)
