"""The decode kernels compile for Hopper, fit its shared memory and ask for weights before they wait. No GPU needed."""

import json
import os
import subprocess
import sys

import pytest

HOPPER_SHARED = 232_448  # bytes a block may opt in to, compute capability 9.0

SCRIPT = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from snippets.cuda_graph import decode_kernels as k

name = sys.argv[1]
bf16, fp32 = "*bf16", "*fp32"
linear = dict.fromkeys(("x_ptr", "w_ptr", "norm_ptr", "residual_ptr", "y_ptr"), bf16) | {"n": "i32"}
fixed = {"EPS": 1e-6, "COMPUTE": tl.float32}
cases = {  # the shapes of Qwen3-8B
    "qkv": (k._linear, linear, dict(WIDTH=4096, NORM=True, RESIDUAL=False, GATED=False)),
    "gate_up": (k._linear, linear, dict(WIDTH=4096, NORM=True, RESIDUAL=False, GATED=True)),
    "one row": (k._linear, linear | {"n": "constexpr"}, dict(WIDTH=4096, NORM=True, RESIDUAL=False, GATED=True, n=1)),
    "down": (k._linear, linear, dict(WIDTH=12288, NORM=False, RESIDUAL=True, GATED=False)),
    "attend": (k._attend, dict.fromkeys(("qkv_ptr", "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr"), bf16)
               | dict.fromkeys(("part_ptr", "top_ptr", "sum_ptr"), fp32) | {"lengths_ptr": "*i32"},
               dict(HEADS=32, KV=8, D=128, GROUP=4, PLACES=4096, SCALE=128**-0.5, PARTS=32, TILE=k.TILE)),
    "attend, one part": (k._attend, dict.fromkeys(("qkv_ptr", "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr"), bf16)
               | dict.fromkeys(("part_ptr", "top_ptr", "sum_ptr"), fp32) | {"lengths_ptr": "*i32"},
               dict(HEADS=32, KV=8, D=128, GROUP=4, PLACES=4096, SCALE=128**-0.5, PARTS=1, TILE=k.TILE)),
    "combine": (k._combine, dict.fromkeys(("part_ptr", "top_ptr", "sum_ptr"), fp32) | {"y_ptr": bf16}, dict(D=128, PARTS=32)),
    "embed": (k._embed, {"tokens_ptr": "*i64", "lengths_ptr": "*i32", "table_ptr": bf16, "y_ptr": bf16}, dict(COLUMNS=4097, WIDTH=4096, BLOCK=1024)),
    "pick": (k._pick, {"logits_ptr": bf16, "tokens_ptr": "*i64", "lengths_ptr": "*i32", "given_ptr": "*i32"}, dict(VOCABULARY=151936, COLUMNS=4097, BLOCK=16384)),
}
kernel, types, values = cases[name]
warps = 16 if name == "pick" else 4
if kernel is k._linear:
    config = dict(k.LINEAR[values["GATED"], values["WIDTH"] > 8192])
    warps = config.pop("num_warps")
    values |= config
# A thread asks for 16 bytes at a time.
out = {"wanted": (1 + values["GATED"]) * values["ROWS"] * values["COLUMNS"] * 2 // (warps * 32 * 16) if kernel is k._linear else 0}
for pdl in (True, False):
    given = {n: v for n, v in (fixed | values | {"PDL": pdl}).items() if n in kernel.arg_names}
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n.endswith("_ptr")}
    source = ASTSource(kernel, signature, constexprs={(list(signature).index(n),): v for n, v in given.items()}, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps} | ({"launch_pdl": True} if pdl else {}))
    before, wait, after = made.asm["ptx"].partition("griddepcontrol.wait")
    out["pdl" if pdl else "plain"] = {"shared": made.metadata.shared, "waits": bool(wait), "loads": before.count("ld.global"), "stores": before.count("st.global")}
print(json.dumps(out))
"""


@pytest.mark.parametrize("name", ["qkv", "gate_up", "one row", "down", "attend", "attend, one part", "combine", "embed", "pick"])
def test_it_compiles_for_hopper(name):
    run = subprocess.run([sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=300, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    wanted = seen.pop("wanted")
    assert all(s["shared"] <= HOPPER_SHARED for s in seen.values())
    assert seen["pdl"]["waits"] and not seen["plain"]["waits"]
    assert seen["pdl"]["stores"] == 0, "something is written before the kernel before has ended"
    assert seen["pdl"]["loads"] == wanted, "the first weights, and only they, are asked for before the wait"
