"""Explicit forward and backward formulas of the four operators, as PyTorch code.

The raw material of ``mutants`` and ``controls``: written the way a fused kernel computes (saved
tensors, one explicit backward), but device-independent, so the gates can be tried on a CPU too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snippets.precision.references import compute_dtype, rotate_half


class Explicit(torch.autograd.Function):
    """Autograd around ``fwd(*tensors) -> (outputs, saved)`` and ``bwd(saved, dys, tensors) -> grads``."""

    @staticmethod
    def forward(ctx, fwd: Callable, bwd: Callable, *tensors: Tensor) -> Any:
        outs, saved = fwd(*tensors)
        ctx.bwd, ctx.count = bwd, len(saved)
        ctx.save_for_backward(*saved, *tensors)
        return outs

    @staticmethod
    def backward(ctx, *dys: Tensor) -> tuple:
        saved = ctx.saved_tensors
        return (None, None, *ctx.bwd(saved[: ctx.count], dys, saved[ctx.count :]))


def explicit(fwd: Callable, bwd: Callable, *tensors: Tensor) -> Any:
    """Call ``Explicit``."""
    return Explicit.apply(fwd, bwd, *tensors)


# ------------------------------------------------------------------------------- RMSNorm


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps), [..., 1], in the compute dtype."""
    c = x.to(compute_dtype(x))
    return torch.rsqrt(c.square().mean(-1, keepdim=True) + eps)


def rms_apply(x: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
    """Normalise, round, scale: Qwen3's order."""
    return w * (x.to(rstd.dtype) * rstd).to(x.dtype)


def rms_dx(x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """Gradient of the input."""
    c = rstd.dtype
    g, xh = dy.to(c) * w.to(c), x.to(c) * rstd
    return (rstd * (g - xh * (g * xh).mean(-1, keepdim=True))).to(x.dtype)


def rms_terms(x: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """[rows, H] summands of the weight's gradient, in the compute dtype."""
    c = rstd.dtype
    h = (x.to(c) * rstd).to(x.dtype).to(c)
    return (dy.to(c) * h).reshape(-1, x.shape[-1])


def sum_chunks(terms: Tensor, rows: int = 16, partial: torch.dtype | None = None, total: torch.dtype | None = None) -> Tensor:
    """Sum over dim 0 through per-program partial sums of ``rows`` rows each.

    Args:
        partial: dtype in which the partials are stored (default: that of the terms).
        total: when given, the partials are added one after the other in this dtype.
    """
    n = math.ceil(terms.shape[0] / rows)
    padded = torch.zeros(n * rows, terms.shape[1], dtype=terms.dtype, device=terms.device)
    padded[: terms.shape[0]] = terms
    parts = padded.view(n, rows, -1).sum(1)
    if partial is not None:
        parts = parts.to(partial).to(terms.dtype)
    if total is None:
        return parts.sum(0)
    acc = torch.zeros(terms.shape[1], dtype=total, device=terms.device)
    for p in parts:
        acc += p.to(total)
    return acc.to(terms.dtype)


def rms(
    x: Tensor,
    w: Tensor,
    eps: float = 1e-6,
    *,
    rstd: Callable[[Tensor, float], Tensor] = rms_rstd,
    out: Callable[[Tensor, Tensor, Tensor], Tensor] = rms_apply,
    dx: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = rms_dx,
    dw: Callable[[Tensor], Tensor] = lambda terms: terms.sum(0),
) -> Tensor:
    """RMSNorm whose parts can be replaced one at a time."""

    def fwd(x, w):
        r = rstd(x, eps)
        return out(x, w, r), (r,)

    def bwd(saved, dys, tensors):
        (r,), (dy,), (x, w) = saved, dys, tensors
        return dx(x, w, r, dy), dw(rms_terms(x, r, dy)).to(w.dtype)

    return explicit(fwd, bwd, x, w)


# -------------------------------------------------------------------------------- SwiGLU


def swiglu_out(gate: Tensor, up: Tensor) -> Tensor:
    """silu rounds to the storage dtype before the product, as in Qwen3MLP."""
    c = compute_dtype(gate)
    g = gate.to(c)
    return (g * torch.sigmoid(g)).to(gate.dtype) * up


def swiglu_grads(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, computed in the compute dtype and rounded once."""
    c = compute_dtype(gate)
    g, u, d = gate.to(c), up.to(c), dy.to(c)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)


def swiglu(gate: Tensor, up: Tensor, *, out: Callable = swiglu_out, grads: Callable = swiglu_grads) -> Tensor:
    """SwiGLU whose parts can be replaced."""
    return explicit(lambda g, u: (out(g, u), ()), lambda _, dys, ts: grads(*ts, dys[0]), gate, up)


# ---------------------------------------------------------------------------------- RoPE


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """x[B, H, S, D] rotated by the tables [B or 1, S, D]; sign -1 turns back. One rounding."""
    c = compute_dtype(x)
    co, si = cos.to(c).unsqueeze(1), sin.to(c).unsqueeze(1)
    return (x.to(c) * co + sign * rotate_half(x.to(c)) * si).to(x.dtype)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    turn: Callable[..., Tensor] = rotate,
    back: Callable[[Sequence[Tensor], Tensor, Tensor], Sequence[Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """RoPE with an explicit backward, which is the rotation by the opposite angle."""

    def fwd(q, k, cos, sin):
        return (turn(q, cos, sin), turn(k, cos, sin)), ()

    def bwd(_, dys, ts):
        cos, sin = ts[2:]
        grads = back(dys, cos, sin) if back else [turn(d, cos, sin, -1.0) for d in dys]
        return (*grads, None, None)

    return explicit(fwd, bwd, q, k, cos, sin)


# ------------------------------------------------------------------------- cross entropy


def lse(z: Tensor) -> Tensor:
    """[N, 1] log-sum-exp in z's dtype."""
    return torch.logsumexp(z, -1, keepdim=True)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    num_items_in_batch: Tensor | int | None = None,
    *,
    lse: Callable[[Tensor], Tensor] = lse,
    count: Callable[[Tensor, Tensor], Any] = lambda keep, n: keep.sum() if n is None else n,
    grad_count: Callable[[Tensor, Tensor], Any] | None = None,
    grad_keep: Callable[[Tensor], Tensor] = lambda keep: keep,
    scale: Callable[[Tensor], Tensor] = lambda dy: dy,
    finish: Callable[[Tensor], Tensor] = lambda d: d,
) -> Tensor:
    """Cross entropy from logits with an explicit gradient, (softmax - onehot) / count · dy."""
    keep = labels != ignore_index
    safe = labels.clamp(min=0)

    def fwd(logits):
        z = logits.to(compute_dtype(logits))
        s = lse(z if logits.dtype == z.dtype else z).to(z.dtype)
        loss = (s - z.gather(-1, safe.unsqueeze(-1))).squeeze(-1).masked_fill(~keep, 0)
        return loss.sum() / count(keep, num_items_in_batch), (s,)

    def bwd(saved, dys, ts):
        (logits,) = ts
        z = logits.to(compute_dtype(logits))
        d = torch.exp(z - saved[0])
        d = d.scatter_add(-1, safe.unsqueeze(-1), torch.full_like(saved[0], -1.0))
        d = d * (scale(dys[0]) / (grad_count or count)(keep, num_items_in_batch))
        return (finish(d.masked_fill(~grad_keep(keep).unsqueeze(-1), 0).to(logits.dtype)),)

    return explicit(fwd, bwd, logits)
