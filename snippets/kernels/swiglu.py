"""SwiGLU, silu(gate) * up, with forward and backward in Triton.

Purely elementwise, so the kernel's only job is to move each byte once. The forward rounds where
Qwen3MLP of transformers 5.17 rounds: silu in fp32, rounded to the storage dtype, then the product.
In bf16 its exp is the GPU's fast one, so that about one result in 10^4 is the neighbouring number.

The backward keeps neither silu nor sigmoid; with s = sigmoid(gate) it recomputes

    dgate = dy up s (1 + gate (1 - s)),     dup = dy gate s
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from snippets.kernels.common import as_rows, check_tensors, compute_dtype, first_derivative_only, on

# Launch parameters; `python -m snippets.kernels.tune` tries others on the GPU at hand.
#   elements: numbers per program; warps: for them (8 numbers of bf16 are one 16-byte access)
CONFIG = {
    "forward": {"elements": 2048, "warps": 8},
    "backward": {"elements": 2048, "warps": 8},
}


# --8<-- [start:forward]
@triton.jit
def _sigmoid_denominator(x, EXACT: tl.constexpr):
    """1 + exp(-x). PyTorch's silu is x divided by this.

    EXACT rounds exp as PyTorch's CUDA kernel does. It is for fp32 results: in bf16 and fp16 the GPU's
    approximate exp is off by a ten-thousandth of the rounding that follows, and 7 % faster.
    """
    if EXACT:
        return 1.0 + libdevice.exp(-x)  # the CPU interpreter has no libdevice: EXACT is off there
    else:
        return 1.0 + tl.exp(-x)


@triton.jit(do_not_specialize=["tiles_per_row"])
def _forward(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, width, tiles_per_row,
    COMPUTE: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    cols = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    stored = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(COMPUTE)

    gate = stored.to(COMPUTE)
    denominator = _sigmoid_denominator(gate, EXACT)
    silu = tl.div_rn(gate, denominator) if EXACT else gate / denominator
    y = silu.to(stored.dtype).to(COMPUTE) * up  # act_fn returns the storage dtype: round here
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
# --8<-- [end:forward]


# --8<-- [start:backward]
@triton.jit(do_not_specialize=["tiles_per_row"])
def _backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, width, tiles_per_row,
    COMPUTE: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = (pid // tiles_per_row).to(tl.int64)
    cols = (pid % tiles_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(COMPUTE)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(COMPUTE)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(COMPUTE)

    sigmoid = 1.0 / _sigmoid_denominator(gate, EXACT)
    dup = dy * gate * sigmoid
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    # New tensors, never the inputs: someone may use gate or up again, or run backward twice.
    tl.store(dgate_ptr + row * width + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * width + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)
# --8<-- [end:backward]


# --8<-- [start:wrapper]
def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Equal shapes as rows; one single long row where all are contiguous, which leaves no ragged tiles."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]


def _launch(config: dict, rows: torch.Tensor) -> tuple[tuple[int], int, int, dict]:
    n, width = rows.shape
    tiles = triton.cdiv(width, config["elements"])
    exact = rows.is_cuda and rows.dtype == torch.float32
    meta = {"COMPUTE": compute_dtype(rows.dtype), "EXACT": exact, "BLOCK": config["elements"],
            "num_warps": config["warps"]}  # fmt: skip
    return (n * tiles,), width, tiles, meta


class SwiGLUFunction(torch.autograd.Function):
    """Autograd wrapper; use ``swiglu``."""

    @staticmethod
    def forward(ctx, gate, up):
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if y.numel():
            g, u = _rows(gate, up)
            grid, width, tiles, meta = _launch(CONFIG["forward"], g)
            with on(gate):
                _forward[grid](g, u, y, g.stride(0), u.stride(0), width, tiles, **meta)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty_like(dgate)
        if dgate.numel():
            d, g, u = _rows(dy, gate, up)
            grid, width, tiles, meta = _launch(CONFIG["backward"], g)
            with on(gate):
                _backward[grid](
                    d, g, u, dgate, dup, d.stride(0), g.stride(0), u.stride(0), width, tiles, **meta
                )  # fmt: skip
        return dgate, dup


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` as Qwen3MLP computes it between its projections.

    Args:
        gate, up: ``[..., W]`` of one shape and dtype (bf16, fp16, fp32 or fp64), any strides, for
            example the two halves of one fused projection. W is not limited.

    Returns:
        A contiguous tensor of the same shape. Gradients for both, once differentiable.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes that differ or aren't supported.
    """
    check_tensors("swiglu", gate=gate, up=up)
    if gate.dtype != up.dtype:
        raise TypeError(f"swiglu: gate is {gate.dtype}, up is {up.dtype}; convert one of them")
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(
            f"swiglu: gate has shape {tuple(gate.shape)}, up has {tuple(up.shape)}; they must be equal and have at "
            "least one dimension. Broadcast with expand() first"
        )
    return SwiGLUFunction.apply(gate, up)
# --8<-- [end:wrapper]
