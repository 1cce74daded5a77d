"""Cross-entropy from logits, forward and backward in Triton, without a host sync and without fp32 logits.

At Qwen3's vocabulary of 151936 the logits are the largest tensor of a training step (4096 tokens:
1.2 GB in bf16). transformers 5.17 upcasts them to fp32 and stores their log-softmax; this kernel
reads them once in the forward, keeps the loss and the two parts of the log-sum-exp per row, and recomputes the
softmax in the backward.

Semantics of transformers' ForCausalLMLoss / fixed_cross_entropy: computed in fp32, mean over the
labels that are not ``ignore_index``, or the sum divided by ``num_items_in_batch``; all labels
ignored gives NaN. The count stays on the device, so the operator can be captured in a CUDA graph.

The forward is an online softmax (Milakov and Gimelshein, arXiv 1805.02867): running maximum m and
sum s, where a new maximum rescales s. Here each thread keeps its own m and s for the 16 bytes that
it loads at a time; threads meet only once per row, so the loop has no barrier in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from snippets.kernels.common import accumulate_dtype, as_rows, check_tensors, compute_dtype, first_derivative_only, on

# Launch parameters; `python -m snippets.kernels.tune` tries others on the GPU at hand.
#   bytes: of one row's logits that a program loads per step
CONFIG = {
    "forward": {"bytes": 16384, "warps": 16},
    "backward": {"bytes": 32768, "warps": 16},
    "reduce": {"rows": 4096, "warps": 16},
}

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E): the hardware has exp2
LN2 = tl.constexpr(0.6931471805599453)


# --8<-- [start:forward]
@triton.jit
def _online(x, m, s):
    """Take a tile ``x[LANES, VECTOR]`` into the running maximum ``m`` and sum ``s``, both ``[LANES]``."""
    new = tl.maximum(m, tl.max(x, axis=1))
    # A lane that has seen nothing but -inf would compute -inf - -inf = NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    # The difference first: it is exact near the maximum, and x * LOG2E alone overflows for the
    # finfo.min that masks are made of.
    s = s * tl.exp2((m - base) * LOG2E) + tl.sum(tl.exp2((x - base[:, None]) * LOG2E), axis=1)
    return new, s


@triton.jit
def _forward(
    logits_ptr, labels_ptr, loss_ptr, top_ptr, log2_ptr, stride, width, ignore_index,
    COMPUTE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 at 14135 rows of 151936
    label = tl.load(labels_ptr + row).to(tl.int64)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(top_ptr + row, 0.0)
        tl.store(log2_ptr + row, 0.0)
    else:
        x_ptr = logits_ptr + row * stride
        offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        m = tl.full([LANES], float("-inf"), dtype=COMPUTE)
        s = tl.zeros([LANES], dtype=COMPUTE)
        whole = width // (LANES * VECTOR) * (LANES * VECTOR)
        for start in range(0, whole, LANES * VECTOR):
            # Too large to stay in L2 until the backward: leave the cache to others.
            x = tl.load(x_ptr + start + offsets, eviction_policy="evict_first").to(COMPUTE)
            m, s = _online(x, m, s)
        if whole < width:
            at = whole + offsets
            x = tl.load(x_ptr + at, mask=at < width, other=float("-inf")).to(COMPUTE)
            m, s = _online(x, m, s)

        top = tl.max(m, axis=0)
        base = tl.where(top == float("-inf"), 0.0, top)
        log2_sum = tl.log2(tl.sum(s * tl.exp2((m - base) * LOG2E), axis=0))
        # An impossible label cannot raise without a sync, so it makes the loss and its row NaN.
        valid = (label >= 0) & (label < width)
        target = tl.load(x_ptr + label, mask=valid, other=float("nan")).to(COMPUTE)
        tl.store(loss_ptr + row, (base - target) + log2_sum * LN2)
        # Kept apart: their sum would round away the digits of the second where the first is large.
        tl.store(top_ptr + row, base)
        tl.store(log2_ptr + row, tl.where(valid, log2_sum, float("nan")))


@triton.jit(do_not_specialize=["n_rows"])
def _reduce(
    loss_ptr, labels_ptr, items_ptr, out_ptr, denominator_ptr, n_rows, ignore_index,
    COUNT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program and a fixed order: deterministic, and the count never visits the host.
    total = tl.zeros([BLOCK], dtype=COMPUTE)
    counted = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + rows, mask=rows < n_rows, other=0.0)
        if COUNT:
            labels = tl.load(labels_ptr + rows, mask=rows < n_rows, other=0).to(tl.int64)
            counted += ((labels != ignore_index) & (rows < n_rows)).to(tl.int32)
    if COUNT:
        denominator = tl.sum(counted, axis=0).to(COMPUTE)
    else:
        denominator = tl.load(items_ptr).to(COMPUTE)
    tl.store(denominator_ptr, denominator)
    tl.store(out_ptr, tl.sum(total, axis=0) / denominator)
# --8<-- [end:forward]


# --8<-- [start:backward]
@triton.jit
def _backward(
    logits_ptr, labels_ptr, top_ptr, log2_ptr, dloss_ptr, denominator_ptr, dlogits_ptr,
    stride, out_stride, width, ignore_index, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    x_ptr = logits_ptr + row * stride
    dx_ptr = dlogits_ptr + row * out_stride
    offsets = tl.arange(0, BLOCK)
    if label == ignore_index:
        for start in range(0, width, BLOCK):
            zero = tl.zeros([BLOCK], dtype=dlogits_ptr.dtype.element_ty)
            tl.store(dx_ptr + start + offsets, zero, mask=start + offsets < width)
    else:
        scale = tl.load(dloss_ptr).to(COMPUTE) / tl.load(denominator_ptr)
        top = tl.load(top_ptr + row)
        log2_sum = tl.load(log2_ptr + row)
        for start in range(0, width, BLOCK):
            at = start + offsets
            x = tl.load(x_ptr + at, mask=at < width, other=float("-inf"), eviction_policy="evict_first").to(COMPUTE)
            probability = tl.exp2((x - top) * LOG2E - log2_sum)
            dx = tl.where(at == label, probability - 1.0, probability) * scale
            tl.store(dx_ptr + at, dx.to(dlogits_ptr.dtype.element_ty), mask=at < width)
# --8<-- [end:backward]


# --8<-- [start:wrapper]
class CrossEntropyFunction(torch.autograd.Function):
    """Autograd wrapper; use ``cross_entropy``."""

    @staticmethod
    def forward(ctx, logits, labels, ignore_index, items, inplace_backward):
        rows, labels = as_rows(logits), labels.reshape(-1).contiguous()
        n, width = rows.shape
        accumulate = accumulate_dtype(logits.dtype)
        loss, top, log2_sum = torch.empty((3, n), dtype=accumulate, device=logits.device)
        out = torch.empty((), dtype=accumulate, device=logits.device)
        denominator = torch.empty_like(out)
        config, reduce = CONFIG["forward"], CONFIG["reduce"]
        vector = 16 // logits.element_size()
        with on(logits):
            if n:
                _forward[(n,)](
                    rows, labels, loss, top, log2_sum, rows.stride(0), width, ignore_index,
                    COMPUTE=compute_dtype(logits.dtype), LANES=config["bytes"] // 16, VECTOR=vector,
                    num_warps=config["warps"],
                )  # fmt: skip
            _reduce[(1,)](
                loss, labels, out if items is None else items, out, denominator, n, ignore_index,
                COUNT=items is None, COMPUTE=compute_dtype(logits.dtype), BLOCK=reduce["rows"],
                num_warps=reduce["warps"],
            )  # fmt: skip
        ctx.save_for_backward(logits, labels, top, log2_sum, denominator)
        ctx.ignore_index, ctx.inplace, ctx.consumed = ignore_index, inplace_backward, False
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, dloss):
        if ctx.consumed:
            raise RuntimeError(
                "cross_entropy: the first backward has overwritten the logits; for a second one call "
                "cross_entropy(..., inplace_backward=False)"
            )
        logits, labels, top, log2_sum, denominator = ctx.saved_tensors
        ctx.consumed = ctx.inplace
        rows = as_rows(logits)
        n, width = rows.shape
        out = logits if ctx.inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if n:
            config = CONFIG["backward"]
            with on(logits):
                _backward[(n,)](
                    rows, labels, top, log2_sum, dloss, denominator, out, rows.stride(0), width, width, ctx.ignore_index,
                    COMPUTE=compute_dtype(logits.dtype), BLOCK=config["bytes"] // logits.element_size(),
                    num_warps=config["warps"],
                )  # fmt: skip
        if ctx.inplace:
            # Whoever else saved the logits for a backward gets autograd's error instead of wrong numbers.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    num_items_in_batch: torch.Tensor | float | None = None,
    *,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Cross-entropy of ``logits`` against class indices, as transformers' ``fixed_cross_entropy``.

    Args:
        logits: ``[..., V]``, any strides, any V; bf16, fp16, fp32 or fp64.
        labels: ``[...]`` of int64 or int32, already shifted (``causal_lm_loss`` shifts). A label outside
            ``0 <= label < V`` that is not ``ignore_index`` gives a NaN loss and a NaN gradient row:
            raising would need a host sync.
        ignore_index: rows with this label have loss 0 and gradient 0.
        num_items_in_batch: None for the mean over the labels that count, else what the sum is divided
            by. A CPU tensor is copied to the device; for graph capture pass a device tensor.
        inplace_backward: write the gradient over the logits. Saves their size, but whoever else holds
            the logits sees them change. Another operator that needs them for its backward, and a second
            backward through this one, raise RuntimeError.

    Returns:
        A scalar, fp32 (fp64 for fp64 logits); NaN when every label is ignored. Gradient for ``logits``
        in their dtype, once differentiable.

    Raises:
        TypeError, ValueError: unsupported dtypes, devices or shapes; the message says which.
    """
    check_tensors("cross_entropy", logits=logits)
    if not isinstance(labels, torch.Tensor) or labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"cross_entropy: labels must be an int64 or int32 tensor of class indices, got "
            f"{getattr(labels, 'dtype', type(labels).__name__)}; convert with labels.long()"
        )
    if labels.device != logits.device:
        raise ValueError(
            f"cross_entropy: labels are on {labels.device}, logits on {logits.device}; move them to one device"
        )
    if logits.dim() == 0 or labels.shape != logits.shape[:-1] or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits have shape {tuple(logits.shape)}, labels {tuple(labels.shape)}; expected "
            "[..., V] with V >= 1 and [...]"
        )
    if inplace_backward and not logits.is_contiguous():
        raise ValueError("cross_entropy: inplace_backward needs contiguous logits; leave it off or call .contiguous()")
    items = num_items_in_batch
    if items is not None and not isinstance(items, torch.Tensor):
        items = torch.full((), items, dtype=accumulate_dtype(logits.dtype), device=logits.device)
    elif items is not None:
        if items.numel() != 1:
            raise ValueError(f"cross_entropy: num_items_in_batch has shape {tuple(items.shape)}; it must be one number")
        items = items.to(logits.device)
    return CrossEntropyFunction.apply(logits, labels, int(ignore_index), items, inplace_backward)


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Next-token loss with the signature of transformers' ``ForCausalLMLoss``, to be a model's ``loss_function``.

    Args:
        logits: ``[B, S, V]`` with V = ``vocab_size``.
        labels: ``[B, S]``, not shifted. The labels are shifted and padded with ``ignore_index`` rather
            than the logits cut, which would copy them.
        shift_labels: labels shifted already; ``labels`` is then not used.
        kwargs: accepted and unused, as in transformers (model kwargs arrive here).
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.reshape(-1, vocab_size), shift_labels, ignore_index, num_items_in_batch)
# --8<-- [end:wrapper]
