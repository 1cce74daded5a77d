"""Triton kernels run interpreted where there is no GPU; tests marked ``gpu`` are skipped there."""

import pytest
import torch

from snippets import interpreter  # noqa: F401 - before anything imports triton


def pytest_collection_modifyitems(items):
    # An address differs from worker to worker, and pytest-xdist then refuses to collect.
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"test ids must not hold an address, give ids=: {unstable}")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
