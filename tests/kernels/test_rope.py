import pytest
import torch
from torch.autograd import gradcheck
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from snippets.kernels import rope
from tests.kernels.common import DEVICE, compare, guarded, no_second_derivative, twice


def inputs(dtype, batch=2, q_heads=4, k_heads=2, length=5, width=8, cos_batch=None, layout="hf"):
    """q and k as Qwen3Attention passes them (transposed views); cos and sin with unequal halves."""

    def heads(n):
        if layout == "hf":
            t = torch.randn(batch, length, n, width, dtype=dtype, device=DEVICE).transpose(1, 2)
        elif layout == "contiguous":
            t = torch.randn(batch, n, length, width, dtype=dtype, device=DEVICE)
        elif layout == "fused":  # a slice of one qkv projection
            t = torch.randn(batch, length, n + 3, width, dtype=dtype, device=DEVICE)[:, :, 2:-1].transpose(1, 2)
        elif layout == "expanded":
            t = torch.randn(batch, 1, length, width, dtype=dtype, device=DEVICE).expand(-1, n, -1, -1)
        else:
            t = torch.randn(batch, n, length, 2 * width, dtype=dtype, device=DEVICE)[..., ::2]
        return t.detach().requires_grad_()

    tables = torch.randn(2, cos_batch or batch, length, width, dtype=dtype, device=DEVICE)
    return heads(q_heads), heads(k_heads), tables[0], tables[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"cos_batch": 1},
        {"q_heads": 32, "k_heads": 8, "width": 128},
        {"q_heads": 5, "k_heads": 3, "width": 6},
        {"q_heads": 2, "k_heads": 7, "width": 2},
        {"q_heads": 40, "k_heads": 1, "width": 256, "length": 2, "batch": 1},
        {"batch": 1, "length": 1},
        {"length": 0},
        {"k_heads": 0},
    ],
    ids=str,
)
def test_equals_reference(shape, dtype):
    compare(rope, apply_rotary_pos_emb, inputs(dtype, **shape))


@pytest.mark.parametrize("layout", ["contiguous", "fused", "expanded", "every_other"])
def test_layouts(layout):
    compare(rope, apply_rotary_pos_emb, inputs(torch.float64, layout=layout))


def test_expanded_tables():
    q, k, cos, sin = inputs(torch.float64)
    compare(rope, apply_rotary_pos_emb, (q, k, cos[:1].expand(2, -1, -1), sin[:, :1].expand(-1, 5, -1)))


def test_batch_rows_use_their_own_positions():
    q, k, cos, sin = inputs(torch.float64)
    first, _ = rope(q, k, cos, sin)
    shared, _ = rope(q, k, cos[:1], sin[:1])
    assert torch.equal(first[0], shared[0]) and not torch.allclose(first[1], shared[1])


def test_memory_order_is_kept_both_ways():
    q, k, cos, sin = inputs(torch.float64)
    q_out, k_out = rope(q, k, cos, sin)
    assert q_out.stride() == q.stride() and k_out.stride() == k.stride()
    dy = [torch.randn_like(t, memory_format=torch.contiguous_format) for t in (q, k)]
    dq, dk = torch.autograd.grad((q_out, k_out), (q, k), dy)
    assert dq.stride() == q.stride() and dk.stride() == k.stride()


def test_gradcheck():
    q, k, cos, sin = inputs(torch.float64, q_heads=2, k_heads=1, length=2, width=4)
    assert gradcheck(lambda q, k: rope(q, k, cos, sin), (q, k))


def test_backward_is_the_adjoint():
    """<rope(x), y> = <x, backward(y)> holds for any table, also where the rotation isn't orthogonal."""
    q, k, cos, sin = inputs(torch.float64)
    outputs = rope(q, k, cos, sin)
    ys = [torch.randn_like(o) for o in outputs]
    xs = torch.autograd.grad(outputs, (q, k), ys)
    left = sum((o * y).sum() for o, y in zip(outputs, ys, strict=True))
    right = sum((x * t).sum() for x, t in zip(xs, (q, k), strict=True))
    torch.testing.assert_close(left, right)


