"""Triton kernels run interpreted where there is no GPU; tests marked ``gpu`` are skipped there."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton: its own library is jitted too
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
