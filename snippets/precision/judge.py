"""Running an operator through autograd, and comparing it with fp64 truth.

No constant tolerance: the error of the kernel is divided by the error that the same-dtype
PyTorch reference makes on the same inputs, both against the fp64 reference on the same rounded
inputs. The denominator never falls below what any correct kernel may do:

* the rounding of the result itself: max, one ulp of the tensor's largest value; rms, the
  0.29 ulp (uniform rounding error) of each element;
* where the result cancels: the change of the truth when the incoming gradient moves by a
  fraction of its own rounding;
* in fp32 and fp64, where nothing rounds except the sums: a sum of n terms in plain sequential
  order is off by about 0.7·√n unit roundoffs (random walk), and every order is legitimate.

The ratio then has a fixed meaning: limits 2 (max) and 1.5 (rms), as in flash-attention's tests.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snippets.precision.cases import Case, Op, Setup, as_tuple, build

MAX_RATIO, RMS_RATIO = 2.0, 1.5
FEW = 64  # below this many elements an rms of rounding errors is luck
MANY, LEAN = 4000, 0.15  # from so many elements on, a mean error of so many ulp is no luck


@dataclass
class Run:
    """Outputs and gradients of one forward and backward. ``grads[i]`` is None where autograd gave none."""

    outputs: tuple[Tensor, ...]
    grads: dict[str, Tensor | None]
    again: dict[str, Tensor | None] | None = None  # gradients of a second backward through the same graph


class Misconduct(RuntimeError):
    """The kernel did something to its caller that no kernel may do (Chinese reason)."""


# What torch remembers between calls: name → (read, restore). A kernel that moves one of them changes other code.
GLOBALS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "autocast": (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    "autocast on the CPU": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    # There is no way to ask: does the smallest subnormal survive an addition?
    "flushing of subnormals": (lambda: _subnormal() == 0, torch.set_flush_denormal),
}


def _subnormal() -> float:
    return (torch.full((), 1e-40, dtype=torch.float32, device="cpu") * 1.0).item()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Foreign code runs in the body: it may neither end the process nor leave torch's global state changed.

    Raises:
        Misconduct: it did; what it changed is restored first.
    """
    before = {n: read() for n, (read, _) in GLOBALS.items()}
    try:
        yield
    except SystemExit as e:
        # Let through, sys.exit(0) would end the gate with the exit code of an acceptance.
        raise Misconduct(f"调用了 sys.exit({e.code!r})") from e
    finally:
        changed = [n for n, (read, _) in GLOBALS.items() if read() != before[n]]
        for n in changed:
            GLOBALS[n][1](before[n])
    if changed:
        raise Misconduct(f"改变了 torch 的全局状态：{'、'.join(changed)}")


