"""How strictly torch is asked for deterministic algorithms.

Under ``use_deterministic_algorithms(True, warn_only=True)`` cuDNN's attention stays and only warns that its backward adds
in any order. Without ``warn_only`` torch leaves it out and takes flash attention in a fixed order (``check_cudnn_deterministic``
in PyTorch's sdp_utils.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from snippets.measure import deterministic

MODES = ("off", "warn only", "strict")


@contextlib.contextmanager
def algorithms(mode: str) -> Iterator[None]:
    """Run the body under one of ``MODES``."""
    with deterministic(mode != "off"):
        if mode == "strict":
            torch.use_deterministic_algorithms(True)  # the context above restores what was before
        yield
