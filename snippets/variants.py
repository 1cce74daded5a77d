"""Which kernels a model runs: transformers' own, this project's, or Liger's, switched for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def _liger(model: torch.nn.Module, **flags: Any) -> Iterator[None]:
    """Liger on this instance, undone on leaving.

    ``apply_liger_kernel_to_qwen3(model=...)`` binds methods to module instances, and also replaces
    names in transformers' module, and with ``cross_entropy=True`` even
    ``torch.nn.functional.cross_entropy``, for the whole process. It offers no way back, so all three
    are put back here; otherwise every later "Hugging Face" run would be a Liger run.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers.models.qwen3 import modeling_qwen3

    namespace = dict(vars(modeling_qwen3))
    cross_entropy = torch.nn.functional.cross_entropy
    instances = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        apply_liger_kernel_to_qwen3(model=model, **flags)
        yield
    finally:
        for name, value in namespace.items():
            setattr(modeling_qwen3, name, value)
        torch.nn.functional.cross_entropy = cross_entropy
        for module, attributes in instances:
            mode = module.training
            module.__dict__.clear()
            module.__dict__.update(attributes, training=mode)


@contextlib.contextmanager
def variant(name: str, model: torch.nn.Module) -> Iterator[None]:
    """Run the body with the kernels of ``name`` in ``model``; back to transformers' own afterwards.

    Args:
        name: "hf"; "ours" (all four kernels, q_norm and k_norm included); "liger" (RoPE, RMSNorm,
            SwiGLU and the fused linear cross-entropy: its defaults); "liger_ce" (the same with the
            cross-entropy from logits); "liger_loss" (only Liger's fused linear cross-entropy).

    Raises:
        ValueError: for another name.
    """
    if name == "hf":
        yield
    elif name == "ours":
        from snippets.kernels import patch

        with patch(model):
            yield
    elif name == "liger":
        with _liger(model):
            yield
    elif name == "liger_ce":
        with _liger(model, cross_entropy=True, fused_linear_cross_entropy=False):
            yield
    elif name == "liger_loss":
        with _liger(model, rope=False, rms_norm=False, swiglu=False):
            yield
    else:
        raise ValueError(f"no variant {name!r}: known are hf, ours, liger, liger_ce, liger_loss")
