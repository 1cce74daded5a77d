"""What Liger's unit-test tolerances let through, and what an error ratio says of the same kernels.

The settings (shapes, dtypes, tolerances, data, order of comparisons) are those of Liger-Kernel's
own tests at commit ead96b61 (2026-08-21): ``test/transformers/test_swiglu.py`` and
``test_rms_norm.py``. The kernels under test are broken on purpose; Liger's real modules and a
faithful copy of the reference are the controls that must pass.

Beside each verdict stand two others. ``ratio``: rms error of the candidate over rms error of the
same-dtype PyTorch reference on the very same data, both against fp64, the largest over the output
and all gradients; near 1 means as good as what it replaces. ``gate2``: this project's Gate 2 on
the same function, with data and shapes of its own choosing, in bf16 and fp32.

    python -m snippets.precision.liger_ci            # a CUDA GPU, with Liger's modules as controls
    python -m snippets.precision.liger_ci --smoke    # CPU, without them
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from snippets import measure as measure_module
from snippets.precision import gate2, structure
from snippets.precision.cases import OPS

EXPERIMENT = {
    "title": "Liger 的容差放过了什么",
    "needs": "cuda",
    "memory_gib": 4,
    "minutes": 1,
    "full": {
        "swiglu_shapes": [[2, 256, 256, 512], [6, 42, 123, 431]],
        "rms_norm_shapes": [[2, 128, 512], [5, 123, 123]],
        "silumul_shapes": [[2, 8, 8], [9, 7, 41]],
        "gate2_level": "cuda",
    },
    "smoke": {
        "swiglu_shapes": [[6, 42, 123, 431]],
        "rms_norm_shapes": [[5, 123, 123]],
        "silumul_shapes": [[9, 7, 41]],
        "gate2_level": "tiny",
    },
    "tables": {
        "verdicts": {
            "test": "", "shape": "", "dtype": "", "atol": "1", "rtol": "1", "kernel": "", "correct": "",
            "passes_liger": "", "ratio": "1", "passes_gate2": "", "gate2_reason": "",
        },
        "scale": {"test": "", "shape": "", "dtype": "", "tensor": "", "rms": "1", "atol_over_rms": "1"},
    },
}  # fmt: skip

Function = Callable[..., Tensor]


# ----------------------------------------------------------------------------- kernels


# --8<-- [start:wrong_swiglu]
class WrongSiLU(torch.autograd.Function):
    """silu forward; a derivative that lost its term x·σ·(1-σ)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * torch.sigmoid(x)


def mlp(activation: Function) -> Function:
    """LlamaMLP as a function of x[B, S, H] and G, U [H, I], D [I, H], with a choice of activation."""
    return lambda x, g, u, d: (activation(x @ g) * (x @ u)) @ d


SWIGLU = {"正确（SiLU）": F.silu, "GELU 冒充 SiLU": F.gelu, "ReLU 冒充 SiLU": F.relu, "SiLU 导数少一项": WrongSiLU.apply}
# --8<-- [end:wrong_swiglu]


# --8<-- [start:wrong_rms_norm]
def compute(x: Tensor) -> torch.dtype:
    """LlamaRMSNorm computes in fp32; its fp64 counterpart computes in fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """LlamaRMSNorm: eps inside the root, one rounding before the weight and one after."""
    h = x.to(compute(x))
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eps_outside(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(compute(x))
    return w * (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)).to(x.dtype)


def eps_missing(x: Tensor, w: Tensor) -> Tensor:
    h = x.to(compute(x))
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype)


class LowPrecisionWeightGrad(torch.autograd.Function):
    """The right RMSNorm, but dW is a running sum over rows that is kept in bf16."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return rms_norm(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(rms_norm(x, w), x, dy)
        h = x.detach().to(compute(x))
        normed = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        dw = torch.zeros_like(w, dtype=torch.bfloat16)
        for row in (dy * normed).detach().flatten(0, -2).bfloat16():
            dw = dw + row
        return dx, dw.to(w.dtype)


RMS_NORM = {
    "正确（LlamaRMSNorm）": rms_norm,
    "ε 在根号外": eps_outside,
    "漏掉 ε": eps_missing,
    "dW 用 bf16 累加": lambda x, w: LowPrecisionWeightGrad.apply(x, w),
}
# --8<-- [end:wrong_rms_norm]


