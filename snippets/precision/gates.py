"""Gate 1 and Gate 2 on this project's kernels and on Liger's.

``gate1`` and ``verdict``: what each gate says. ``gradcheck``: the text that torch's gradcheck
gives. ``ratio``: for every output and gradient in each dtype the worst error ratio over all inputs.
Liger's kernels exist on CUDA only; without a GPU this project's run in Triton's interpreter, in
fp32 and fp64, at small shapes.

    python -m snippets.precision.gates [--smoke] [--json FILE]
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from snippets.measure import MeasureError, Tables, cli, device, progress
from snippets.precision import controls, gate1, gate2
from snippets.precision.cases import OPS
from snippets.precision.judge import forget
from snippets.precision.mutants import MUTANTS

EXPERIMENT = {
    "title": "Gate 1 与 Gate 2：本项目与 Liger 的四个 kernel",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 3,
    "full": {"ops": ["rms_norm", "head_norm", "swiglu", "rope", "cross_entropy"], "impls": ["ours", "liger"], "seed": 0},
    "smoke": {"ops": ["rms_norm", "swiglu"], "impls": ["ours"], "seed": 0},
    "tables": {
        "verdict": {
            "op": "", "impl": "", "gate": "", "ok": "", "mode": "", "checks": "1", "failed": "1", "closest": "",
            "share": "1", "reasons": "", "notes": "", "seconds": "s",
        },
        "gradcheck": {"op": "", "impl": "", "passed": "", "text": ""},
        "ratio": {
            "op": "", "impl": "", "dtype": "", "tensor": "", "max_ratio": "1", "max_case": "", "rms_ratio": "1",
            "rms_case": "", "within_ulp": "1", "cases": "1", "ok": "",
        },
    },
}  # fmt: skip

GATES = {"gate1": "Gate 1", "gate2": "Gate 2"}


def verdict_row(op: str, impl: str, v: Any, seconds: float) -> dict[str, Any]:
    """One gate's verdict as a table row; ``share`` is the closest call's value over its limit."""
    w = v.worst()
    share = w.value / w.limit if w and w.value is not None and w.limit else None
    narrow = any("不能以 fp64 计算" in n for n in v.notes)
    return {
        "op": op, "impl": impl, "gate": GATES[v.gate], "ok": v.ok,
        "mode": ("fp32 比值" if narrow else "fp64") if v.gate == "gate1" else "误差比",
        "checks": len(v.findings), "failed": len(v.failed),
        "closest": f"{w.check}：{w.text}" if w else "",
        "share": share if share is not None and share < 1e300 else None,
        "reasons": "；".join(dict.fromkeys(f.text for f in v.failed)),
        "notes": "；".join(v.notes), "seconds": round(seconds, 2),
    }  # fmt: skip


def ratio_rows(op: str, impl: str, v: gate2.RatioVerdict) -> list[dict[str, Any]]:
    """Worst ratios per dtype and tensor. rms only where there are enough elements to judge it."""
    groups: dict[tuple[str, str], list[gate2.Measured]] = {}
    for m in v.measured:
        groups.setdefault((m.dtype, m.stat.name), []).append(m)
    out = []
    for (dtype, tensor), ms in groups.items():
        by_max = max(ms, key=lambda m: m.stat.max_ratio)
        judged = [m for m in ms if m.stat.rms_judged] or ms
        by_rms = max(judged, key=lambda m: m.stat.rms_ratio)
        finite = by_max.stat.max_ratio < 1e300
        out.append({
            "op": op, "impl": impl, "dtype": dtype, "tensor": tensor,
            "max_ratio": by_max.stat.max_ratio if finite else None, "max_case": str(by_max.setup),
            "rms_ratio": by_rms.stat.rms_ratio if by_rms.stat.rms_ratio < 1e300 else None, "rms_case": str(by_rms.setup),
            "within_ulp": min(m.stat.within_ulp for m in ms), "cases": len(ms), "ok": all(m.stat.ok for m in ms),
        })  # fmt: skip
    return out


def kernels(impl: str) -> dict[str, Any]:
    """op → control of one implementation ("ours" or "liger").

    Raises:
        MeasureError: not available on this device.
    """
    found = {"ours": controls.ours, "liger": controls.liger}[impl]()
    if not found:
        raise MeasureError(f"{impl} kernels cannot run here: they need a CUDA GPU")
    return {c.op: c for c in found if not c.config}


def wrong_but_consistent(dev: torch.device, seed: int) -> dict[str, Any]:
    """Why gradcheck is not enough: an RMSNorm with a misplaced eps, whose backward belongs to its own forward."""
    mutant = next(m for m in MUTANTS if m.id == "rms_eps_outside")
    op = replace(OPS[mutant.op], name=mutant.id)
    passed, text = gate1.gradcheck(mutant.kernel, op, dev)
    failed = gate1.check(op, mutant.kernel, dev, seed=seed).failed
    said = f"Gate 1 拒绝：{failed[0].text}（{failed[0].case}）" if failed else "Gate 1 没有发现"
    return {"op": mutant.op, "impl": "mutant", "passed": passed, "text": f"{text}\n# ε 在根号外。{said}"}


def measure(*, ops: list[str], impls: list[str], seed: int) -> Tables:
    """Both gates on the named operators and implementations.

    Returns:
        "verdict", "gradcheck" and "ratio" as declared.
    """
    dev = device()
    verdicts, checks, ratios = [], [], []
    for impl in impls:
        table = kernels(impl)
        for op in ops:
            control = table[op]
            progress(f"{impl} {op}")
            for gate in (gate1, gate2):
                t = time.perf_counter()
                v = gate.check(OPS[op], control.kernel, dev, allow=control.allow, seed=seed)
                verdicts.append(verdict_row(op, impl, v, time.perf_counter() - t))
                if gate is gate2:
                    ratios += ratio_rows(op, impl, v)
                elif v.gradcheck:
                    checks.append({"op": op, "impl": impl, "passed": v.gradcheck.endswith("True"), "text": v.gradcheck})
    checks.append(wrong_but_consistent(dev, seed))
    forget()
    return {"verdict": verdicts, "gradcheck": checks, "ratio": ratios}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
