"""The gates' command line.

    python -m snippets.precision check --op rms_norm --kernel my_pkg.kernels:rms_norm
    python -m snippets.precision check --inputs "x[R,H] w:weight[H]" --kernel a:f --reference a:g
    python -m snippets.precision losses --baseline s0.json s1.json s2.json --candidate c.json
    python -m snippets.precision ops

Exit code 0: accepted. 1: rejected, with reasons. 2: the request itself is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from snippets.precision.cases import OPS, UsageError, adapt, generic, lifted, parse_inputs
from snippets.precision.structure import OVERWRITES
from snippets.precision.verdict import Verdict

TITLES = {"gate1": "Gate 1（fp64：公式对不对）", "gate2": "Gate 2（bf16 与 fp32：误差不大于 PyTorch）", "gate3": "Gate 3（训练曲线）"}
SHOWN = 6  # failing findings printed per gate


def load(text: str, what: str) -> Callable[..., Any]:
    """Import ``module:callable`` (dots allowed after the colon); the working directory is searched too.

    Raises:
        UsageError: with what went wrong.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"{what} {text!r}: write module:callable, e.g. my_pkg.kernels:rms_norm")
    if module.endswith(".py") or not all(p.isidentifier() for p in module.split(".")):
        raise UsageError(f"{what} {text!r}: {module!r} is no module name; for my_pkg/kernels.py write my_pkg.kernels:{name}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise UsageError(f"{what} {text!r}: {e}; run from the directory that contains it, or set PYTHONPATH") from e
    except (Exception, SystemExit) as e:
        traceback.print_exc()
        raise UsageError(f"{what} {text!r}: importing {module} fails with {type(e).__name__}: {e}") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{what} {text!r}: {module} has no {name!r}")
        found = getattr(found, part)
    if isinstance(found, type):
        raise UsageError(f"{what} {text!r} is a class; name a function, an instance, or an autograd.Function's apply ({text}.apply)")
    if not callable(found):
        raise UsageError(f"{what} {text!r} is not callable")
    return found


def report(v: Verdict) -> str:
    """A verdict as text for a terminal."""
    lines = [f"{TITLES[v.gate]}：{'通过' if v.ok else '拒绝'}（{len(v.findings)} 项检查，{len(v.failed)} 项失败）"]
    lines += [f"  注：{n}" for n in v.notes]

    def shown(f) -> str:
        value = f"，为界限的 {f.value / f.limit:.3g} 倍" if f.value is not None and f.limit else ""
        where = f"  于 {f.case}" if f.case else ""
        return f"{f.check}：{f.text}{value}{where}"

    # One line per kind of check: the worst, and how often it failed.
    kinds: dict[str, list] = {}
    for f in v.failed:
        kinds.setdefault(f.check, []).append(f)
    for fs in list(kinds.values())[:SHOWN]:
        worst = max(fs, key=lambda f: math.inf if f.value is None or not math.isfinite(f.value) else f.value)
        lines.append(f"  ✗ {shown(worst)}" + (f"（另有 {len(fs) - 1} 组输入）" if len(fs) > 1 else ""))
    if len(kinds) > SHOWN:
        lines.append(f"  … 另有 {len(kinds) - SHOWN} 类检查失败")
    if v.ok and (worst := v.worst()):
        lines.append(f"  最接近界限：{shown(worst)}")
    return "\n".join(lines)


def as_json(verdicts: list[Verdict]) -> str:
    """All findings, for machines. Infinite values become text."""

    def number(x: float | None) -> Any:
        return x if x is None or math.isfinite(x) else str(x)

    return json.dumps(
        [
            {"gate": v.gate, "ok": v.ok, "notes": v.notes, "gradcheck": v.gradcheck,
             "findings": [{"check": f.check, "ok": f.ok, "text": f.text, "case": f.case,
                           "value": number(f.value), "limit": number(f.limit)} for f in v.findings]}
            for v in verdicts
        ],
        ensure_ascii=False, allow_nan=False, indent=1,
    )  # fmt: skip


def check(args: argparse.Namespace) -> int:
    """Run Gate 1 and/or 2 on a kernel."""
    import torch

    from snippets.precision import gate1, gate2

    if bool(args.op) == bool(args.inputs):
        raise UsageError("give either --op (see `ops`) or --inputs, not both and not neither")
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as e:
        raise UsageError(f"--device {args.device!r}: use cuda, cuda:N or cpu") from e
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device {args.device!r}: use cuda, cuda:N or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {args.device}: torch sees {torch.cuda.device_count()} GPUs here; use --device cpu")
    if not 0 <= args.seed < 10**6:
        raise UsageError("--seed: use a number from 0 to 999999")
    kernel = load(args.kernel, "--kernel")
    reference = lifted(load(args.reference, "--reference")) if args.reference else None
    if args.inputs:
        if reference is None:
            raise UsageError("--inputs needs --reference: the gates know no truth for your own operator")
        op = generic(parse_inputs(args.inputs), reference)
    else:
        if args.op not in OPS:
            near = difflib.get_close_matches(args.op, OPS, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--op {args.op!r}: {meant}known are {', '.join(OPS)}; for anything else use --inputs")
        op = replace(OPS[args.op], reference=reference) if reference else OPS[args.op]
    if reference is not None:
        # Options (eps, ...) go only where the reference knows them.
        ref, op, _ = adapt(op, reference)
        op = replace(op, reference=ref)
    allow = [a.strip() for a in args.allow_overwrite.split(",") if a.strip()]
    if unknown := set(allow) - set(OVERWRITES):
        raise UsageError(f"--allow-overwrite {', '.join(sorted(unknown))}: known are {', '.join(OVERWRITES)}")
    gate1.usable_reference(op, device)

    verdicts: list[Verdict] = []
    if not args.json:
        print(f"kernel {args.kernel}，算子 {op.name}，设备 {device}")
    for name, gate in (("1", gate1), ("2", gate2)):
        if args.gate in (name, "all"):
            t = time.perf_counter()
            # What the kernel prints must not end up inside the JSON.
            with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
                try:
                    verdicts.append(gate.check(op, kernel, device, allow=allow, seed=args.seed))
                except Exception as e:  # noqa: BLE001
                    if not any(not v.ok for v in verdicts):
                        raise
                    verdicts.append(Verdict(f"gate{name}", notes=[f"未能跑完：{type(e).__name__}: {e}；前一关的拒绝不受影响"]))
            if not args.json:
                print(report(verdicts[-1]) + f"\n  用时 {time.perf_counter() - t:.1f} s")
    ok = all(v.ok for v in verdicts)
    print(as_json(verdicts) if args.json else f"结论：{'通过' if ok else '拒绝'}")
    return 0 if ok else 1


def read_curve(path: str) -> list[float]:
    """A loss curve: a JSON list of numbers, or text with one number per line.

    Raises:
        UsageError: unreadable, with the reason.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        curve = [float(v) for v in values]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as e:
        raise UsageError(f"{path}: {e}; write a JSON list of losses, or one number per line") from e
    if not curve:
        raise UsageError(f"{path}: no losses in it")
    return curve


def losses(args: argparse.Namespace) -> int:
    """Judge loss curves with Gate 3. The first baseline is the paired one."""
    from snippets.precision import gate3

    if args.window < 1:
        raise UsageError("--window: at least 1 step")
    yardsticks = {p: read_curve(p) for p in [*args.baseline, *(args.nudged or ())]}
    candidate = read_curve(args.candidate)
    for path, curve in yardsticks.items():
        if bad := [i for i, x in enumerate(curve) if not math.isfinite(x)]:
            raise UsageError(f"{path}: the loss of step {bad[0]} is {curve[bad[0]]}; a run that diverged is no yardstick, leave it out")
        if len(curve) != len(candidate):
            raise UsageError(f"{path}: {len(curve)} losses, but {args.candidate} has {len(candidate)}; compare runs of equal length")
    seeds, nudged = [yardsticks[p] for p in args.baseline], [yardsticks[p] for p in args.nudged or ()]
    if same := [b for i, b in enumerate(args.baseline) if yardsticks[b] in seeds[:i]]:
        raise UsageError(f"--baseline {same[0]}: equals another baseline; its runs must differ by their seed, or they give no band")
    try:
        v = gate3.judge(candidate, seeds[0], seeds, nudged=nudged, window=args.window)
    except ValueError as e:
        raise UsageError(str(e)) from e
    print(report(v) + f"\n结论：{'通过' if v.ok else '拒绝'}")
    return 0 if v.ok else 1


def ops(_: argparse.Namespace) -> int:
    """List the operators that --op knows."""
    for op in OPS.values():
        args = ", ".join(f"{a.name}[{','.join(map(str, a.dims))}]" for a in op.args)
        options = "".join(f", {k}={v}" for k, v in op.options.items())
        print(f"{op.name}({args}{options})")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m snippets.precision", description="精度对齐的三个关卡：0 通过，1 拒绝，2 用法错误"
    )
    sub = parser.add_subparsers(dest="command", required=True)
    c = sub.add_parser("check", help="对一个 kernel 跑 Gate 1、2")
    c.add_argument("--op", help="内置算子名，见 ops")
    c.add_argument("--inputs", help='自定义算子的输入，如 "x[R,H] w:weight[H] labels:int[R]<V"')
    c.add_argument("--kernel", required=True, metavar="MODULE:CALLABLE", help="被测的 kernel：张量进，张量或元组出，梯度经 autograd")
    c.add_argument("--reference", metavar="MODULE:CALLABLE", help="PyTorch 参考实现，须能以 fp64 计算")
    c.add_argument("--gate", choices=["1", "2", "all"], default="all")
    c.add_argument("--device", help="cuda 或 cpu；缺省有 GPU 就用 GPU")
    c.add_argument("--allow-overwrite", default="", metavar="LIST", help=f"kernel 声明的就地复用，逗号分隔：{', '.join(OVERWRITES)}")
    c.add_argument("--seed", type=int, default=0, help="换一批随机数")
    c.add_argument("--json", action="store_true", help="输出 JSON")
    c.set_defaults(run=check)
    g = sub.add_parser("losses", help="用 Gate 3 判损失曲线")
    g.add_argument("--baseline", nargs="+", required=True, metavar="FILE", help="基线各种子的曲线，第一条与候选同种子；至少 3 条")
    g.add_argument("--candidate", required=True, metavar="FILE")
    g.add_argument("--nudged", nargs="+", metavar="FILE", help="权重末位扰动过的基线，与第一条同种子；至少 3 条，缺省时漂移容易误报")
    g.add_argument("--window", type=int, default=50, help="窗口步数")
    g.set_defaults(run=losses)
    o = sub.add_parser("ops", help="列出内置算子")
    o.set_defaults(run=ops)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except UsageError as e:
        print(f"用法错误：{e}", file=sys.stderr)
    except (Exception, SystemExit) as e:  # noqa: BLE001 - python's own exit codes, 1 and 0, would here mean a verdict
        traceback.print_exc()
        print(f"未能得出结论（不是对 kernel 的判决）：{type(e).__name__}: {e}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
