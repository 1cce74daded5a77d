"""Checks that need no tolerance of their own: does the kernel keep its hands off what isn't its own?

A kernel can give right numbers once and still break training: it overwrites an input that the
residual branch reads, reads memory that it never wrote, remembers something from the last call,
fails when only the weight is trained. Each check here repeats one such use and asks the gate's
own comparison whether the numbers are still right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from snippets.precision.cases import GUARD, Case, Op, Setup, build
from snippets.precision.judge import Run, call, describe, run, watched
from snippets.precision.verdict import Finding

OVERWRITES = ("inputs", "grad_output", "saved")
_EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
          "aten::empty_permuted"}  # fmt: skip


class Poison(TorchDispatchMode):
    """Every floating tensor from torch.empty & co. starts as NaN and stands between NaN guards."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name not in _EMPTY or not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        if out.device.type not in ("cpu", "cuda") or out.numel() == 0 or (kwargs or {}).get("pin_memory"):
            return out
        n = 1 + sum((s - 1) * st for s, st in zip(out.shape, out.stride(), strict=True))
        buffer = torch.full((n + 2 * GUARD,), math.nan, dtype=out.dtype, device=out.device)
        self.buffers.append(buffer)
        return torch.empty(0, dtype=out.dtype, device=out.device).set_(
            buffer.untyped_storage(), GUARD, out.size(), out.stride()
        )

    def guards_intact(self) -> bool:
        return all(bool(b[:GUARD].isnan().all()) and bool(b[-GUARD:].isnan().all()) for b in self.buffers)


def touched(case: Case, allow: Iterable[str] = ()) -> str | None:
    """Which of the caller's tensors a run has overwritten without having declared it (Chinese reason)."""
    if "inputs" not in allow and any(p.changed() for p in case.inputs):
        return "改写了输入（或写到了它的边界之外）；若是有意的就地复用，用 --allow-overwrite inputs 声明"
    if "grad_output" not in allow and any(p.changed() for p in case.dys):
        return "反向改写了传入的梯度 dy；若是有意的就地复用，用 --allow-overwrite grad_output 声明"
    return None


def soil(case: Case) -> None:
    """Fill and free blocks of the result's sizes, so that an allocator that reuses them hands out NaN."""
    shapes = [p.tensor.shape for p in case.dys] + [p.tensor.shape for p in case.inputs]
    held = [torch.full(s, math.nan, dtype=case.dtype, device=case.inputs[0].tensor.device) for s in shapes for _ in "ab"]
    del held


def main_setup(setups: list[Setup]) -> tuple[Setup, Setup]:
    """A representative setup and one of another shape."""
    one = next((s for s in setups if s.dy == "positive" and s.family == "randn"), setups[min(1, len(setups) - 1)])
    one = replace(one, dy="randn")
    small = [s for s in setups if s.dims != one.dims and math.prod(_flat(s)) < 200_000]
    return one, max(small, key=lambda s: math.prod(_flat(s)), default=one)


def _flat(s: Setup) -> list[int]:
    return [n for v in s.dims.values() for n in (v if isinstance(v, tuple) else (v,))]


