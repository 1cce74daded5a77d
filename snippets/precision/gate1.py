"""Gate 1: is the mathematics right? One operator in fp64.

(a) forward against the reference, (b) gradients against autograd of the reference under random
dy, (c) gradcheck, (d) the structural checks. gradcheck alone is not enough: it compares a
backward with its own forward, so a consistent pair of wrong formulas passes it.

In fp64 rounding is 1e-16 and a wrong formula is not, so the tolerance needs no calibration: 1e-8
of the row's largest value, plus 1e-9 of what the inputs' relative perturbation would move
(cancellation). A kernel hard-wired to fp32 (Liger's are) cannot be judged that way: it is
recognised, said so in the report, and judged in fp32 by the ratio test of ``judge``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snippets.precision import judge
from snippets.precision.cases import Case, Op, Setup, UsageError, adapt, build
from snippets.precision.judge import Run, describe, named
from snippets.precision.structure import main_setup, soil, structural, touched
from snippets.precision.verdict import Finding, Verdict

RTOL, NOISE = 1e-8, 1e-9
FP32_LIKE = 1e-4  # errors below this (of the tensor's maximum) look like fp32 arithmetic, above like a wrong formula
MOST_FAILURES = 8  # after this many the verdict is clear


def _row_max(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True) if x.dim() >= 2 else x.amax()


def error64(got: Tensor, name: str, t: judge.Truth) -> tuple[float, float]:
    """(error over tolerance, error over the tensor's maximum) of one fp64 result; inf for NaN."""
    want = t.items()[name]
    if got.numel() == 0:
        return 0.0, 0.0
    good = torch.isfinite(want)
    if not bool(torch.isfinite(got[good]).all()):
        return math.inf, math.inf
    want = want.masked_fill(~good, 0)
    err = (got.double().masked_fill(~good, 0) - want).abs()
    top = want.abs().max()
    noise = t.noise_all[name].nan_to_num(0, 0, 0)
    tol = RTOL * _row_max(want.abs()) + NOISE * _row_max(noise) + 1e-12 * top + 1e-30
    return (err / tol).max().item(), (err.max() / top.clamp_min(1e-30)).item()


def gradcheck(fn: Callable[..., Any], op: Op, device: torch.device) -> tuple[bool, str]:
    """torch.autograd.gradcheck in fp64 at a small shape.

    Returns:
        passed, and the text a reader would see: the call, then True or the error message.
    """
    case = build(op, Setup(op.small, seed=3), torch.float64, device)
    floating = [i for i, a in enumerate(op.args) if a.grad]
    leaves = [case.tensors[i].clone().requires_grad_() for i in floating]

    def call(*xs: Tensor) -> Any:
        full = list(case.tensors)
        for i, x in zip(floating, xs, strict=True):
            full[i] = x
        return fn(*full, **case.call_options)

    shown = ", ".join(f"{op.args[i].name}{list(case.tensors[i].shape)}" for i in floating)
    text = f">>> torch.autograd.gradcheck({op.name}, ({shown}), eps=1e-6, atol=1e-5, rtol=1e-3)\n"
    try:
        # nondet_tol: the order of fp64 atomics may move the last bits between two backwards.
        with judge.watched():
            torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-5, rtol=1e-3, nondet_tol=1e-9, check_undefined_grad=False)
    except judge.Misconduct as e:
        return False, text + str(e)
    except Exception as e:  # noqa: BLE001 - GradcheckError, or whatever the kernel raises
        body = str(e).strip()
        return False, text + f"{type(e).__name__}: {body[:900]}"
    return True, text + "True"


