"""Gate 2: is the rounding no worse than PyTorch's? One operator in its training dtype.

The ratio test of ``judge`` in bf16, over data families and shapes that expose faults, then once
more with fp32 inputs and outputs: there the coarse bf16 rounding of the result no longer hides an
inner value that was rounded too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from snippets.precision import judge
from snippets.precision.cases import Op, Setup, adapt, build
from snippets.precision.gate1 import MOST_FAILURES, _ratio_finding, bad_of, judge_seed
from snippets.precision.judge import Run, Stat, describe
from snippets.precision.structure import soil, structural, touched
from snippets.precision.verdict import Finding, Verdict

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


@dataclass
class Measured:
    """One judged tensor: dtype name, setup, ratios."""

    dtype: str
    setup: Setup
    stat: Stat


@dataclass
class RatioVerdict(Verdict):
    """A verdict with the ratios behind it."""

    measured: list[Measured] = field(default_factory=list)


def check(
    op: Op,
    kernel: Callable[..., Any],
    device: torch.device | str = "cpu",
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    allow: Iterable[str] = (),
    level: str | None = None,
    seed: int = 0,
    structure: bool = True,
) -> RatioVerdict:
    """Run Gate 2 on one kernel; arguments as for ``gate1.check``.

    ``dtypes``: the training dtype first, then fp32. Under Triton's CPU interpreter bf16 is left out
    with a note: the interpreter truncates bf16 stores, so nothing there says anything about a GPU.
    """
    device = torch.device(device)
    fn, op, notes = adapt(op, kernel)
    level = level or judge.level_of(fn, op, device)
    verdict = RatioVerdict("gate2", notes=list(notes))
    setups = [judge_seed(s, seed) if seed else s for s in op.plan(2, level)]
    if level == "tiny" and torch.bfloat16 in dtypes:
        dtypes = [d for d in dtypes if d != torch.bfloat16]
        verdict.notes.append("Triton 的 CPU 解释器对 bf16 截断存储，bf16 部分未查；请在 GPU 上重跑")

    for dtype in dtypes:
        name = NAMES.get(dtype, str(dtype))
        failures = 0

        def findings_of(p: judge.Prepared, r: Run, name: str = name) -> list[Finding]:
            wrong = judge.form(r, p.base, p.case, strict=False)
            if wrong:
                return [Finding("形状与 dtype", False, f"{name}：{w}", f"{p.case.setup}") for w in wrong]
            out = []
            for s in judge.stats(p, r):
                verdict.measured.append(Measured(name, p.case.setup, s))
                out.append(_ratio_finding(s, p.case, name))
            return out

        for s in setups:
            if failures >= MOST_FAILURES:
                verdict.notes.append(f"{name}：失败已足够多，其余输入未再检查")
                break
            case = build(op, s, dtype, device)
            p = judge.prepare(case)
            soil(case)
            try:
                found = findings_of(p, judge.run(fn, case))
                if why := touched(case, allow):
                    found.append(Finding("输入与 dy 不被改写", False, why, f"{s}"))
            except Exception as e:  # noqa: BLE001
                found = [Finding("能否运行", False, f"{name}：{describe(e)}", f"{s}")]
            verdict.findings += found
            failures += sum(not f.ok for f in found)
            if any("CUDA error" in f.text for f in found):
                return verdict
        if structure and dtype == dtypes[0]:
            kept = len(verdict.measured)
            found, more = structural(fn, op, setups, dtype, device, bad_of(findings_of), allow,
                                 numbers=not failures)  # fmt: skip
            del verdict.measured[kept:]
            verdict.findings += found
            verdict.notes += [n for n in more if n not in verdict.notes]
    return verdict
