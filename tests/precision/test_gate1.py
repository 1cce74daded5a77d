"""Gate 1: wrong formulas are rejected, whoever else agrees with them; fp32-only kernels are judged as such."""

import math
import re
import sys

import pytest
import torch
from torch.nn import functional as F

from snippets.precision import controls, gate1, gate2, judge, mutants, references
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


@pytest.mark.parametrize("c", controls.ours(), ids=lambda c: c.id)
@pytest.mark.parametrize("gate", [gate1, gate2], ids=["gate1", "gate2"])
def test_our_kernels_are_accepted_interpreted(c, gate):
    # On a GPU the record says so too, but a record is made late.
    with c.installed():
        v = gate.check(OPS[c.op], c.kernel, "cpu")
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


@pytest.mark.parametrize("name, size, symbol", [
    ("rms_norm", 16384, "H"), ("swiglu", 16384, "N"), ("cross_entropy", 65536, "V"), ("rope", 512, "S"),
])  # fmt: skip
def test_what_is_wrong_only_beyond_a_size_is_found(name, size, symbol):
    op = OPS[name]
    dim = -2 if symbol == "S" else -1

    def beyond(first, *rest, **options):
        n = first.shape[dim]
        return op.reference(torch.cat([first.narrow(dim, 0, size), first.narrow(dim, size, n - size) * 0.5], dim)
                            if n > size else first, *rest, **options)  # fmt: skip

    v = gate1.check(op, beyond, "cpu", level="cpu", structure=False)
    assert not v.ok and all(int(re.search(rf"\b{symbol}=(\d+)", f.case)[1]) > size for f in v.failed)


def test_three_dimensional_inputs_are_tried_with_foreign_strides():
    for name in ("rms_norm", "swiglu"):
        def flat(first, *rest, name=name, **options):
            # The classic: a view where a reshape is due, or strides of a two-dimensional tensor.
            good = OPS[name].reference(first, *rest, **options)
            return good if first.dim() != 3 or first.is_contiguous() else good.flip(1)

        assert not check(name, flat).ok


class WritesGrad(torch.autograd.Function):
    """Adds to .grad by itself, as fused gradient accumulation does, and returns the gradient as well."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.up = up
        ctx.save_for_backward(gate, up)
        return references.swiglu(gate, up)

    @staticmethod
    def backward(ctx, dy):
        d_gate, d_up = s.swiglu_grads(*ctx.saved_tensors, dy)
        ctx.up.grad = d_up.clone()
        return d_gate, d_up


def exits_in_backward(gate, up):
    y = references.swiglu(gate, up)
    if y.requires_grad:
        y.register_hook(lambda g: sys.exit(0))
    return y


def then(action):
    def kernel(gate, up):
        y = references.swiglu(gate, up)
        action()
        return y

    return kernel


@pytest.mark.parametrize("why, kernel", [
    (".grad", WritesGrad.apply),
    ("sys.exit(0)", exits_in_backward),
    ("sys.exit(0)", then(lambda: sys.exit(0))),
    ("grad mode", then(lambda: torch.set_grad_enabled(False))),
    ("default dtype", then(lambda: torch.set_default_dtype(torch.float64))),
    ("default device", then(lambda: torch.set_default_device("meta"))),
    ("matmul precision", then(lambda: torch.set_float32_matmul_precision("medium"))),
    ("deterministic", then(lambda: torch.use_deterministic_algorithms(True))),
    ("随机数种子", then(lambda: torch.manual_seed(0))),
])  # fmt: skip
def test_a_kernel_that_meddles_with_its_caller_is_rejected_and_leaves_nothing_behind(why, kernel):
    before = {n: read() for n, (read, _) in judge.GLOBALS.items()}
    v = check("swiglu", kernel)
    assert not v.ok and any(why in f.text for f in v.failed), v.failed
    assert before == {n: read() for n, (read, _) in judge.GLOBALS.items()}


def test_drawing_random_numbers_is_no_fault():
    v = check("swiglu", then(lambda: torch.rand(3)))
    assert v.ok, v.failed


def no_rows(action):
    def kernel(x, w, eps):
        return s.rms(x, w, eps, dw=lambda terms: terms.sum(0) if len(terms) else action(terms))

    return kernel


def refuses(terms):
    raise ValueError("no rows")


def test_no_rows_at_all_may_be_refused_but_not_answered_wrongly():
    v = check("rms_norm", no_rows(lambda t: torch.full((t.shape[1],), math.nan, dtype=t.dtype)))
    assert [f.check for f in v.failed] == ["零行"]
    v = check("rms_norm", no_rows(refuses))
    assert v.ok and any("R=0" in n and "no rows" in n for n in v.notes)


def test_truths_of_one_reference_under_two_signatures_are_kept_apart():
    def product(x, w):
        return x * w

    for text in ("x[R,H] w:weight[H]", "x[R,H] w[H]", "x[R,H] w:const[H]"):
        v = gate1.check(generic(parse_inputs(text), product), product, "cpu", level="tiny")
        assert v.ok, (text, v.failed)


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


@pytest.mark.parametrize("said, reference", [
    ("float32", lambda x: x.float().exp()),
    ("gradcheck", lambda x: x.float().exp().to(x.dtype)),
    ("NoneType", lambda x: None),
    ("overwrites", lambda x: x.data.mul_(2) * 1),
    ("integers", lambda x: (x * 2, x.argmax(-1))),
    ("integers", lambda x: (x * 2, x > 0)),
    ("domain", torch.log),
    ("sys.exit", lambda x: sys.exit(0)),
    ("grad mode", lambda x: (x.exp(), torch.set_grad_enabled(False))[0]),
])  # fmt: skip
def test_a_reference_that_is_no_fp64_truth_is_refused(said, reference):
    op = generic(parse_inputs("x[R,H]"), reference)
    with pytest.raises(UsageError, match=said):
        gate1.check(op, torch.exp, "cpu", level="tiny")


def test_our_kernels_pass_in_the_interpreter():
    k = pytest.importorskip("snippets.kernels")
    v = gate1.check(OPS["swiglu"], k.swiglu)
    assert v.ok, v.failed
    assert v.gradcheck.endswith("True")