def test_only_q_is_used():
    q, k, cos, sin = inputs(torch.float64)
    dy = torch.randn_like(q)
    ours = torch.autograd.grad(rope(q, k, cos, sin)[0], q, dy)
    theirs = torch.autograd.grad(apply_rotary_pos_emb(q, k, cos, sin)[0], q, dy)
    torch.testing.assert_close(ours, theirs)


def test_inputs_kept_and_backward_repeatable():
    twice(rope, inputs(torch.float64))


def test_neighbours_don_t_matter_and_aren_t_written():
    shapes = [(2, 3, 4, 6), (2, 1, 4, 6), (2, 4, 6), (2, 4, 6)]
    guarded(rope, apply_rotary_pos_emb, shapes, grad=(0, 1))


def test_second_derivative_is_refused():
    no_second_derivative(rope, inputs(torch.float64))


@pytest.mark.parametrize("narrow", [("q",), ("k",), ("q", "k"), ("cos", "sin"), ("q", "sin"), ("q", "k", "cos", "sin")], ids=str)
def test_mixed_dtypes_promote_as_in_transformers(narrow):
    args = dict(zip(("q", "k", "cos", "sin"), inputs(torch.float64), strict=True))
    args |= {n: args[n].detach().float().requires_grad_(n in "qk") for n in narrow}
    compare(rope, apply_rotary_pos_emb, list(args.values()), tolerance=2e-5)


@pytest.mark.parametrize("wanted", [0, 1])
def test_an_output_needs_a_gradient_only_if_its_input_does(wanted):
    args = list(inputs(torch.float64))
    args[1 - wanted] = args[1 - wanted].detach()
    assert [o.requires_grad for o in rope(*args)] == [i == wanted for i in range(2)]
    compare(lambda *a: rope(*a)[wanted], lambda *a: apply_rotary_pos_emb(*a)[wanted], args)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"cos": lambda t: t[:, :2]}, ValueError, "cos has shape"),
        ({"cos": lambda t: t[0], "sin": lambda t: t[0]}, ValueError, "cos has shape"),
        ({"k": lambda t: t[:, :, :3]}, ValueError, "k has"),
        ({"q": lambda t: t[0]}, ValueError, "q has shape"),
        ({n: lambda t: t[..., :5] for n in ("q", "k", "cos", "sin")}, ValueError, "is 5; it must be even"),
        ({"sin": lambda t: t.clone().requires_grad_()}, ValueError, "no gradient"),
        ({"k": lambda t: t.to("meta")}, ValueError, "one device"),
    ],
)
def test_errors(change, error, says):
    args = dict(zip(("q", "k", "cos", "sin"), inputs(torch.float64), strict=True))
    with pytest.raises(error, match=says):
        rope(**{n: change.get(n, lambda t: t)(t) for n, t in args.items()})


@pytest.mark.gpu
def test_more_than_2_31_elements():
    length = 2**31 // (32 * 128) + 3
    q = torch.zeros(1, length, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    k = torch.randn(1, length, 1, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q[:, :, -1] = torch.randn(32, 128, device="cuda")
    cos, sin = torch.randn(2, 1, length, 128, dtype=torch.bfloat16, device="cuda")
    got, want = rope(q, k, cos, sin), rope(q[:, :, -1:], k[:, :, -1:], cos[:, -1:], sin[:, -1:])
    assert all(torch.equal(g[:, :, -1:], w) for g, w in zip(got, want, strict=True)) and not got[0][:, :, 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_gpu_equals_transformers_bit_for_bit(dtype):
    q, k, cos, sin = inputs(dtype, q_heads=32, k_heads=8, length=300, width=128)
    ours, theirs = rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    dys = [torch.randn_like(o) for o in theirs]
    ours += torch.autograd.grad(ours, (q, k), dys)
    theirs += torch.autograd.grad(theirs, (q, k), dys)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
