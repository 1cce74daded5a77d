"""PyTorch references of the operators that Qwen3 uses, for any floating dtype.

Each follows transformers 5.17 ``models/qwen3/modeling_qwen3.py`` and rounds where that code
rounds. One thing differs on purpose: transformers casts to fp32 always, so its module is no
fp64 truth. Here the inner computation runs in ``compute_dtype``: fp64 for fp64 inputs, fp32
otherwise. Plain differentiable PyTorch throughout; autograd gives the reference gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything narrower."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Qwen3RMSNorm: x[..., H], weight[H] → [..., H] in x's dtype.

    Two roundings in bf16, as in transformers: after the normalisation, and after the product.
    """
    h = x.to(compute_dtype(x))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The elementwise part of Qwen3MLP: silu(gate) * up, same shapes [..., N] (silu rounds, then the product)."""
    return F.silu(gate) * up


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) → (-x2, x1) with the halves of the last dimension."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb: q[B, Hq, S, D], k[B, Hk, S, D], cos and sin [B or 1, S, D] → the rotated pair."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rope_tables(positions: Tensor, dim: int, theta: float = 1e6, dtype: torch.dtype = torch.float64):
    """cos and sin [B, S, D] for integer positions [B, S], both halves equal as in Qwen3RotaryEmbedding.

    The angles are computed in fp64; the tables are rounded to ``dtype``.
    """
    inv = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions.double().unsqueeze(-1) * inv
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """transformers' fixed_cross_entropy after its upcast: logits[N, V], labels[N] (int64) → scalar fp32 (fp64 for fp64).

    Mean over the labels that are not ``ignore_index``; with ``num_items_in_batch`` the sum divided by it.
    """
    logits = logits.to(compute_dtype(logits))
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal_lm_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """transformers' ForCausalLMLoss: logits[B, T, V], labels[B, T] → scalar; position t predicts label t + 1."""
    shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), shifted.reshape(-1), ignore_index, num_items_in_batch)
