"""The loss without the logits: lm_head, cross-entropy and the backward of both, one slice of the rows at a time.

For Qwen3-8B the logits of one token take 297 KiB in bf16, more than the 36 stored layer inputs together
(288 KiB), and they peak together with everything that checkpointing left. So once checkpointing works, they are
next. Here one slice exists at a time: its logits, their gradient written over them, and two matrix products
that turn it into the gradients of the hidden states and of the weight. No product is computed twice.

Liger's fused linear cross-entropy (0.8.5) does the same inside an autograd function. That has to hold the
weight's gradient, 1.16 GiB, from the forward until the backward fetches it, and to scale it then. Called where
the backward starts anyway, nothing has to wait: the gradient goes where it belongs at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from snippets.checkpointing.accumulate import add_product, watched
from snippets.kernels import cross_entropy
from snippets.kernels.common import accumulate_dtype


# --8<-- [start:loss]
@torch.no_grad()
def head_backward(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, slice_rows: int = 1024, scale: float = 1.0,
    ignore_index: int = -100, num_items_in_batch: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of ``hidden @ weight.T`` and its backward, with the logits of only ``slice_rows`` rows in memory.

    Args:
        hidden: ``[..., H]``; bf16, fp16, fp32 or fp64.
        weight: ``[V, H]`` of the same dtype (``lm_head.weight``); its ``.grad`` is added to, unless it is frozen.
        labels: ``[...]`` of int64 or int32, shifted already.
        slice_rows: rows whose logits exist at a time, at least 1.
        scale: factor of the gradients, such as 1 / micro-steps; the loss stays as it is.
        ignore_index, num_items_in_batch: as in ``kernels.cross_entropy``.

    Returns:
        The loss (scalar without graph, fp32; fp64 for fp64) and the gradient of ``hidden``. No host sync.

    Raises:
        ValueError: shapes or slices that don't fit.
        RuntimeError: autocast is on, or hooks wait for the weight's gradient, which autograd doesn't carry here. Nothing
            has been added to any gradient then.
    """
    if slice_rows < 1:
        raise ValueError(f"head_backward: slice_rows is {slice_rows}; give 1 or more")
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"head_backward: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)}; expected [..., H], [V, H] and [...]"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        raise RuntimeError("head_backward: autocast is on; call it outside, with hidden and weight of one dtype")
    if weight.requires_grad and watched(weight):
        raise RuntimeError("head_backward: lm_head.weight has gradient hooks, or is no leaf, so its gradient has to come by autograd; use model(...).loss")
    rows, labels, w = hidden.detach().reshape(-1, hidden.shape[-1]), labels.reshape(-1), weight.detach()
    # The mean is over all rows, so every slice has to be divided by the same number.
    items = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    total = torch.zeros((), dtype=accumulate_dtype(hidden.dtype), device=hidden.device)
    upstream = torch.full_like(total, scale)
    d_rows = torch.empty_like(rows)
    for part, part_labels, d_part in zip(*(t.split(slice_rows) for t in (rows, labels, d_rows)), strict=True):
        logits = part @ w.T
        with torch.enable_grad():
            loss = cross_entropy(logits.requires_grad_(), part_labels, ignore_index, items, inplace_backward=True)
            (gradient,) = torch.autograd.grad(loss, logits, upstream)  # in the memory of the logits
        total += loss.detach()
        torch.mm(gradient, w, out=d_part)
        if weight.requires_grad:
            add_product(weight, gradient, part)
        del logits, loss, gradient  # before the next slice is made, not after
    return total, d_rows.view(hidden.shape)


def loss_and_backward(
    model: torch.nn.Module, ids: Tensor, labels: Tensor | None = None, *, slice_rows: int = 1024, scale: float = 1.0,
    ignore_index: int = -100, num_items_in_batch: Tensor | float | None = None, **inputs,
) -> Tensor:  # fmt: skip
    """What ``(model(ids, labels=labels).loss * scale).backward()`` does for a ``Qwen3ForCausalLM``, without the logits.

    Args:
        ids: ``[B, S]``; labels default to them.
        slice_rows, scale, ignore_index, num_items_in_batch: see ``head_backward``.
        inputs: passed on to the decoder (``attention_mask`` and so on).

    Returns:
        The loss, unscaled and without graph.
    """
    if foreign := {"shift_labels", "logits_to_keep", "return_dict"} & inputs.keys():  # the decoder would swallow them
        raise ValueError(f"loss_and_backward: {', '.join(sorted(foreign))} belongs to model(...), and has no effect here")
    if not torch.is_grad_enabled():
        raise RuntimeError("loss_and_backward: gradients are off (torch.no_grad); there would be no backward")
    labels = ids if labels is None else labels
    hidden = model.model(ids, use_cache=False, **inputs).last_hidden_state
    shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss, d_hidden = head_backward(
        hidden, model.lm_head.weight, shifted, slice_rows=slice_rows, scale=scale, ignore_index=ignore_index,
        num_items_in_batch=num_items_in_batch,
    )
    if hidden.requires_grad:  # not where the whole decoder is frozen
        hidden.backward(d_hidden)
    return loss
# --8<-- [end:loss]