def call(fn: Callable[..., Any], tensors: Sequence[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """The kernel's outputs as a tuple, ``watched``."""
    with watched():
        return as_tuple(fn(*tensors, **options))


def run(
    fn: Callable[..., Any],
    case: Case,
    tensors: Sequence[Tensor] | None = None,
    dys: Sequence[Tensor] | None = None,
    *,
    twice: bool = False,
    then: Sequence[Tensor] | None = None,
    wrt: Sequence[str] | None = None,
    clone: bool = True,
) -> Run:
    """Call ``fn`` and take its gradients.

    Args:
        tensors, dys: replacements for the case's own (e.g. their fp64 copies).
        twice: run a second backward through the retained graph, with the gradients ``then`` if given.
        wrt: only these arguments require a gradient.
        clone: copy results, so that a later overwrite of a shared buffer cannot change them.
    """
    tensors = case.tensors if tensors is None else tensors
    dys = [p.tensor for p in case.dys] if dys is None else dys
    leaves, wanted = [], {}
    for arg, t in zip(case.op.args, tensors, strict=True):
        leaf = t.detach()
        if arg.grad and (wrt is None or arg.name in wrt):
            leaf.requires_grad_()
            wanted[arg.name] = leaf
        leaves.append(leaf)
    outs = call(fn, leaves, case.call_options)
    if own := [a.name for a, leaf in zip(case.op.args, leaves, strict=True) if leaf.requires_grad != (a.name in wanted)]:
        raise Misconduct(f"改变了输入 {'、'.join(own)} 的 requires_grad")
    live = [(o, g) for o, g in zip(outs, dys, strict=False) if o.requires_grad]
    kept = tuple(o.detach().clone() if clone else o.detach() for o in outs)
    if not live or [o.shape for o in outs] != [g.shape for g in dys]:
        return Run(kept, dict.fromkeys(wanted))

    def backward(retain: bool, dys: Sequence[Tensor] = dys) -> dict[str, Tensor | None]:
        live = [(o, g) for o, g in zip(outs, dys, strict=True) if o.requires_grad]
        grads = torch.autograd.grad(
            [o for o, _ in live],
            list(wanted.values()),
            # A kernel may return a wider or narrower dtype than the reference; autograd wants its own.
            [g if g.dtype == o.dtype else g.to(o.dtype) for o, g in live],
            retain_graph=retain,
            allow_unused=True,
        )
        return {n: None if g is None else (g.detach().clone() if clone else g) for n, g in zip(wanted, grads, strict=True)}

    with watched():
        first = backward(twice)
        again = backward(False, dys if then is None else then) if twice else None
    if own := [n for n, leaf in wanted.items() if leaf.grad is not None]:
        raise Misconduct(f"反向自己写了 {'、'.join(own)} 的 .grad；autograd 还会再累加一次，梯度加倍")
    return Run(kept, first, again)


def level_of(fn: Callable[..., Any], op: Op, device: torch.device) -> str:
    """Which sizes a kernel can afford: "cuda", "cpu", or "tiny" if it runs in Triton's CPU interpreter.

    The interpreter executes a program per turn of a python loop. Whether a kernel uses it is seen by
    running it once: the environment variable alone says nothing about a kernel in plain PyTorch.
    """
    if device.type == "cuda":
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton" not in sys.modules:
        return "cpu"
    from triton.runtime.interpreter import GridExecutor

    plain, launched = GridExecutor.__call__, []

    def watched(self, *args, **kwargs):
        launched.append(True)
        return plain(self, *args, **kwargs)

    GridExecutor.__call__ = watched
    try:
        run(fn, build(op, Setup(op.small), torch.float32, device))
    except Exception:  # noqa: BLE001 - a gate will meet the same error and report it
        pass
    finally:
        GridExecutor.__call__ = plain
    return "tiny" if launched else "cpu"


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of ``dtype`` at each value of the fp64 tensor ``x``; at least the smallest normal's spacing."""
    tiny = torch.finfo(dtype).tiny
    return torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(tiny))))


@dataclass
class Truth:
    """fp64 results of the reference on a case's rounded inputs, and how much they move under noise.

    ``noise_all``: change when every floating input and dy moves by a relative ±1 per element
    (linearised, so multiply by a unit roundoff); ``noise_dy``: the same for dy alone.
    """

    run: Run
    noise_all: dict[str, Tensor]
    noise_dy: dict[str, Tensor]

    def items(self) -> dict[str, Tensor | None]:
        return named(self.run)


def named(r: Run) -> dict[str, Tensor | None]:
    """Results by the names used in reports: out (or out0, out1, ...), d_x, ..."""
    outs = {"out" if len(r.outputs) == 1 else f"out{i}": o for i, o in enumerate(r.outputs)}
    return outs | {f"d_{n}": g for n, g in r.grads.items()}


def truth(case: Case) -> Truth:
    """fp64 truth on exactly the values that the kernel sees."""
    ref = case.op.reference
    xs = [t.double().contiguous() if t.is_floating_point() else t for t in case.tensors]
    gs = [p.tensor.double().contiguous() for p in case.dys]
    base = run(ref, case, xs, gs)
    gen = torch.Generator(device=xs[0].device).manual_seed(7)
    h = 2.0**-30  # small enough to be linear, large enough to stand above fp64 rounding

    def moved(t: Tensor) -> Tensor:
        sign = torch.randint(0, 2, t.shape, generator=gen, device=t.device, dtype=torch.float64) * 2 - 1
        return t * (1 + h * sign)

    def change(a: Run) -> dict[str, Tensor]:
        b = named(base)
        return {n: (v - b[n]).abs() / h for n, v in named(a).items() if v is not None}

    gs_moved = [moved(g) for g in gs]
    only_dy = change(run(ref, case, xs, gs_moved))
    everything = change(run(ref, case, [moved(t) if t.is_floating_point() else t for t in xs], gs_moved))
    if case.op.slack is not None:
        for n, extra in case.op.slack(xs, gs, case.call_options).items():
            everything[n] = everything[n] + extra
    return Truth(base, everything, only_dy)


