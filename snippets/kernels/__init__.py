"""Triton kernels for what Qwen3 computes besides matrix products and attention.

    from snippets.kernels import rms_norm, swiglu, rope, cross_entropy, patch

Each has a forward and a backward and the semantics of transformers 5.17's Qwen3, down to the
places where it rounds to the storage dtype. ``patch(model)`` puts them into a Hugging Face model
and takes them out again.

Without a CUDA device the kernels run in Triton's CPU interpreter. That is slow and exact enough
for fp32 and fp64; it rounds fp32 -> bf16 by truncation, so judge bf16 on a GPU only.
"""

from snippets import interpreter  # noqa: F401  isort:skip - before triton

from snippets.kernels.cross_entropy import causal_lm_loss, cross_entropy
from snippets.kernels.patch import Patch, patch
from snippets.kernels.rms_norm import rms_norm
from snippets.kernels.rope import rope
from snippets.kernels.swiglu import swiglu

__all__ = ["Patch", "causal_lm_loss", "cross_entropy", "patch", "rms_norm", "rope", "swiglu"]
