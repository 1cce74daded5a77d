import pytest
import torch
from torch.autograd import gradcheck

from snippets.kernels import rms_norm
from tests.kernels.common import DEVICE, compare, embedded, guarded, no_second_derivative, twice

EPS = 1e-6


def reference(x, w, eps=EPS):
    """Qwen3RMSNorm.forward with fp64 kept in fp64."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return w * normed.to(x.dtype)


def inputs(shape, dtype, scale=1.0):
    x = (torch.randn(shape, dtype=dtype, device=DEVICE) * scale).requires_grad_()
    w = torch.randn(shape[-1], dtype=dtype, device=DEVICE, requires_grad=True)
    return x, w


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4096), (3, 5, 7), (2, 3, 4, 128), (37, 129), (70, 128), (0, 16), (5,), (3, 1000)]
)
def test_equals_reference(shape, dtype):
    compare(rms_norm, reference, inputs(shape, dtype))


def test_tiny_rows_show_where_eps_is_added():
    compare(rms_norm, reference, inputs((4, 33), torch.float64, scale=1e-4))


def test_eps_is_not_ignored():
    x, w = inputs((4, 33), torch.float64)
    compare(lambda x, w: rms_norm(x, w, 0.5), lambda x, w: reference(x, w, 0.5), (x, w))


def test_widest_row():
    compare(rms_norm, reference, inputs((2, 32768), torch.float32))


def test_more_row_blocks_than_persistent_programs():
    # Every program walks several blocks and the last block is ragged.
    compare(rms_norm, reference, inputs((16 * 64 + 3, 128), torch.float64))


def test_more_than_65535_rows():
    compare(rms_norm, reference, inputs((65537, 4), torch.float64))


def test_gradcheck():
    assert gradcheck(rms_norm, inputs((2, 3, 5), torch.float64))


@pytest.mark.parametrize("change", ["transposed", "every_other", "expanded", "sliced_rows"])
def test_noncontiguous_input(change):
    x = embedded((4, 6, 10), torch.float64, change).requires_grad_()
    w = torch.randn(20, dtype=torch.float64, device=DEVICE)[::2].detach().requires_grad_()
    compare(rms_norm, reference, (x, w))


def test_weight_of_another_dtype_promotes():
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(8, device=DEVICE, dtype=torch.float64, requires_grad=True)
    y = rms_norm(x, w)
    assert y.dtype == torch.float64
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and w.grad.dtype == torch.float64
    compare(rms_norm, lambda x, w: w * reference(x, torch.ones_like(x[0])), (x, w), tolerance=1e-6)


def test_without_weight_gradient():
    x, w = inputs((5, 12), torch.float64)
    dy = torch.randn_like(x)
    (only,) = torch.autograd.grad(rms_norm(x, w.detach()), x, dy)
    (both, _) = torch.autograd.grad(rms_norm(x, w), (x, w), dy)
    assert torch.equal(only, both)


def test_inputs_kept_and_backward_repeatable():
    twice(rms_norm, inputs((9, 40), torch.float64))


@pytest.mark.parametrize("width", [5, 100])
def test_neighbours_don_t_matter_and_aren_t_written(width):
    guarded(rms_norm, reference, [(7, width), (width,)])


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: (torch.ones(2, 4, dtype=torch.int32), torch.ones(4)), TypeError, "int32.*float32"),
        (lambda: (torch.ones(2, 4), torch.ones(5)), ValueError, "weight has shape"),
        (lambda: (torch.ones(1, 32769), torch.ones(32769)), ValueError, "32769.*1 to 32768"),
        (lambda: (torch.ones(2, 0), torch.ones(0)), ValueError, "last dimension is 0"),
        (lambda: (torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "one device"),
        (lambda: (torch.ones(2, 4), [1.0] * 4), TypeError, "weight is a list"),
    ],
)
def test_errors(make, error, says):
    args = [t.to(DEVICE) if isinstance(t, torch.Tensor) and t.device.type == "cpu" else t for t in make()]
    with pytest.raises(error, match=says):
        rms_norm(*args)


def test_second_derivative_is_refused():
    no_second_derivative(rms_norm, inputs((2, 3), torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 4096), (4096, 8, 128)])
def test_bf16_on_gpu_rounds_like_transformers(shape):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    module = Qwen3RMSNorm(shape[-1]).cuda().bfloat16()
    torch.nn.init.normal_(module.weight)
    x = torch.randn(shape, device="cuda").bfloat16()
    ours, theirs = rms_norm(x, module.weight), module(x)
    # Only the order of the fp32 sum differs: a last bit of rstd, which seldom crosses a bf16 boundary.
    assert (ours != theirs).float().mean() < 1e-3
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=0)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    x = torch.zeros(65537, 32768, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(32768, device="cuda")
    w = torch.randn(32768, device="cuda").bfloat16()
    last = x[-1:].clone().requires_grad_()
    want = rms_norm(last, w)
    (dx,) = torch.autograd.grad(want.sum(), last)
    x.requires_grad_()
    y = rms_norm(x, w)
    assert torch.equal(y[-1:], want) and not y[0].any()
    (got,) = torch.autograd.grad(y, x, torch.ones((), dtype=y.dtype, device="cuda").expand(y.shape))
    assert torch.equal(got[-1:], dx)


@pytest.mark.gpu
def test_two_runs_agree_bit_for_bit():
    x = torch.randn(5000, 4096, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(4096, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    first, second = (torch.autograd.grad(rms_norm(x, w), (x, w), dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
