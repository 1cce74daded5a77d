"""Choose Triton's CPU interpreter where there is no GPU. Import this before anything that imports triton.

The choice is read when triton is first imported (its own library, tl.sum and the like, is decorated
then), and transformers and liger-kernel import triton too. So every module that leads to one of them
imports this one first. A triton that is already loaded, and a variable already set, are left alone.
"""

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
