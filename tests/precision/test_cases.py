"""What the gates feed to kernels: values, layouts, guards, the reader's own signature."""

import functools
import math

import pytest
import torch

from snippets.precision import cases, references
from snippets.precision.cases import GUARD, OPS, Setup, UsageError, build, generic, parse_inputs, place, values

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("gate", [1, 2])
def test_every_setup_of_the_small_levels_can_be_built(name, gate):
    op = OPS[name]
    for setup in op.plan(gate, "tiny"):
        case = build(op, setup, torch.float32, CPU)
        outs = cases.as_tuple(op.reference(*case.tensors, **case.call_options))
        assert [o.shape for o in outs] == [p.tensor.shape for p in case.dys]


@pytest.mark.parametrize("name", OPS)
def test_no_gradient_is_constant(name):
    for setup in OPS[name].plan(1, "tiny"):
        for p in build(OPS[name], setup, torch.float64, CPU).dys:
            # One, the gradient of .sum() or of a loss, would hide a backward that ignores it.
            assert not torch.allclose(p.tensor, torch.ones_like(p.tensor), atol=1e-3)
            if p.tensor.numel() > 1:
                assert p.tensor.std() > 0.01


@pytest.mark.parametrize("layout, stride", [
    ("contiguous", (5, 1)), ("transposed", (1, 3)), ("sliced", (29, 1)), ("expanded", (0, 1)), ("expanded_cols", (1, 0)),
])  # fmt: skip
def test_layouts_have_the_strides_they_promise_and_keep_the_values(layout, stride):
    value = torch.arange(15.0).reshape(3, 5)
    if layout == "expanded":
        value = value[:1].expand(3, 5)
    if layout == "expanded_cols":
        value = value[:, :1].expand(3, 5)
    placed = place(value, layout)
    assert placed.tensor.stride() == stride
    assert torch.equal(placed.tensor, value)
    assert placed.buffer[:GUARD].isnan().all() and placed.buffer[-GUARD:].isnan().all()


def test_swapped_is_the_layout_of_an_attention_head():
    assert place(torch.zeros(2, 3, 4, 5), "swapped").tensor.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("where", ["inside", "before", "gap"])
def test_any_write_into_or_beside_an_input_is_noticed(where):
    placed = place(torch.ones(3, 5), "sliced")
    assert not placed.changed()
    if where == "inside":
        placed.tensor[1, 1] = 2
    elif where == "before":
        placed.buffer[GUARD - 1] = 0
    else:
        placed.buffer[GUARD + 2] = 0
    assert placed.changed()


def test_tiny_rows_and_one_sided_data_are_what_they_say():
    gen = torch.Generator().manual_seed(0)
    assert math.isclose(values("tiny4", (50, 100), gen).square().mean().sqrt(), 1e-4, rel_tol=0.05)
    assert values("positive", (50, 100), gen).min() > 0
    assert values("negative", (5, 10), gen).max() <= -100
    rows = values("zero_rows", (9, 4), gen).abs().sum(-1)
    assert (rows == 0).sum() == 3
    with pytest.raises(UsageError, match="nonsense"):
        values("nonsense", (1,), gen)


def test_labels_cover_the_edges_and_the_ignored_share():
    gen = torch.Generator().manual_seed(0)
    y = cases.labels("randn", (1000,), 50, gen, -100)
    assert 0.1 < (y == -100).float().mean() < 0.18
    assert (y == 0).any() and (y == 49).any()
    assert 0.85 < (cases.labels("many_ignored", (1000,), 50, gen, -100) == -100).float().mean() < 0.95
    assert not (cases.labels("none_ignored", (1000,), 50, gen, -100) == -100).any()


def test_rope_rows_have_positions_of_their_own_and_tables_of_equal_halves():
    case = build(OPS["rope"], OPS["rope"].plan(1, "tiny")[0], torch.float64, CPU)
    cos, sin = case.tensors[2:]
    assert not torch.equal(cos[0], cos[1])
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


def test_a_signature_is_parsed():
    args = parse_inputs("x[R,H] w:weight[H] t:const[4,H] labels:int[R]<V logits[R,V]")
    assert [(a.name, a.dims, a.role, a.high) for a in args] == [
        ("x", ("R", "H"), "data", None), ("w", ("H",), "weight", None), ("t", (4, "H"), "const", None),
        ("labels", ("R",), "label", "V"), ("logits", ("R", "V"), "data", None),
    ]  # fmt: skip


@pytest.mark.parametrize("text, said", [
    ("x(R,H)", "x(R,H)"), ("x:complex[R]", "x:complex"), ("x[R] y:int[R]", "bound"), ("y:int[R]<5", "gradient"),
    ("x[0,H]", "start at 1"), ("x[R] y:int[R]<0", "start at 1"), ("x[R] y:int[R]<V", "'V'"), ("x[R] x[R]", "differ"), ("x[R,2a]", "dimension"), ("", "gradient"),
])  # fmt: skip
def test_a_bad_signature_is_refused_with_its_piece(text, said):
    with pytest.raises(UsageError) as e:
        parse_inputs(text)
    assert said in str(e.value)


