"""RMSNorm with forward and backward in Triton: rows of any width up to 32768.

Covers both norms of Qwen3: over the hidden size (4096 for the 8B) and per head (q_norm, k_norm,
128), where one program takes many short rows.

The forward rounds where Qwen3RMSNorm of transformers 5.17 rounds: fp32 statistics, the normalised
value rounded to the input dtype, then multiplied by the weight. The one liberty is fp64 input:
transformers computes it in fp32, this kernel in fp64, so that gradcheck can be applied.

The backward follows from y_i = w_i x_i r with r = (mean(x^2) + eps)^(-1/2):

    dx = r (w dy - x r^2 mean(w dy x)),     dw = sum over rows of dy x r
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from snippets.kernels.common import (
    accumulate_dtype, as_rows, check_tensors, check_width, compute_dtype, first_derivative_only, on, processors, shared_bytes,
)  # fmt: skip

# Launch parameters; `python -m snippets.kernels.tune` tries others on the GPU at hand.
#   elements: numbers that one program holds at a time; short rows are packed until it is reached
#   warps: for `elements` numbers; wider rows get more, up to 32
#   waves: programs per multiprocessor of the persistent backward
#   stages: how many row blocks ahead the backward loads
#   columns: least width of a program of the second stage (16 numbers of fp32 are two memory sectors)
#   "narrow" applies to rows of at most NARROW numbers, that is to q_norm and k_norm
NARROW = 512
REDUCTION_BYTES = 8 << 10  # shared memory that is left to the reductions
CONFIG = {
    "forward": {"elements": 4096, "warps": 8},
    "forward_narrow": {"elements": 1024, "warps": 2},
    "backward": {"elements": 8192, "warps": 16, "waves": 1, "stages": 3},
    "backward_narrow": {"elements": 8192, "warps": 8, "waves": 2, "stages": 1},
    "reduce": {"elements": 2048, "columns": 16, "warps": 4},
}


# --8<-- [start:forward]
@triton.jit(do_not_specialize=["n_rows"])
def _forward(
    x_ptr, w_ptr, y_ptr, x_stride, n_rows,
    WIDTH: tl.constexpr, EPS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    # int64: a tensor of more than 2^31 elements overflows 32-bit offsets.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_WIDTH)
    mask = (rows < n_rows)[:, None] & (cols < WIDTH)[None, :]

    stored = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    x = stored.to(COMPUTE)
    w = tl.load(w_ptr + cols, mask=cols < WIDTH, other=0.0).to(COMPUTE)

    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + EPS)
    normed = (x * rstd[:, None]).to(stored.dtype).to(COMPUTE)  # the rounding of .to(input_dtype)
    y = w[None, :] * normed
    tl.store(y_ptr + rows[:, None] * WIDTH + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
# --8<-- [end:forward]


# --8<-- [start:backward]
@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def _backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, dy_stride, x_stride, n_rows, n_blocks,
    WIDTH: tl.constexpr, EPS: tl.constexpr, COMPUTE: tl.constexpr, NEEDS_DW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_WIDTH)
    inside = cols < WIDTH
    w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(COMPUTE)
    dw = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=COMPUTE)

    # Persistent: a fixed number of programs walks over all rows, so that dw stays in registers
    # and only one partial row per program is written.
    for block in tl.range(pid, n_blocks, tl.num_programs(0), num_stages=STAGES):
        rows = block * tl.full([], BLOCK_ROWS, tl.int64) + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n_rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)

        # The row is here anyway: computing rstd again is free and spares a tensor. Both sums are
        # reduced as one pair, so that the program's threads meet at one barrier, not at two.
        wdy = w[None, :] * dy
        squares, products = tl.split(tl.sum(tl.join(x * x, wdy * x), axis=1))
        # A row past the end is all zeros: with eps = 0 its rstd would be inf, its normed NaN, and dw with it.
        rstd = tl.where(rows < n_rows, tl.rsqrt(squares / WIDTH + EPS), 0.0)
        normed = x * rstd[:, None]
        correlation = products * rstd / WIDTH
        dx = (wdy - normed * correlation[:, None]) * rstd[:, None]
        tl.store(dx_ptr + rows[:, None] * WIDTH + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DW:
            dw += dy * normed

    if NEEDS_DW:
        tl.store(partial_ptr + pid.to(tl.int64) * WIDTH + cols, tl.sum(dw, axis=0), mask=inside)


@triton.jit
def _sum_partials(partial_ptr, dw_ptr, n_partials, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Second stage: a fixed order instead of atomics, so that two runs agree bit for bit.
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=partial_ptr.dtype.element_ty)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_partials)[:, None] & (cols < WIDTH)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < WIDTH)
# --8<-- [end:backward]


def _blocks(config: dict, width: int) -> tuple[int, int, int]:
    """(rows per program, padded width, warps) for one direction."""
    padded = triton.next_power_of_2(width)
    rows = max(1, config["elements"] // padded)
    warps = config["warps"]
    while warps < 32 and rows * padded > config["elements"] * warps // config["warps"]:
        warps *= 2
    return rows, padded, warps


def _stages(config: dict, elements: int, itemsize: int, shared: int) -> int:
    """Row blocks to load ahead. x and dy of each wait in shared memory; rows too wide for that get none."""
    needed = config["stages"] * config["waves"] * 2 * elements * itemsize
    return config["stages"] if needed <= shared - REDUCTION_BYTES else 1


# --8<-- [start:wrapper]
class RMSNormFunction(torch.autograd.Function):
    """Autograd wrapper; use ``rms_norm``."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        width = x.shape[-1]
        rows = as_rows(x)
        n = rows.shape[0]
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
        if n:
            block_rows, block_width, warps = _blocks(CONFIG["forward_narrow" if width <= NARROW else "forward"], width)
            with on(x):
                _forward[(triton.cdiv(n, block_rows),)](
                    rows, weight.contiguous(), y, rows.stride(0), n,
                    WIDTH=width, EPS=eps, COMPUTE=compute_dtype(y.dtype),
                    BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, num_warps=warps,
                )  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        rows, dy_rows = as_rows(x), as_rows(dy)
        n = rows.shape[0]
        needs_dw = ctx.needs_input_grad[1]
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not n:
            return dx, torch.zeros_like(weight) if needs_dw else None, None

        config = CONFIG["backward_narrow" if width <= NARROW else "backward"]
        block_rows, block_width, warps = _blocks(config, width)
        blocks = triton.cdiv(n, block_rows)
        programs = min(processors(x.device) * config["waves"], blocks)
        itemsize = max(x.element_size(), dy.element_size())
        accumulate = accumulate_dtype(dy.dtype)
        partial = torch.empty((programs, width), dtype=accumulate, device=x.device) if needs_dw else dx
        dw = torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if needs_dw else None
        with on(x):
            _backward[(programs,)](
                dy_rows, rows, weight.contiguous(), dx, partial, dy_rows.stride(0), rows.stride(0), n, blocks,
                WIDTH=width, EPS=ctx.eps, COMPUTE=compute_dtype(dy.dtype), NEEDS_DW=needs_dw,
                BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, num_warps=warps,
                STAGES=_stages(config, block_rows * block_width, itemsize, shared_bytes(x.device)),
            )  # fmt: skip
            if needs_dw:
                reduce = CONFIG["reduce"]
                per_processor = triton.cdiv(width, processors(x.device))
                columns = max(reduce["columns"], triton.next_power_of_2(per_processor))
                _sum_partials[(triton.cdiv(width, columns),)](
                    partial, dw, programs, WIDTH=width, ROWS=max(1, reduce["elements"] // columns), COLUMNS=columns,
                    num_warps=reduce["warps"],
                )  # fmt: skip
        return dx, dw, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))`` over the last dimension, as Qwen3RMSNorm computes it.

    Args:
        x: ``[..., W]``, any strides, 1 <= W <= 32768; bf16, fp16, fp32 or fp64.
        weight: ``[W]``. Of another dtype than ``x``, the result has the promoted dtype, as in PyTorch.
        eps: added to the mean square inside the root.

    Returns:
        A contiguous tensor of ``x``'s shape. Gradients for ``x`` and ``weight``, once differentiable.

    Raises:
        TypeError, ValueError: unsupported dtype, device, width or shape; the message says which.
    """
    check_tensors("rms_norm", x=x, weight=weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, x has {tuple(x.shape)}; "
            "weight must be one-dimensional and as long as x's last dimension"
        )
    check_width("rms_norm", "the last dimension", x.shape[-1])
    return RMSNormFunction.apply(x, weight, float(eps))
# --8<-- [end:wrapper]
