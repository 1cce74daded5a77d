"""Weight gradients accumulated inside the matrix product, in place of a product and an addition.

Autograd's own order for one micro-step of gradient accumulation is: write dW = dyᵀ x to a new tensor, then
add it to ``weight.grad``. For Qwen3-8B's 7.6 billion matrix weights in bf16 that writes and reads back 28 GiB for
nothing in each backward, and holds one more tensor as large as the weight, 1.16 GiB for lm_head.
``grad.addmm_(dyᵀ, x)`` is one product with beta = 1: the sum is taken before the rounding, once. Megatron-LM calls this gradient accumulation fusion; there it needs a CUDA extension because the
gradients are fp32 under bf16 weights; here both have one dtype, or autograd's order is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from snippets.checkpointing.policies import Applied
from snippets.checkpointing.switching import restore
from snippets.kernels.common import first_derivative_only


# --8<-- [start:accumulate]
def add_product(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """``weight.grad += dy.T @ x`` without a tensor in between.

    Args:
        weight: ``[out, in]``, its gradient may be absent.
        dy: ``[rows, out]``; x: ``[rows, in]``; both of the weight's dtype.
    """
    if weight.grad is not None and weight.grad.dtype == dy.dtype:
        weight.grad.addmm_(dy.T, x)
        return
    product = dy.T @ x
    if weight.grad is not None:  # gradients of another dtype, such as fp32 under bf16 weights
        weight.grad.add_(product)
    else:
        weight.grad = product.to(getattr(weight, "grad_dtype", None) or weight.dtype)


class _WeightGradient(torch.autograd.Function):
    """Stores a linear's input *before* the product runs, and adds the weight's gradient in the backward.

    A Function hands its saved tensors over when its forward has returned. Were it to hold the product as well, a
    checkpoint would have to finish down_proj before it sees that the backward needs nothing more (early stop). What goes
    on to the product is a token: no memory, but the output's shape, so that dy comes back here.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter itself: pack hooks would hand back a tensor without .grad
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows, columns = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        adds = None if watched(weight) else will_accumulate(ctx.next_functions[1][0])
        if adds:
            add_product(weight, rows, columns)
        return None, rows.T @ columns if adds is None else None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, weight):
        ctx.weight, ctx.version = weight, weight._version
        return F.linear(x, weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        if ctx.weight._version != ctx.version:
            raise RuntimeError("accumulate: a weight was changed between the forward and the backward (optimizer.step()?)")
        return dy @ ctx.weight if ctx.needs_input_grad[0] else None, dy, None


def watched(weight: Tensor) -> bool:
    """Whether something waits for this gradient, so that autograd has to pass it on: hooks, or what made the weight."""
    return not weight.is_leaf or bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def will_accumulate(node: torch.autograd.graph.Node) -> bool | None:
    """Whether the running backward adds to the leaf of this AccumulateGrad node: not for ``backward(inputs=...)`` of
    other leaves (False), nor where ``torch.autograd.grad`` wants the gradient itself (None)."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # how torch says that it is captured
        return None
# --8<-- [end:accumulate]


class AccumulatingLinear(torch.nn.Linear):
    """``torch.nn.Linear`` without bias, whose backward adds to ``weight.grad`` itself."""

    def forward(self, x: Tensor) -> Tensor:
        """As ``torch.nn.Linear``; under autocast, where the weight is a cast copy, or with a frozen weight, exactly that."""
        if not self.weight.requires_grad or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return _Product.apply(x, _WeightGradient.apply(x, self.weight), self.weight.detach())


def accumulate(model: torch.nn.Module) -> Applied:
    """Let all linear modules without bias add their weight gradients in place.

    For a training loop that calls ``backward()`` in one process: wrappers that hang on autograd's accumulation (DDP,
    FSDP) are not served. Tensor hooks on a weight, ``torch.autograd.grad`` and gradients of another dtype are, the usual way.

    Returns:
        A switch whose ``off()`` restores the modules; also a context manager.

    Raises:
        ValueError: no such module, or one with a ``forward`` of its own.
    """
    modules = [m for m in model.modules() if type(m) is torch.nn.Linear and m.bias is None]
    if not modules:
        raise ValueError("accumulate: the model has no plain torch.nn.Linear without bias (is it on already?)")
    if any("forward" in m.__dict__ for m in modules):
        raise ValueError("accumulate: a linear module has a forward of its own (a wrapper of another library); remove that first")
    undo: list[Callable[[], None]] = []
    for module in modules:
        module.__class__ = AccumulatingLinear
        undo.append(functools.partial(restore, module, AccumulatingLinear, torch.nn.Linear, "accumulate"))
    return Applied(undo)
