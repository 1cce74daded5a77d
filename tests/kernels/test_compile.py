"""The launches compile for Hopper and fit its shared memory. No GPU needed: Triton cross-compiles.

The interpreter knows no shared memory, so only this (or a GPU) sees a launch that asks for too much.
"""

import os
import subprocess
import sys

import pytest

HOPPER_SHARED = 232_448  # bytes a block may opt in to, compute capability 9.0

SCRIPT = """
import importlib, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

m = importlib.import_module("snippets.kernels.rms_norm")
dtype, width, itemsize = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SHARED = 232448
config = m.CONFIG["backward_narrow" if width <= m.NARROW else "backward"]
rows, padded, warps = m._blocks(config, width)
wide = "fp64" if dtype == "fp64" else "fp32"
types = dict(dy_ptr="*" + dtype, x_ptr="*" + dtype, w_ptr="*" + dtype, dx_ptr="*" + dtype, partial_ptr="*" + wide,
             dy_stride="i32", x_stride="i32", n_rows="i32", n_blocks="i32")
fixed = dict(WIDTH=width, EPS=1e-6, COMPUTE=getattr(tl, "float" + wide[2:]), NEEDS_DW=True, BLOCK_ROWS=rows,
             BLOCK_WIDTH=padded, STAGES=m._stages(config, rows * padded, itemsize, SHARED))
signature = types | dict.fromkeys(fixed, "constexpr")
# Aligned pointers and strides, as real tensors have them: only then are loads staged in shared memory.
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n.endswith(("_ptr", "_stride"))}
source = ASTSource(m._backward, signature, constexprs={(list(signature).index(k),): v for k, v in fixed.items()}, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).metadata.shared)
"""


@pytest.mark.parametrize(
    ("dtype", "width", "itemsize"),
    [("bf16", 128, 2), ("bf16", 4096, 2), ("bf16", 9000, 2), ("bf16", 32768, 2), ("fp32", 4096, 4), ("fp32", 32768, 4), ("fp64", 16384, 8)],
)
def test_backward_fits_shared_memory(dtype, width, itemsize):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype, str(width), str(itemsize)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    used = int(run.stdout.split()[-1])
    assert used <= HOPPER_SHARED
    if (dtype, width) == ("bf16", 4096):
        assert used > 2 * 2 * 4096 * 2, "the loads ahead of Qwen3's own width are gone"