@dataclass
class Stat:
    """Ratios of one tensor. ``within_ulp``: share of elements within one ulp of the truth.

    ``rms_judged``: whether there were enough elements for the rms to count.
    """

    name: str
    max_ratio: float
    rms_ratio: float
    rms_limit: float
    within_ulp: float
    ok: bool
    why: str = ""
    rms_judged: bool = True


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def compare(name: str, got: Tensor, base: Tensor, t: Truth, case: Case, max_limit=MAX_RATIO, rms_limit=RMS_RATIO) -> Stat:
    """Judge one tensor of the kernel against truth, relative to the baseline's own error.

    Args:
        got, base: the kernel's and the same-dtype reference's result, same shape.
    """
    want = t.items()[name]
    dtype = got.dtype if unit(got.dtype) >= unit(base.dtype) else base.dtype
    u, n = unit(dtype), got.numel()
    if n == 0:
        return Stat(name, 0.0, 0.0, rms_limit, 1.0, True)
    g, b = got.double(), base.double()
    good = torch.isfinite(want) & torch.isfinite(b)
    bad = int((good & ~torch.isfinite(g)).sum())
    if bad:
        return Stat(name, math.inf, math.inf, rms_limit, 0.0, False, f"{bad}/{n} 个元素是 NaN 或 inf，参考实现处处有限")
    if not bool(good.any()):
        return Stat(name, 0.0, 0.0, rms_limit, 1.0, True, "参考实现本身溢出，不判")
    if not bool(good.all()):
        # Where the baseline overflows, nothing is known about what a correct kernel gives.
        want, g, b = want[good], g[good], b[good]
        dy_noise, all_noise = (s[name][good] for s in (t.noise_dy, t.noise_all))
    else:
        dy_noise, all_noise = t.noise_dy[name], t.noise_all[name]
    ek, eb, step = (g - want).abs(), (b - want).abs(), ulp(want, dtype)
    top = want.abs().max()
    den_max = max(eb.max().item(), ulp(top, dtype).item(), 0.6 * u * dy_noise.max().item())
    # A gradient rounded once more on the way is fair: 0.29 ulp rms, as a share of the value 0.29 u to 0.58 u. Where
    # one scalar scales them all (a loss whose gradient is made in the forward), nearly equal values stay at one end.
    fair = 0.6 if all(p.tensor.numel() == 1 for p in case.dys) else 0.3
    den_rms = max(_rms(eb), 0.29 * _rms(step), fair * u * _rms(dy_noise))
    if u < 1e-6:  # fp32, fp64: sums are the only rounding left, and their order is free
        walk = 0.7 * math.sqrt(case.reduced) * u
        den_rms = max(den_rms, walk * (_rms(all_noise) + _rms(want)))
        den_max = max(den_max, 2 * walk * (all_noise.max().item() + top.item()))
    if top.item() < 1e-6 * _scale(case):
        # Mathematically zero (e.g. the gradient through a normalisation of two values): only that
        # the kernel, too, is near zero can be asked.
        den_max = den_rms = max(den_max, u * _scale(case) * 8)
    # Below the smallest normal number a device may flush to zero.
    den_max, den_rms = den_max + torch.finfo(dtype).tiny, den_rms + torch.finfo(dtype).tiny
    max_ratio, rms_ratio = ek.max().item() / den_max, _rms(ek) / den_rms
    limit = rms_limit * (1 + 2 / math.sqrt(n))
    if u > 1e-4 and int((large := want.abs() > 1e-3 * _rms(want)).sum()) >= MANY:
        # Rounding to nearest has no direction, truncation has: half an ulp towards zero on average. It shows
        # only where the result's own rounding is most of the error: hence the baseline's lean beside it, a clamp,
        # and nothing small, which sums and the tail of a sigmoid leave many ulp off.
        w, s = want[large], step[large]
        lean = [((x[large] - w) * w.sign() / s).clamp(-1, 1).mean().item() for x in (g, b)]
        if abs(lean[0]) > LEAN + 2 * abs(lean[1]):
            why = f"{name}({str(dtype).removeprefix('torch.')})：误差有固定方向，平均 {lean[0]:+.2f} ulp（参考 {lean[1]:+.2f}）：截断而非就近舍入？"
            return Stat(name, max_ratio, rms_ratio, limit, (ek <= step).double().mean().item(), False, why)
    ok = max_ratio <= max_limit and (n < FEW or rms_ratio <= limit)
    return Stat(name, max_ratio, rms_ratio, limit, (ek <= step).double().mean().item(), ok, "", n >= FEW)


