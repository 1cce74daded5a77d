"""Triton kernels for what Qwen3 computes besides matrix products and attention.

    from snippets.kernels import rms_norm, swiglu, rope, cross_entropy, patch

Each has a forward and a backward and the semantics of transformers 5.17's Qwen3, down to the
places where it rounds to the storage dtype. ``patch(model)`` puts them into a Hugging Face model
and takes them out again.

Without a CUDA device the kernels run in Triton's CPU interpreter. That is slow and exact enough
for fp32 and fp64; it rounds fp32 -> bf16 by truncation, so judge bf16 on a GPU only.
"""

import os
import sys

import torch

# The interpreter is chosen when triton is first imported (tl.sum and the like are decorated then),
# so this has to come before the imports below. A triton that is already loaded is left alone.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from snippets.kernels.cross_entropy import causal_lm_loss, cross_entropy  # noqa: E402
from snippets.kernels.patch import Patch, patch  # noqa: E402
from snippets.kernels.rms_norm import rms_norm  # noqa: E402
from snippets.kernels.rope import rope  # noqa: E402
from snippets.kernels.swiglu import swiglu  # noqa: E402

__all__ = ["Patch", "causal_lm_loss", "cross_entropy", "patch", "rms_norm", "rope", "swiglu"]