def usable_reference(op: Op, device: torch.device) -> None:
    """A reference that casts to fp32 inside cannot serve as fp64 truth.

    Raises:
        UsageError: says what was seen.
    """
    try:
        with judge.watched():
            case = build(op, Setup(op.small, seed=3), torch.float64, device)
        outs = judge.run(op.reference, case).outputs
    except Exception as e:  # noqa: BLE001
        raise UsageError(f"the reference fails on fp64 inputs of sizes {op.small}: {describe(e)}") from e
    if any(p.changed() for p in case.inputs):
        raise UsageError("the reference overwrites its inputs; write it without in-place operations")
    if not all(o.is_floating_point() for o in outs):
        raise UsageError("the reference returns integers or booleans beside its results; wrap it and the kernel to return floating tensors only")
    if not all(bool(torch.isfinite(o).all()) for o in outs):
        raise UsageError(
            "the reference gives NaN or inf for normally distributed inputs, e.g. a logarithm of negative numbers;"
            " wrap it and the kernel in one function that maps the inputs into the domain first, such as x.abs() + 0.1"
        )
    if any(o.dtype != torch.float64 for o in outs):
        raise UsageError(f"the reference returns {outs[0].dtype} for fp64 inputs; it must compute in the dtype it is given")
    ok, text = gradcheck(op.reference, op, device)
    if not ok:
        raise UsageError(
            "the reference itself fails gradcheck in fp64, so it is no truth (does it cast to fp32 inside, as"
            f" transformers' Qwen3RMSNorm does?):\n{text[:500]}"
        )


def check(
    op: Op,
    kernel: Callable[..., Any],
    device: torch.device | str = "cpu",
    *,
    allow: Iterable[str] = (),
    level: str | None = None,
    seed: int = 0,
    structure: bool = True,
) -> Verdict:
    """Run Gate 1 on one kernel.

    Args:
        kernel: ``kernel(*tensors, **options)`` → tensor or tuple, differentiable through autograd.
        allow: declared overwrites, see ``structure.structural``.
        level: which sizes ("tiny", "cpu", "cuda"); by default from the device.
        seed: shifts all data.
    """
    device = torch.device(device)
    fn, op, notes = adapt(op, kernel)
    level = level or judge.level_of(fn, op, device)
    usable_reference(op, device)
    setups = [s if not seed else judge_seed(s, seed) for s in op.plan(1, level)]
    verdict = Verdict("gate1", notes=list(notes))

    dtype, reason = _mode(fn, op, main_setup(setups)[0], device)
    if dtype == torch.float32:
        verdict.notes.append(
            f"该 kernel 不能以 fp64 计算（{reason}），改在 fp32 下判：误差 / 同精度参考的误差，"
            f"max ≤ {judge.MAX_RATIO:g}，rms ≤ {judge.RMS_RATIO:g}；gradcheck 不适用"
        )

    def findings_of(p: judge.Prepared, r: Run) -> list[Finding]:
        wrong = judge.form(r, p.base, p.case, strict=True)
        if wrong:
            return [Finding("形状与 dtype", False, w, f"{p.case.setup}") for w in wrong]
        out = []
        if dtype == torch.float64:
            for n, g in named(r).items():
                if g is None or p.truth.items().get(n) is None:
                    continue
                over, rel = error64(g, n, p.truth)
                out.append(Finding(f"{n} 对 fp64 参考", over <= 1, f"{n} 相对误差 {rel:.1e}", f"{p.case.setup}", over, 1.0))
        else:
            for s in judge.stats(p, r):
                out.append(_ratio_finding(s, p.case, "fp32"))
        return out

    for s in setups:
        if len(verdict.failed) >= MOST_FAILURES:
            verdict.notes.append("失败已足够多，其余输入未再检查")
            break
        case = build(op, s, dtype, device)
        p = judge.prepare(case)
        soil(case)
        try:
            verdict.findings += findings_of(p, judge.run(fn, case))
            if why := touched(case, allow):
                verdict.findings.append(Finding("输入与 dy 不被改写", False, why, f"{s}"))
        except Exception as e:  # noqa: BLE001
            verdict.findings.append(Finding("能否运行", False, describe(e), f"{s}"))
            if "CUDA error" in str(e):
                return verdict

    if dtype == torch.float64 and "saved" not in set(allow):
        ok, verdict.gradcheck = gradcheck(fn, op, device)
        verdict.findings.append(Finding("gradcheck", ok, verdict.gradcheck.splitlines()[1].split(",")[0][:120], str(op.small)))
    elif dtype == torch.float64:
        verdict.notes.append("声明了改写保存的张量，gradcheck（多次反向）不适用")

    if structure:
        found, more = structural(fn, op, setups, dtype, device, bad_of(findings_of), allow,
                                 numbers=not verdict.failed)  # fmt: skip
        verdict.findings += found
        verdict.notes += more
    return verdict