# ------------------------------------------------------------------- Liger's tests, replayed


@dataclass(frozen=True)
class Setting:
    """One of Liger's tests: reference, candidates, the drawing of its inputs, its tolerances by dtype.

    ``inner`` turns a candidate's name into the operator that Gate 2 knows as ``op``: the MLP's
    matmuls belong to PyTorch in every variant, so only the elementwise part is judged there.
    """

    name: str
    reference: Function
    candidates: dict[str, Function]
    draw: Callable[[list[int], torch.dtype, torch.device], list[Tensor]]
    tolerance: dict[torch.dtype, tuple[float, float]]  # dtype → (atol, rtol)
    op: str
    inner: dict[str, Function]
    inputs: tuple[str, ...]


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def draw_mlp(shape: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, G, U, D ~ N(0, 1), as in test_correctness_llamamlp: unit weights, so outputs in the thousands."""
    b, s, h, i = shape
    return [randn(*dims, dtype=dtype, device=device) for dims in ((b, s, h), (h, i), (h, i), (i, h))]


def draw_norm(shape: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x ~ N(0, 1) and a weight of ones, as in test_correctness."""
    return [randn(*shape, dtype=dtype, device=device), torch.ones(shape[-1], dtype=dtype, device=device)]


def draw_silumul(shape: list[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """a, b ~ N(0, 1), as in test_correctness_silumul_with_multipliers (both multipliers 1)."""
    return [randn(*shape, dtype=dtype, device=device) for _ in range(2)]


def silumul(activation: Function) -> Function:
    """activation(a) * b of two tensors of one shape."""
    return lambda gate, up: activation(gate) * up


BF16, FP32 = torch.bfloat16, torch.float32
SHORT = {BF16: "bf16", FP32: "fp32"}
ELEMENTWISE = {name: silumul(f) for name, f in SWIGLU.items()}
SETTINGS = [
    Setting("SwiGLU MLP", mlp(F.silu), {k: mlp(f) for k, f in SWIGLU.items()}, draw_mlp,
            {BF16: (1e4, 1e-2), FP32: (1.0, 1e-5)}, "swiglu", ELEMENTWISE, ("x", "G", "U", "D")),
    Setting("SiLU·mul 逐元素", silumul(F.silu), ELEMENTWISE, draw_silumul,
            {BF16: (1e-1, 1e-2), FP32: (1e-3, 1e-5)}, "swiglu", ELEMENTWISE, ("a", "b")),
    Setting("RMSNorm", rms_norm, RMS_NORM, draw_norm,
            {BF16: (2e-1, 2e-2), FP32: (1e-4, 1e-6)}, "rms_norm", RMS_NORM, ("x", "w")),
]  # fmt: skip

LIGER = "Liger 原版"


def with_liger(setting: Setting) -> Setting:
    """The same setting with Liger's real kernel as one more candidate; CUDA only, it calls libdevice."""
    from liger_kernel.ops import LigerSiLUMulFunction
    from liger_kernel.transformers.functional import liger_rms_norm

    def swiglu(gate, up):
        return LigerSiLUMulFunction.apply(gate, up)

    def norm(x, weight):
        return liger_rms_norm(x, weight, 1e-6, in_place=False)

    def whole_mlp(x, g, u, d):
        return swiglu(x @ g, x @ u) @ d

    inner = norm if setting.op == "rms_norm" else swiglu
    candidate = whole_mlp if setting.name == "SwiGLU MLP" else inner
    return replace(
        setting, candidates=setting.candidates | {LIGER: candidate}, inner=setting.inner | {LIGER: inner}
    )


# --8<-- [start:replay]
def run(fn: Function, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Output and the gradient of every input."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.clone())]


def passes_liger(got: list[Tensor], want: list[Tensor], atol: float, rtol: float) -> bool:
    """Liger's rule: every tensor allclose to the reference in the same dtype."""
    return all(torch.allclose(w, g, atol=atol, rtol=rtol) for g, w in zip(got, want, strict=True))


def error_ratio(fn: Function, reference: Function, inputs: list[Tensor], dy: Tensor) -> float:
    """Largest rms error of ``fn`` over that of ``reference``, both against fp64 on the same inputs."""
    truth = run(reference, [t.double() for t in inputs], dy.double())
    ratios = []
    for got, base, exact in zip(run(fn, inputs, dy), run(reference, inputs, dy), truth, strict=True):
        # No result can be expected to be closer than its own rounding: 0.29 ulp is uniform rounding noise.
        ulp = torch.finfo(got.dtype).eps * torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(1e-30))))
        ratios.append(rms(got.double() - exact) / max(rms(base.double() - exact), 0.29 * rms(ulp)))
    return max(ratios, key=lambda r: math.inf if math.isnan(r) else r)
# --8<-- [end:replay]


def rms(x: Tensor) -> float:
    """Root mean square of all elements."""
    return x.double().pow(2).mean().sqrt().item()


@functools.cache
def gate2_says(op: str, fn: Function, device: torch.device, level: str) -> tuple[bool, str]:
    """Gate 2's verdict on one kernel and its strongest reason (Chinese, "" if it passed)."""
    # Liger's kernels reuse their inputs' and gradients' memory by design; that is not what is judged here.
    verdict = gate2.check(OPS[op], fn, device, level=level, structure=False, allow=structure.OVERWRITES)
    worst = verdict.worst()
    return verdict.ok, worst.text if worst and not verdict.ok else ""


def judge(
    setting: Setting, shape: list[int], dtype: torch.dtype, device: torch.device, gate2_level: str
) -> measure_module.Tables:
    """Verdicts on all candidates of one of Liger's settings, and the sizes of what it compares."""
    atol, rtol = setting.tolerance[dtype]
    where = {"test": setting.name, "shape": "×".join(map(str, shape)), "dtype": SHORT[dtype]}
    torch.manual_seed(42)
    inputs = setting.draw(shape, dtype, device)
    dy = torch.randn_like(setting.reference(*inputs))
    want = run(setting.reference, inputs, dy)
    verdicts = []
    for name, fn in setting.candidates.items():
        passes_gate2, reason = gate2_says(setting.op, setting.inner[name], device, gate2_level)
        verdicts.append(
            where | {
                "atol": atol, "rtol": rtol, "kernel": name, "correct": name.startswith("正确") or name == LIGER,
                "passes_liger": passes_liger(run(fn, inputs, dy), want, atol, rtol),
                "ratio": error_ratio(fn, setting.reference, inputs, dy),
                "passes_gate2": passes_gate2, "gate2_reason": reason,
            }
        )  # fmt: skip
    scale = [
        where | {"tensor": name, "rms": rms(t), "atol_over_rms": atol / rms(t)}
        for name, t in zip(("y", *(f"d{i}" for i in setting.inputs)), want, strict=True)
    ]
    return {"verdicts": verdicts, "scale": scale}


def measure(
    *,
    swiglu_shapes: list[list[int]],
    rms_norm_shapes: list[list[int]],
    silumul_shapes: list[list[int]],
    gate2_level: str,
) -> measure_module.Tables:
    """Replay Liger's tests with right and wrong kernels.

    Args:
        swiglu_shapes: ``[batch, sequence, hidden, intermediate]`` of the MLP test.
        rms_norm_shapes, silumul_shapes: ``[batch, sequence, width]`` of the other two.
        gate2_level: sizes of Gate 2's data: "cuda", "cpu", or "tiny" (fp32 only, seconds anywhere).
    """
    device = measure_module.device()
    shapes = dict(zip((s.name for s in SETTINGS), (swiglu_shapes, silumul_shapes, rms_norm_shapes), strict=True))
    settings = [with_liger(s) if device.type == "cuda" else s for s in SETTINGS]
    jobs = [(s, shape, dtype) for s in settings for shape in shapes[s.name] for dtype in s.tolerance]
    tables: measure_module.Tables = {"verdicts": [], "scale": []}
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        for done, (setting, shape, dtype) in enumerate(jobs):
            measure_module.progress(f"{setting.name} {shape} {SHORT[dtype]}", done, len(jobs))
            for table, rows in judge(setting, shape, dtype, device, gate2_level).items():
                tables[table] += rows
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return tables


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
