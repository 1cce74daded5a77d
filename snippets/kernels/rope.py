"""Rotary position embedding of q and k in one launch, forward and backward in Triton.

One program takes one token: it loads that token's cos and sin once and turns all its heads. Inputs
and outputs are addressed by strides, so that the transposed views ``[B, H, S, D]`` that
Qwen3Attention makes cost no copy.

The forward is transformers 5.17's ``q * cos + rotate_half(q) * sin`` with both products rounded to
the storage dtype before they are added. With the halves x1, x2 and all D values of cos and sin
(nothing assumes that their halves are equal):

    y1 = x1 c1 - x2 s1        dx1 = dy1 c1 + dy2 s2
    y2 = x2 c2 + x1 s2        dx2 = dy2 c2 - dy1 s1

The right column is the transpose of the left one, not the inverse rotation: the two coincide only
where the halves of cos and sin agree and cos^2 + sin^2 = 1, which scaled RoPE variants violate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from snippets.kernels.common import check_tensors, check_width, compute_dtype, first_derivative_only, on

# Launch parameters; `python -m snippets.kernels.tune` tries others on the GPU at hand.
#   elements: numbers per half-tile; it sets how many heads are turned at a time
CONFIG = {
    "forward": {"elements": 1024, "warps": 4},
    "backward": {"elements": 1024, "warps": 4},
}


# --8<-- [start:forward]
@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, x_head, y_head, c1, c2, s1, s2, d,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    for first in tl.static_range(0, HEADS, BLOCK_HEADS):
        heads = (first + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
        mask = (heads < HEADS) & (d < HALF)[None, :]
        x_at = x_ptr + heads * x_head + d[None, :]
        y_at = y_ptr + heads * y_head + d[None, :]
        stored = tl.load(x_at, mask=mask, other=0.0)
        x1 = stored.to(COMPUTE)
        x2 = tl.load(x_at + HALF, mask=mask, other=0.0).to(COMPUTE)
        # Each product is rounded to the storage dtype before the sum, as in eager PyTorch.
        x1c1 = (x1 * c1[None, :]).to(stored.dtype).to(COMPUTE)
        x2c2 = (x2 * c2[None, :]).to(stored.dtype).to(COMPUTE)
        if BACKWARD:
            y1 = x1c1 + (x2 * s2[None, :]).to(stored.dtype).to(COMPUTE)
            y2 = x2c2 - (x1 * s1[None, :]).to(stored.dtype).to(COMPUTE)
        else:
            y1 = x1c1 - (x2 * s1[None, :]).to(stored.dtype).to(COMPUTE)
            y2 = x2c2 + (x1 * s2[None, :]).to(stored.dtype).to(COMPUTE)
        tl.store(y_at, y1.to(stored.dtype), mask=mask)
        tl.store(y_at + HALF, y2.to(stored.dtype), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _rope(
    q_ptr, k_ptr, qo_ptr, ko_ptr, cos_ptr, sin_ptr, length,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    qo_batch, qo_head, qo_token, ko_batch, ko_head, ko_token,
    cos_batch, cos_token, sin_batch, sin_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BACKWARD: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // length).to(tl.int64)
    t = (tl.program_id(0) % length).to(tl.int64)
    d = tl.arange(0, BLOCK_HALF)
    cos = cos_ptr + b * cos_batch + t * cos_token + d  # a batch stride of 0 serves a shared table
    sin = sin_ptr + b * sin_batch + t * sin_token + d
    c1 = tl.load(cos, mask=d < HALF, other=0.0).to(COMPUTE)
    c2 = tl.load(cos + HALF, mask=d < HALF, other=0.0).to(COMPUTE)
    s1 = tl.load(sin, mask=d < HALF, other=0.0).to(COMPUTE)
    s2 = tl.load(sin + HALF, mask=d < HALF, other=0.0).to(COMPUTE)
    _rotate_heads(
        q_ptr + b * q_batch + t * q_token, qo_ptr + b * qo_batch + t * qo_token, q_head,
        qo_head, c1, c2, s1, s2, d, Q_HEADS, HALF, BACKWARD, COMPUTE, BLOCK_Q,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + b * k_batch + t * k_token, ko_ptr + b * ko_batch + t * ko_token, k_head,
        ko_head, c1, c2, s1, s2, d, K_HEADS, HALF, BACKWARD, COMPUTE, BLOCK_K,
    )  # fmt: skip
# --8<-- [end:forward]


# --8<-- [start:wrapper]
def _unit(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _like(t: torch.Tensor) -> torch.Tensor:
    """Empty, in ``t``'s memory order where it has a dense one (the transposed view of HF stays transposed)."""
    out = torch.empty_like(t)
    return out if out.stride(-1) == 1 else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _run(q, k, q_out, k_out, cos, sin, backward: bool) -> None:
    batch, q_heads, length, width = q.shape
    k_heads = k.shape[1]
    if batch * length * (q_heads + k_heads) == 0:
        return
    config = CONFIG["backward" if backward else "forward"]
    block_half = triton.next_power_of_2(width // 2)
    most = max(1, config["elements"] // block_half)
    per_batch = cos.shape[0] > 1
    # Without fusing into FMA, which would skip the rounding of the products in fp32.
    with on(q):
        _rope[(batch * length,)](
            q, k, q_out, k_out, cos, sin, length,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            cos.stride(0) if per_batch else 0, cos.stride(1), sin.stride(0) if per_batch else 0, sin.stride(1),
            Q_HEADS=q_heads, K_HEADS=k_heads, HALF=width // 2, BLOCK_HALF=block_half,
            BACKWARD=backward, COMPUTE=compute_dtype(q.dtype),
            BLOCK_Q=min(most, triton.next_power_of_2(max(q_heads, 1))),
            BLOCK_K=min(most, triton.next_power_of_2(max(k_heads, 1))),
            num_warps=config["warps"], enable_fp_fusion=False,
        )  # fmt: skip


class RoPEFunction(torch.autograd.Function):
    """Autograd wrapper; use ``rope``."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        q, k, cos, sin = _unit(q), _unit(k), _unit(cos), _unit(sin)
        q_out, k_out = _like(q), _like(k)
        _run(q, k, q_out, k_out, cos, sin, backward=False)
        ctx.save_for_backward(cos, sin)
        ctx.strides = q_out.stride(), k_out.stride()
        needs = ctx.needs_input_grad
        ctx.mark_non_differentiable(*(out for out, need in ((q_out, needs[0]), (k_out, needs[1])) if not need))
        return q_out, k_out

    @staticmethod
    @first_derivative_only
    def backward(ctx, dq_out, dk_out):
        cos, sin = ctx.saved_tensors
        # Attention may return gradients in another order; going back to the order of q and k
        # here spares the norms and projections before RoPE a copy.
        dq = torch.empty_strided(dq_out.shape, ctx.strides[0], dtype=dq_out.dtype, device=dq_out.device)
        dk = torch.empty_strided(dk_out.shape, ctx.strides[1], dtype=dk_out.dtype, device=dk_out.device)
        _run(_unit(dq_out), _unit(dk_out), dq, dk, cos, sin, backward=True)
        return dq, dk, None, None


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions, as ``apply_rotary_pos_emb`` does.

    Args:
        q: ``[B, Hq, S, D]``, any strides; bf16, fp16, fp32 or fp64; D even.
        k: ``[B, Hk, S, D]``. Hq and Hk are independent.
        cos, sin: ``[B, S, D]`` or ``[1, S, D]``, as Qwen3RotaryEmbedding returns them. Of other dtypes
            than q or k, the results have the promoted dtype, as in PyTorch (norms kept in fp32, say).

    Returns:
        Rotated q and k in the memory order of the inputs. Gradients for q and k, once differentiable.

    Raises:
        TypeError, ValueError: unsupported dtypes, devices or shapes; cos or sin that
            require a gradient (transformers computes them under no_grad).
    """
    check_tensors("rope", q=q, k=k, cos=cos, sin=sin)
    shape = q.shape
    if len(shape) != 4 or k.dim() != 4 or (k.shape[0], k.shape[2], k.shape[3]) != (shape[0], shape[2], shape[3]):
        raise ValueError(
            f"rope: q has shape {tuple(q.shape)}, k has {tuple(k.shape)}; expected [B, Hq, S, D] and [B, Hk, S, D]"
        )
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, shape[0]) or cos.shape[1:] != shape[2:]:
        raise ValueError(
            f"rope: cos has shape {tuple(cos.shape)}, sin has {tuple(sin.shape)}; expected "
            f"[{shape[0]} or 1, {shape[2]}, {shape[3]}], one row of all D values per position"
        )
    check_width("rope", "the head dimension", shape[3])
    if shape[3] % 2:
        raise ValueError(f"rope: the head dimension is {shape[3]}; it must be even, since halves are rotated")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope: cos and sin get no gradient here; compute them under torch.no_grad() or detach() them")
    if q.dtype == k.dtype == cos.dtype == sin.dtype:
        return RoPEFunction.apply(q, k, cos, sin)
    # q * cos + rotate_half(q) * sin promotes before it multiplies; so does this. q and k may end up apart.
    table = torch.promote_types(cos.dtype, sin.dtype)
    wide = [torch.promote_types(t.dtype, table) for t in (q, k)]
    if wide[0] == wide[1]:
        return RoPEFunction.apply(q.to(wide[0]), k.to(wide[0]), cos.to(wide[0]), sin.to(wide[0]))
    q_out, k_out = (
        RoPEFunction.apply(t.to(d), t.new_empty((shape[0], 0, *shape[2:]), dtype=d), cos.to(d), sin.to(d))[0]
        for t, d in zip((q, k), wide, strict=True)
    )
    return q_out, k_out
# --8<-- [end:wrapper]
