"""Gate 1: wrong formulas are rejected, whoever else agrees with them; fp32-only kernels are judged as such."""

import pytest
import torch
from torch.nn import functional as F

from snippets.precision import controls, gate1, mutants, references
from snippets.precision import stand_ins as s
from snippets.precision.cases import OPS, UsageError, generic, lifted, parse_inputs

MUTANTS = {m.id: m for m in mutants.MUTANTS}
LARGE = ("rms_grid_overflow", "ce_vocab_tail_no_grad")  # wrong only beyond the tiny sizes
CONTROLS = {c.id: c for c in controls.CONTROLS}


def check(name, kernel, **options):
    return gate1.check(OPS[name], kernel, "cpu", level="tiny", **options)


@pytest.mark.parametrize("id", [m.id for m in mutants.MUTANTS if m.expected == "gate1" and m.id not in LARGE])
def test_mutants_meant_for_gate_1_are_rejected(id):
    v = check(MUTANTS[id].op, MUTANTS[id].kernel)
    assert not v.ok and all(f.text for f in v.failed)


def test_rows_beyond_65535_are_tried():
    v = gate1.check(OPS["rms_norm"], mutants.rms_grid_overflow, "cpu", level="cpu", structure=False)
    assert {f.case.split(",")[0] for f in v.failed} == {"R=65537×H=4"}


def test_widths_beyond_a_block_are_tried():
    v = gate1.check(OPS["cross_entropy"], mutants.ce_vocab_tail_no_grad, "cpu", level="cpu", structure=False)
    assert {f.check.split()[0] for f in v.failed} == {"d_logits"}


@pytest.mark.parametrize("id", CONTROLS)
def test_controls_are_accepted(id):
    v = check(CONTROLS[id].op, CONTROLS[id].kernel)
    assert v.ok, v.failed


@pytest.mark.parametrize("id", [m.id for m in mutants.MUTANTS if m.expected == "gate2"])
def test_what_only_rounds_too_early_passes_here(id):
    # Each of these is exact in fp64 by construction: the division of labour between the gates.
    v = check(MUTANTS[id].op, MUTANTS[id].kernel)
    assert v.ok, v.failed


def test_gradcheck_agrees_with_a_consistently_wrong_kernel_and_the_gate_does_not():
    v = check("rms_norm", mutants.rms_eps_outside)
    assert v.gradcheck.endswith("True")
    assert not v.ok


def test_fp32_only_kernels_are_recognised_and_the_report_says_so():
    for kernel in (controls.rms_fp32_only, ):
        v = check("rms_norm", kernel)
        assert v.ok and any("fp64" in n and "fp32" in n for n in v.notes) and not v.gradcheck
    v = check("swiglu", controls.swiglu_fp32_only)
    assert v.ok and any("KeyError" in n for n in v.notes)


def test_a_wrong_fp32_only_kernel_does_not_pass_as_one():
    def wrong(x, w, eps):
        h = x.float()
        return (h / (h.square().mean(-1, keepdim=True).sqrt() + eps) * w.float()).to(x.dtype)

    v = check("rms_norm", wrong)
    assert not v.ok and any("tiny" in f.case for f in v.failed)


def test_a_small_error_in_fp64_is_not_mistaken_for_fp32_arithmetic():
    v = check("rms_norm", lambda x, w, eps: references.rms_norm(x, w, eps) * (1 + 1e-7))
    assert not v.ok and not any("不能以 fp64" in n for n in v.notes)


@pytest.mark.parametrize("why, kernel", [
    ("相对误差", lambda g, u: references.swiglu(g, u) * (1 + 1e-3 * torch.rand(()))),
    ("dtype", lambda g, u: references.swiglu(g, u).half()),
    ("形状", lambda g, u: references.swiglu(g, u).reshape(-1)),
    ("返回 2", lambda g, u: (references.swiglu(g, u), g)),
    ("没有得到梯度", lambda g, u: references.swiglu(g, u.detach())),
    ("AttributeError", lambda g, u: torch.ops.aten.no_such_operator(g)),
])  # fmt: skip
def test_faults_of_form_are_named(why, kernel):
    v = check("swiglu", kernel)
    assert not v.ok
    text = " ".join(f.check + f.text for f in v.failed)
    assert why in text, text


def overwriting(gate, up):
    return mutants.swiglu_overwrites_saved(gate, up)


def test_declared_overwrites_are_noted_instead_of_failed():
    assert not check("swiglu", overwriting).ok
    v = check("swiglu", overwriting, allow=("inputs", "saved"))
    assert v.ok, v.failed
    assert any("就地" in n for n in v.notes)
    assert not check("swiglu", overwriting, allow=("inputs",)).ok


def test_reading_beside_an_input_shows():
    def reads_beyond(gate, up):
        def out(g, u):
            y = s.swiglu_out(g, u)
            if g.is_contiguous():
                beyond = torch.as_strided(g, (1,), (1,), g.storage_offset() + g.numel())
                y = y + 0 * beyond
            return y

        return s.swiglu(gate, up, out=out)

    assert not check("swiglu", reads_beyond).ok


def test_writing_beside_an_own_output_shows():
    def writes_beyond(gate, up):
        def out(g, u):
            y = torch.empty(g.shape, dtype=g.dtype)
            y.copy_(s.swiglu_out(g, u))
            if y.untyped_storage().nbytes() > 8 * (y.storage_offset() + y.numel()):
                torch.as_strided(y, (1,), (1,), y.storage_offset() + y.numel()).zero_()
            return y

        return s.swiglu(gate, up, out=out)

    v = check("swiglu", writes_beyond)
    assert any("边界之外" in f.text for f in v.failed), v.failed


def test_state_left_by_an_earlier_call_shows():
    seen = []

    def remembers_shape(gate, up):
        seen.append(gate.shape)
        y = references.swiglu(gate, up)
        return y if seen.count(gate.shape) == len(seen) or len(seen) < 2 or seen[-2] == gate.shape else y * 2

    assert not check("swiglu", remembers_shape).ok


def test_any_operator_with_a_reference_of_its_own():
    op = generic(parse_inputs("x[R,H] w:weight[H] b[H]"), lifted(layer_norm))
    good = gate1.check(op, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "cpu", level="tiny")
    assert good.ok, good.failed
    bad = gate1.check(op, biased, "cpu", level="tiny")
    assert not bad.ok


def layer_norm(x, w, b):
    h = x.float()
    m = h.mean(-1, keepdim=True)
    return ((h - m) * torch.rsqrt((h - m).square().mean(-1, keepdim=True) + 1e-5) * w + b).to(x.dtype)


def biased(x, w, b):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * w + b


def test_a_reference_that_is_no_fp64_truth_is_refused():
    op = generic(parse_inputs("x[R,H]"), lambda x: x.float().exp())
    with pytest.raises(UsageError, match="float32"):
        gate1.check(op, torch.exp, "cpu", level="tiny")


def test_our_kernels_pass_in_the_interpreter():
    k = pytest.importorskip("snippets.kernels")
    v = gate1.check(OPS["swiglu"], k.swiglu)
    assert v.ok, v.failed
    assert v.gradcheck.endswith("True")