def judge_seed(s: Setup, seed: int) -> Setup:
    """The same setup with other random numbers."""
    return replace(s, seed=s.seed + 100 * seed)


def bad_of(findings_of: Callable[[judge.Prepared, Run], list[Finding]]) -> Callable[[Case, Run, Case | None], str | None]:
    """Turn a gate's judgement of a run into the yes/no with a reason that ``structural`` asks for."""

    def bad(case: Case, r: Run, pristine: Case | None) -> str | None:
        p = judge.prepare(pristine or case)
        # Only what this run produced is judged: an absent gradient was not asked for here.
        wrong = [f for f in findings_of(p, r) if not f.ok]
        return wrong[0].text if wrong else None

    return bad


def _ratio_finding(s: judge.Stat, case: Case, dtype: str) -> Finding:
    over_max, over_rms = s.max_ratio / judge.MAX_RATIO, s.rms_ratio / s.rms_limit
    text = s.why or f"{s.name}({dtype})：误差 / 分母 max {s.max_ratio:.2f}×、rms {s.rms_ratio:.2f}×"
    by_max = over_max >= over_rms or not s.rms_judged
    value, limit = (s.max_ratio, judge.MAX_RATIO) if by_max else (s.rms_ratio, s.rms_limit)
    return Finding(f"{s.name} 误差比（{dtype}）", s.ok, text, f"{case.setup}", value, limit)


def _mode(fn: Callable[..., Any], op: Op, setup: Setup, device: torch.device) -> tuple[torch.dtype, str]:
    """fp64, or fp32 with the reason why fp64 cannot be asked of this kernel."""
    case = build(op, setup, torch.float64, device)
    t = judge.truth(case)
    try:
        r = judge.run(fn, case)
    except Exception as e:  # noqa: BLE001
        try:
            judge.run(fn, build(op, setup, torch.float32, device))
        except Exception:  # noqa: BLE001 - it cannot run at all: let the fp64 run report how
            return torch.float64, ""
        return torch.float32, f"fp64 输入报错 {describe(e)}"
    if any(o.dtype == torch.float32 for o in r.outputs):
        return torch.float32, "fp64 输入返回 fp32"
    if len(r.outputs) != len(t.run.outputs) or any(a.shape != b.shape for a, b in zip(r.outputs, t.run.outputs, strict=True)):
        return torch.float64, ""
    errors = {n: error64(g, n, t) for n, g in named(r).items() if g is not None and t.items().get(n) is not None}
    wrong = [n for n, (over, _) in errors.items() if over > 1]
    if not wrong or any(rel >= FP32_LIKE for _, rel in errors.values()):
        return torch.float64, ""
    # A small error may also come from a slightly wrong formula. fp32 arithmetic gives itself away: it
    # does not follow a change of the inputs that is far below its resolution.
    h = 1e-9
    moved = [x * (1 + h * torch.sin(torch.arange(x.numel(), device=device, dtype=torch.float64)).reshape(x.shape)) if x.is_floating_point() else x
             for x in case.tensors]  # fmt: skip
    new, ref = named(judge.run(fn, case, moved)), named(judge.run(op.reference, case, moved))
    for n in wrong:
        want, got = ref[n] - t.items()[n], new[n] - named(r)[n]
        if (got - want).square().sum() < 0.01 * want.square().sum():
            return torch.float64, ""
    return torch.float32, f"fp64 输入的误差为 {max(rel for _, rel in errors.values()):.0e}，是 fp32 的量级"
