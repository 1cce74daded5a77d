"""The loss without the logits: lm_head and cross-entropy over slices of the sequence.

For Qwen3-8B the logits of one token take 297 KiB in bf16, more than the 36 stored layer inputs together
(288 KiB), and they peak together with everything that checkpointing left. So once checkpointing
works, they are next. Here only one slice of them exists at a time: its logits, their
gradient written over them, and two matrix products that turn it into the gradients of the hidden states
and of the weight. The forward does all that, as Liger's fused linear cross-entropy does (0.8.5); the
backward only scales. No product is computed twice.

Against one matrix product over all rows, the weight's gradient is rounded to its dtype once a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snippets.kernels import cross_entropy
from snippets.kernels.common import accumulate_dtype, first_derivative_only


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, items, ignore_index, slices):
        rows = hidden.reshape(-1, hidden.shape[-1])
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(rows) if wants_hidden else None
        d_weight = None
        total = torch.zeros((), dtype=accumulate_dtype(hidden.dtype), device=hidden.device)
        for part, part_labels, out in zip(
            rows.chunk(slices), labels.chunk(slices), d_hidden.chunk(slices) if wants_hidden else [None] * slices, strict=False
        ):
            logits = part @ weight.T
            if not (wants_hidden or wants_weight):
                total += cross_entropy(logits, part_labels, ignore_index, items)
                continue
            with torch.enable_grad():
                leaf = logits.requires_grad_()
                loss = cross_entropy(leaf, part_labels, ignore_index, items, inplace_backward=True)
            (gradient,) = torch.autograd.grad(loss, leaf)  # in the memory of the logits
            total += loss.detach()
            if wants_hidden:
                torch.mm(gradient, weight, out=out)
            if wants_weight:
                d_weight = gradient.T @ part if d_weight is None else d_weight.addmm_(gradient.T, part)
        ctx.shape, ctx.used = hidden.shape, False
        ctx.gradients = d_hidden, d_weight
        return total

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_loss):
        if ctx.used:
            raise RuntimeError("linear_cross_entropy: a second backward; its gradients were scaled in place by the first")
        ctx.used = True
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        for gradient in (d_hidden, d_weight):
            if gradient is not None:
                gradient.mul_(d_loss)
        return d_hidden.view(ctx.shape) if d_hidden is not None else None, d_weight, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    slices: int = 4,
    ignore_index: int = -100,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """``cross_entropy(hidden @ weight.T, labels)`` with only 1/``slices`` of the logits in memory.

    Args:
        hidden: ``[..., H]``; bf16, fp16, fp32 or fp64.
        weight: ``[V, H]`` of the same dtype (``lm_head.weight``).
        labels: ``[...]`` of int64 or int32, shifted already.
        slices: how many parts the rows are cut into, at least 1.
        ignore_index, num_items_in_batch: as in ``kernels.cross_entropy``.

    Returns:
        A scalar, fp32 (fp64 for fp64). One backward only, no second derivative, no host sync.

    Raises:
        ValueError: shapes or slices that don't fit.
    """
    if slices < 1:
        raise ValueError(f"linear_cross_entropy: slices is {slices}; give 1 or more")
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)}; expected [..., H], [V, H] and [...]"
        )
    labels = labels.reshape(-1)
    # The mean is over all rows, so every slice has to be divided by the same number.
    items = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return _LinearCrossEntropy.apply(hidden, weight, labels, items, ignore_index, slices)


def causal_loss(model: torch.nn.Module, ids: Tensor, labels: Tensor | None = None, *, slices: int = 4, **inputs) -> Tensor:
    """Next-token loss of a ``Qwen3ForCausalLM``, equal to ``model(ids, labels=labels).loss``.

    Args:
        ids: ``[B, S]``; labels default to them.
        inputs: passed on to the decoder (``attention_mask`` and so on).
    """
    labels = ids if labels is None else labels
    hidden = model.model(ids, use_cache=False, **inputs).last_hidden_state
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return linear_cross_entropy(hidden, model.lm_head.weight, shifted, slices=slices)