def _scale(case: Case) -> float:
    return max((p.tensor.double().square().mean().sqrt().item() for p in case.dys if p.tensor.numel()), default=1.0)


def describe(e: BaseException) -> str:
    """First line of an exception, short enough for a table."""
    text = str(e).strip().splitlines()
    if isinstance(e, Misconduct):
        return text[0]
    return f"{type(e).__name__}: {text[0][:160] if text else ''}"


def form(r: Run, base: Run, case: Case, *, strict: bool) -> list[str]:
    """What is wrong with the shape of a result rather than its numbers (Chinese reasons).

    Args:
        base: the same-dtype reference's run.
        strict: the output dtype must equal the reference's; otherwise the inputs' own dtype is also
            accepted where the reference widens (a loss in bf16, as torch's own cross_entropy gives).
    """
    out = []
    if len(r.outputs) != len(base.outputs):
        return [f"返回 {len(r.outputs)} 个张量，参考返回 {len(base.outputs)} 个"]
    for i, (a, b) in enumerate(zip(r.outputs, base.outputs, strict=True)):
        if a.shape != b.shape:
            out.append(f"输出 {i} 形状 {tuple(a.shape)}，参考 {tuple(b.shape)}")
        if a.dtype != b.dtype and (strict or a.dtype != case.dtype):
            out.append(f"输出 {i} 的 dtype 是 {a.dtype}，参考是 {b.dtype}")
        if a.device != b.device:
            out.append(f"输出 {i} 在 {a.device}，参考在 {b.device}")
    if out:
        return out  # nothing was differentiated then
    for n, g in r.grads.items():
        want = base.grads.get(n)
        if g is None and want is not None:
            out.append(f"{n} 没有得到梯度")
        elif g is not None and want is not None and g.shape != want.shape:
            out.append(f"{n} 的梯度形状 {tuple(g.shape)} 与参数 {tuple(want.shape)} 不同")
    return out


@dataclass
class Prepared:
    """A case with its truth and the same-dtype baseline, all computed before the kernel runs."""

    case: Case
    truth: Truth
    base: Run


_cache: dict[tuple, tuple[Truth, Run]] = {}
_cached_elements = 0
CACHE_ELEMENTS = {"cpu": 30_000_000, "cuda": 2_000_000_000}


def prepare(case: Case) -> Prepared:
    """Truth and baseline of a case. Remembered, since a matrix judges many kernels on the same cases."""
    global _cached_elements
    device = case.tensors[0].device
    key = (case.op.name, case.op.args, case.op.reference, str(case.call_options), str(case.setup), case.setup.seed,
           case.dtype, str(device))  # fmt: skip
    if case.altered or key not in _cache:
        t, b = truth(case), run(case.op.reference, case)
        size = 4 * sum(v.numel() for v in t.items().values() if v is not None)
        if case.altered or _cached_elements + size > CACHE_ELEMENTS.get(device.type, 0):
            return Prepared(case, t, b)
        _cached_elements += size
        _cache[key] = (t, b)
    return Prepared(case, *_cache[key])


def forget() -> None:
    """Drop remembered truths."""
    global _cached_elements
    _cache.clear()
    _cached_elements = 0


def stats(p: Prepared, r: Run, **limits: float) -> list[Stat]:
    """Ratio judgement of every output and gradient of a run (forms must agree)."""
    got, base = named(r), named(p.base)
    return [
        compare(n, got[n], base[n], p.truth, p.case, **limits)
        for n in got
        if got[n] is not None and base.get(n) is not None and p.truth.items().get(n) is not None
    ]