def test_a_generic_plan_has_odd_widths_many_rows_and_fixed_sizes():
    op = generic(parse_inputs("x[R,H] w:weight[H] p[R,4]"), lambda x, w, p: x * w)
    setups = op.plan(1, "cpu")
    assert any(s.dims["R"] > 65535 for s in setups)
    assert any(s.dims["H"] % 2 for s in setups)
    assert build(op, setups[0], torch.float32, CPU).tensors[2].shape == (setups[0].dims["R"], 4)


def test_a_generic_plan_tells_all_dims_apart_and_makes_each_of_them_long():
    op = generic(parse_inputs("x[B, S, N, D] i:int[R]<S"), lambda x, i: x)
    setups = op.plan(2, "cpu")
    sizes = max(setups, key=lambda s: min(s.dims.values())).dims
    assert len(set(sizes.values())) == len(sizes)
    assert max(s.dims["N"] for s in setups) > 1024 and all(max(s.dims[d] for s in setups) > 16384 for d in "DR")
    # However many widths an operator has, its output stays affordable.
    assert all(s.dims["D"] * s.dims["R"] < 10**7 for s in setups)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, epsilon=1e-6):
        return references.rms_norm(x, w, epsilon)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


class ScaleSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, w, epsilon=1e-6):
        return references.rms_norm(x, w, epsilon)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


class Norm(torch.nn.Module):
    def forward(self, hidden, weight, variance_epsilon=1e-6):
        return references.rms_norm(hidden, weight, variance_epsilon)


def forwarding(*args, **kwargs):
    return Norm()(*args, **kwargs)


@pytest.mark.parametrize("kernel", [Scale.apply, ScaleSetup.apply, Norm(), forwarding, functools.partial(forwarding),
                                    references.rms_norm], ids=["apply", "setup", "module", "forwarding", "partial", "function"])  # fmt: skip
def test_an_option_reaches_every_kind_of_callable(kernel):
    fn, same, notes = cases.adapt(OPS["rms_norm"], kernel)
    assert not notes and any("eps" in s.options for s in same.plan(1, "tiny"))
    assert fn(torch.ones(1, 2), torch.ones(2), eps=3.0).allclose(torch.full((1, 2), 0.5))


class Loss(torch.nn.Module):
    def forward(self, logits, target):
        return references.cross_entropy(logits, target)


@pytest.mark.parametrize("kernel", [Loss(), lambda *a, **k: Loss()(*a, **k)], ids=["module", "wrapper"])
def test_an_option_that_a_callable_lacks_is_noted_and_not_asked_for(kernel):
    _, less, notes = cases.adapt(OPS["cross_entropy"], kernel)
    assert len(notes) == 2 and not any(s.options for s in less.plan(1, "tiny"))


def test_options_go_only_where_the_kernel_knows_them():
    op = OPS["rms_norm"]
    fn, same, notes = cases.adapt(op, lambda x, w, variance_epsilon=1e-6: references.rms_norm(x, w, variance_epsilon))
    assert not notes and any("eps" in s.options for s in same.plan(1, "tiny"))
    assert fn(torch.ones(1, 2), torch.ones(2), eps=3.0).allclose(torch.full((1, 2), 0.5))
    _, less, notes = cases.adapt(op, lambda x, w: references.rms_norm(x, w))
    assert notes and not any("eps" in s.options for s in less.plan(1, "tiny"))


def test_a_lifted_reference_computes_in_fp64_though_its_code_says_float():
    def model_code(x, w, eps=1e-6):
        h = x.to(torch.float32)
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    x, w = torch.randn(3, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    want = references.rms_norm(x, w)
    assert (model_code(x, w) - want).abs().max() > 1e-10
    torch.testing.assert_close(cases.lifted(model_code)(x, w), want, rtol=1e-14, atol=0)
    torch.testing.assert_close(cases.lifted(model_code)(x.bfloat16(), w.bfloat16()), model_code(x.bfloat16(), w.bfloat16()), rtol=0, atol=0)


def test_equal_setups_give_equal_values_and_other_seeds_others():
    op, s = OPS["swiglu"], Setup({"R": 3, "N": 5}, seed=1)
    a, b, c = (build(op, Setup(s.dims, seed=n), torch.bfloat16, CPU).tensors[0] for n in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


# ------------------------------------------------- references against transformers' own code


def test_the_references_equal_transformers_bit_for_bit_in_bf16():
    hf = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    from transformers.loss.loss_utils import ForCausalLMLoss

    torch.manual_seed(0)
    norm = hf.Qwen3RMSNorm(48).bfloat16()
    norm.weight.data.normal_()
    x = torch.randn(3, 48).bfloat16()
    assert torch.equal(references.rms_norm(x, norm.weight, norm.variance_epsilon), norm(x))
    q, k = torch.randn(2, 4, 6, 8).bfloat16(), torch.randn(2, 2, 6, 8).bfloat16()
    cos, sin = references.rope_tables(torch.arange(12).reshape(2, 6), 8, dtype=torch.bfloat16)
    for a, b in zip(references.rope(q, k, cos, sin), hf.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(a, b)
    logits, labels = torch.randn(2, 5, 11).bfloat16(), torch.randint(11, (2, 5))
    labels[0, 2] = -100
    assert torch.equal(references.causal_lm_loss(logits, labels), ForCausalLMLoss(logits, labels, 11))