def structural(
    fn: Callable[..., Any],
    op: Op,
    setups: list[Setup],
    dtype: torch.dtype,
    device: torch.device,
    bad: Callable[[Case, Run, Case | None], str | None],
    allow: Iterable[str] = (),
    *,
    numbers: bool = True,
) -> tuple[list[Finding], list[str]]:
    """All structural checks in one dtype.

    Args:
        bad: ``bad(case, run, pristine)`` → reason why a run is wrong, None if right; ``pristine`` is an
            untouched case with the same values when the run's own buffers may have been overwritten.
        numbers: False when the kernel's numbers are already known to be wrong: only overwrites are looked for.
        allow: overwrites that the kernel declares ("inputs", "grad_output", "saved"): noted, not failed.

    Returns:
        findings and notes.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    allow = set(allow)
    setup, other = main_setup(setups)

    def fresh(seed: int = 0, s: Setup = setup) -> Case:
        return build(op, replace(s, seed=s.seed + seed), dtype, device)

    def check(name: str, text: str, work: Callable[[], str | None]) -> None:
        try:
            with watched():
                why = work()
        except Exception as e:  # noqa: BLE001 - whatever a foreign kernel raises is its verdict
            why = describe(e)
        findings.append(Finding(name, why is None, text if why is None else why, f"{setup}"))

    def overwritten(name: str, key: str, what: str, found: bool) -> None:
        if found and key in allow:
            notes.append(f"声明过的就地复用：{what}")
            found = False
        hint = f"；若是有意的就地复用，用 --allow-overwrite {key} 声明"
        findings.append(Finding(name, not found, f"{what}{hint}" if found else "未被改写", f"{setup}"))

    # 1. Nothing that belongs to the caller changes.
    case = fresh()
    try:
        run(fn, case)
        torch.cuda.synchronize() if device.type == "cuda" else None
        overwritten("输入不被改写", "inputs", "前向或反向改写了输入（或写到了它的边界之外）", any(p.changed() for p in case.inputs))
        overwritten("dy 不被改写", "grad_output", "反向改写了传入的梯度 dy", any(p.changed() for p in case.dys))
    except Exception as e:  # noqa: BLE001
        findings.append(Finding("前向与反向能跑", False, describe(e), f"{setup}"))
        return findings, notes

    if not numbers:
        notes.append("数值已错，其余结构检查略去")
        return findings, notes

    # 2. The graph survives its first backward (retain_graph, checkpointing, two consumers).
    # The second backward gets another gradient: one that hands out the first one's results again shows.
    case, then = fresh(), fresh(1)
    pristine = fresh()
    pristine.altered = True
    for p, q in zip(pristine.dys, then.dys, strict=True):
        p.refill(q.tensor)
    try:
        two = run(fn, case, twice=True, then=[p.tensor for p in then.dys])
        why = bad(case, Run(two.outputs, two.again or {}), pristine)
    except Exception as e:  # noqa: BLE001
        why = describe(e)
    if why is not None and "saved" in allow:
        notes.append("声明过的就地复用：第二次反向的结果不同或报错（保存的张量已被改写）")
        why = None
    findings.append(Finding("两次反向结果相同", why is None, "retain_graph 后再次反向仍然正确" if why is None else
                            f"第二次反向错误，保存的张量被改写？{why}；若是有意的，用 --allow-overwrite saved 声明", f"{setup}"))  # fmt: skip

    # 3. Memory: nothing uninitialised is read, nothing outside is written.
    def poisoned() -> str | None:
        case = fresh()
        mode = Poison()
        try:
            with mode:
                r = run(fn, case)
        except Exception as e:  # noqa: BLE001
            # A compiled function may refuse to run under a dispatch mode: no fault of its numbers.
            notes.append(f"毒化分配器下无法运行，该项未查：{describe(e)}")
            return None
        if not mode.guards_intact():
            return "写到了自己申请的显存/内存边界之外（护栏中的 NaN 被改写）"
        return bad(case, r, fresh())

    check("输出写满、不越界", "新申请的内存预填 NaN，结果不变", poisoned)

    # 4. No memory of earlier calls.
    def repeated() -> str | None:
        first = None
        for _ in range(3 if device.type == "cpu" else 12):
            case = fresh()
            r = run(fn, case)
            tensors = [*r.outputs, *(g for g in r.grads.values() if g is not None)]
            if first is not None and all(map(torch.equal, tensors, first)):
                continue
            first = tensors
            if why := bad(case, r, fresh()):
                return f"重复调用时出错（竞争或残留状态）：{why}"
        return None

    def same_address() -> str | None:
        case, new = fresh(), fresh(1)
        run(fn, case)
        for p, q in zip(case.inputs + case.dys, new.inputs + new.dys, strict=True):
            p.refill(q.tensor)
        why = bad(new, run(fn, case), fresh(1))
        return why and f"同一地址换了数据，结果却不对（按地址缓存？）：{why}"

    def after_other_shape() -> str | None:
        run(fn, fresh(s=other))
        case = fresh()
        why = bad(case, run(fn, case), fresh())
        return why and f"先以另一形状（{other}）调用后出错：{why}"

    def interleaved() -> str | None:
        first, second = fresh(), fresh(1)
        leaves = []
        for case in (first, second):
            ts = [t.detach().requires_grad_(a.grad) for a, t in zip(op.args, case.tensors, strict=True)]
            leaves.append((ts, call(fn, ts, case.call_options)))
        done = []
        for case, (ts, outs) in zip((first, second), leaves, strict=True):
            want = [t for t in ts if t.requires_grad]
            gs = torch.autograd.grad(outs, want, [p.tensor.to(o.dtype) for p, o in zip(case.dys, outs, strict=True)], allow_unused=True)
            done.append(Run(tuple(o.detach() for o in outs), dict(zip([a.name for a in op.args if a.grad], gs, strict=True))))
        # Judged only now: results in a buffer that the next call reuses are wrong by this time.
        for i, (case, r) in enumerate(zip((first, second), done, strict=True)):
            if why := bad(case, r, fresh(i)):
                return f"两次前向之后再分别反向时出错（模块级缓存或静态缓冲区被覆盖？）：{why}"
        return None

    def side_stream() -> str | None:
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            case = fresh()
            floating = [p.tensor for p in case.inputs + case.dys if p.tensor.is_floating_point()]
            kept = [t.clone() for t in floating]
            for t in floating:
                t.fill_(math.nan)
            torch.cuda._sleep(20_000_000)  # about 10 ms: whoever does not wait for this stream reads NaN
            for t, k in zip(floating, kept, strict=True):
                t.copy_(k)
            r = run(fn, case)
        stream.synchronize()
        why = bad(case, r, fresh())
        return why and f"在非默认流上出错（kernel 启动在了别的流上？）：{why}"

    check("重复调用一致", "多次调用都正确", repeated)
    if device.type == "cuda":
        check("非默认流", "在另一条流上结果不变", side_stream)
    check("同址换数据", "同一地址的新数据得到新结果", same_address)
    check("不受先前形状影响", "换形状后结果不变", after_other_shape)
    check("前向交错", "两次前向后分别反向，各自正确", interleaved)

    def reseeded() -> str | None:
        cuda = device.type == "cuda"
        states: list[list[Any]] = []
        python = random.getstate()
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []):
            for seed in (1, 2):
                (torch.manual_seed if cuda else torch.default_generator.manual_seed)(seed)
                random.seed(seed)
                run(fn, fresh())
                states.append([torch.get_rng_state(), torch.tensor(random.getstate()[1])] + ([torch.cuda.get_rng_state()] if cuda else []))
        random.setstate(python)
        # Drawing numbers moves two different states to two different ones; only a new seed makes them equal.
        return "重置了全局随机数种子，之后的 dropout 与采样每步相同" if any(map(torch.equal, *states)) else None

    check("不重置随机数种子", "全局随机数状态没有被重置", reseeded)

    # 5. Nothing to do: an expert without tokens, a last batch without labels.
    def empty() -> str | None:
        lead = op.args[0].dims[0] if op.args[0].dims[1:] else None
        if lead not in setup.dims:
            return None
        nothing = replace(setup, dims=setup.dims | {lead: 0})
        try:
            case = fresh(s=nothing)
            run(op.reference, case)
        except Exception:  # noqa: BLE001 - the operator itself has no meaning there
            return None
        try:
            r = run(fn, case)
        except Exception as e:  # noqa: BLE001
            # A loud refusal is a limit, not a wrong result.
            notes.append(f"{lead}=0 时报错：{describe(e)}")
            return None
        why = bad(case, r, fresh(s=nothing))
        return why and f"{lead}=0 时出错：{why}"

    check("零行", "没有任何行时结果仍正确（或报错）", empty)

    # 6. Partial use of the graph.
    def partial() -> str | None:
        names = [a.name for a in op.args if a.grad]
        subsets = [[n] for n in names] + ([[m for m in names if m != n] for n in names] if len(names) > 2 else [])
        for wrt in subsets:
            case = fresh()
            if why := bad(case, run(fn, case, wrt=wrt), fresh()) or touched(case, allow):
                return f"只有 {'、'.join(wrt)} 需要梯度时出错：{why}"
        return None

    def one_output() -> str | None:
        for i in range(len(fresh().dys) if len(fresh().dys) > 1 else 0):
            case, pristine = fresh(), fresh()
            pristine.altered = True
            for c in (case, pristine):
                for j, p in enumerate(c.dys):
                    if j != i:
                        p.refill(torch.zeros_like(p.tensor))
            ts = [t.detach().requires_grad_(a.grad) for a, t in zip(op.args, case.tensors, strict=True)]
            outs = call(fn, ts, case.call_options)
            want = [t for t in ts if t.requires_grad]
            gs = torch.autograd.grad(outs[i], want, case.dys[i].tensor.to(outs[i].dtype), allow_unused=True)
            gs = [torch.zeros_like(t) if g is None else g for t, g in zip(want, gs, strict=True)]
            r = Run(tuple(o.detach() for o in outs), dict(zip([a.name for a in op.args if a.grad], gs, strict=True)))
            if why := bad(case, r, pristine):
                return f"只用第 {i + 1} 个输出时出错：{why}"
        return None

    def no_grad() -> str | None:
        cases = fresh(), fresh(1)
        with torch.no_grad():
            both = [call(fn, c.tensors, c.call_options) for c in cases]
        for i, (case, outs) in enumerate(zip(cases, both, strict=True)):  # judged after both: static buffers
            if why := bad(case, Run(tuple(outs), {}), fresh(i)) or touched(case, allow):
                return f"no_grad 下前向出错：{why}"
        return None

    check("部分参数需要梯度", "每个参数单独需要梯度时都正确", partial)
    check("只用部分输出", "未使用的输出不影响梯度", one_output)
    check("no_grad 前向", "推理时前向正确", no_grad)
    return findings, notes
