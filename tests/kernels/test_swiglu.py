import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.functional import silu

from snippets.kernels import swiglu
from tests.kernels.common import DEVICE, compare, embedded, guarded, no_second_derivative, twice


def reference(gate, up):
    return silu(gate) * up


def inputs(shape, dtype, scale=1.0):
    return [(torch.randn(shape, dtype=dtype, device=DEVICE) * scale).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 5, 7), (2, 12288), (9, 4097), (0, 8), (8, 0)])
def test_equals_reference(shape, dtype):
    compare(swiglu, reference, inputs(shape, dtype))


def test_large_gates_saturate():
    compare(swiglu, reference, inputs((4, 50), torch.float64, scale=300.0))


def test_gradcheck():
    assert gradcheck(swiglu, inputs((3, 7), torch.float64))


def test_gradcheck_on_views():
    def two_halves(fused):
        return swiglu(*fused.chunk(2, -1))

    assert gradcheck(two_halves, torch.randn(3, 10, dtype=torch.float64, device=DEVICE, requires_grad=True))


@pytest.mark.parametrize("change", ["transposed", "every_other", "expanded", "sliced_rows"])
def test_noncontiguous_input(change):
    gate = embedded((3, 4, 6), torch.float64, change).requires_grad_()
    up = torch.randn(3, 4, 6, dtype=torch.float64, device=DEVICE, requires_grad=True)
    compare(swiglu, reference, (gate, up))
    compare(swiglu, reference, (up, gate))


def test_inputs_kept_and_backward_repeatable():
    twice(swiglu, inputs((9, 40), torch.float64))


def test_second_derivative_is_refused():
    no_second_derivative(swiglu, inputs((2, 3), torch.float64))


@pytest.mark.parametrize("width", [5, 64])
def test_neighbours_don_t_matter_and_aren_t_written(width):
    guarded(swiglu, reference, [(7, width), (7, width)])


@pytest.mark.parametrize(
    ("gate", "up", "error", "says"),
    [
        (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.float64), TypeError, "float32.*float64"),
        (torch.ones(2, 4), torch.ones(1, 4), ValueError, r"\(2, 4\).*expand"),
        (torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4), TypeError, "int64"),
        (torch.ones(2, 4), torch.ones(2, 4, device="meta"), ValueError, "one device"),
    ],
)
def test_errors(gate, up, error, says):
    with pytest.raises(error, match=says):
        swiglu(*(t.to(DEVICE) if t.device.type == "cpu" else t for t in (gate, up)))


@pytest.mark.gpu
def test_forward_on_gpu_beside_transformers():
    gate, up = (torch.randn(500, 12288, device="cuda") * 4 for _ in range(2))
    assert torch.equal(swiglu(gate, up), reference(gate, up))  # fp32: bit for bit
    gate, up = gate.bfloat16(), up.bfloat16()
    got, want = swiglu(gate, up), reference(gate, up)
    # bf16: where the fast exp tips a rounding, silu is the neighbouring number, and so is the product.
    differ = got != want
    assert differ.float().mean() < 1e-3
    assert ((got - want).abs()[differ] <= 2**-6 * want.abs()[differ]).all()


@pytest.mark.gpu
def test_more_than_2_31_elements():
    gate = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    gate[-3:] = 1.0
    y = swiglu(gate, gate)
    assert torch.equal(y[-3:], reference(gate[-3:], gate[-3:])) and not y[:-3].any()
