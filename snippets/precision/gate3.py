"""Gate 3: does training stay the same? Loss curves of the same model on the same data in the same order.

Training is chaotic: two correct kernels that round differently part after some tens of steps, and
their difference then wanders. The yardstick for it comes from the baseline itself: runs whose
weights were nudged by a rounding (``nudge``). Four questions, from the sharpest to the widest:

1. step 0: before any update both losses come from equal weights; relative difference at most 1e-3.
2. size: the mean |difference| per step, divided by the nudged runs' own; at most 3.
3. drift: the mean difference, with its sign. Rejected when it exceeds three times the rms drift of
   the nudged runs, and also half the seed-to-seed deviation of whole runs and 1e-3 of the loss:
   what is smaller than those is no reason to reject a kernel.
4. band: the window means of the candidate inside mean ± 3σ of the baseline's seeds. σ is pooled
   over neighbouring windows, because K seeds alone estimate it badly; one window in twenty may lie
   outside by chance.

Without nudged runs question 2 is skipped, and question 3 takes the standard error over windows
instead, which the wandering makes too small: expect false alarms.

The judging is a pure function of arrays; training is the caller's. The forms follow Megatron-LM's
golden statistics (band) and MLPerf's reference convergence points (test on means).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from snippets.precision.verdict import Finding, Verdict

STEP0, NUDGE_RATIO, NUDGE_DRIFT, SEED_DRIFT, SLACK, SIGMA = 1e-3, 3.0, 3.0, 0.5, 1e-3, 3.0
FEWEST = 3  # seeds, and nudged runs: fewer give no spread worth the name
OUTSIDE = 0.05  # share of windows that may lie outside the band

Curve = Sequence[float]


def windows(curve: Curve, size: int) -> list[float]:
    """Means over consecutive windows of ``size`` steps; an incomplete rest is dropped.

    Raises:
        ValueError: the curve is shorter than one window.
    """
    if len(curve) < size:
        raise ValueError(f"the curve has {len(curve)} steps, fewer than one window of {size}")
    return [statistics.fmean(curve[i : i + size]) for i in range(0, len(curve) - size + 1, size)]


def step0(candidate: Curve, baseline: Curve) -> float:
    """Relative difference of the first losses."""
    return abs(candidate[0] - baseline[0]) / max(abs(baseline[0]), 1e-12)


def paired(candidate: Curve, baseline: Curve) -> list[float]:
    """Differences per step, candidate minus baseline.

    Raises:
        ValueError: lengths differ.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"paired curves need equal lengths, got {len(candidate)} and {len(baseline)}")
    return [a - b for a, b in zip(candidate, baseline, strict=True)]


def band(seeds: Sequence[Curve], size: int) -> tuple[list[float], list[float]]:
    """Window means over the baseline's seeds and their sample deviation, pooled over 5 neighbouring windows.

    Raises:
        ValueError: fewer than 3 seeds.
    """
    if len(seeds) < FEWEST:
        raise ValueError(f"a band needs at least {FEWEST} baseline seeds, got {len(seeds)}")
    columns = list(zip(*(windows(c, size) for c in seeds), strict=True))
    variance = [statistics.variance(c) for c in columns]
    pooled = [math.sqrt(statistics.fmean(variance[max(0, i - 2) : i + 3])) for i in range(len(columns))]
    return [statistics.fmean(c) for c in columns], pooled


@torch.no_grad()
def nudge(model: torch.nn.Module, seed: int, share: float = 1e-3) -> None:
    """Flip the last bit of a random ``share`` of all weights: a change no larger than one rounding.

    What training makes of it is the yardstick for paired differences, since every correct kernel
    that rounds elsewhere disturbs the run in this way.
    """
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator(device=parameter.device).manual_seed(seed * 100_003 + number)
        bits = parameter.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()])
        bits ^= (torch.rand(bits.shape, generator=generator, device=bits.device) < share).to(bits.dtype)


@dataclass
class Yardstick:
    """What mere rounding does to a run: mean |difference| per step and rms drift over nudged runs (nat)."""

    size: float
    drift: float


def yardstick(nudged: Sequence[Curve], baseline: Curve) -> Yardstick:
    """The yardstick from nudged runs of the baseline.

    Raises:
        ValueError: fewer than 3 runs, unequal lengths, or runs that equal the baseline (not nudged at all).
    """
    if len(nudged) < FEWEST:
        raise ValueError(f"a yardstick needs at least {FEWEST} nudged runs, got {len(nudged)}")
    pairs = [paired(n, baseline) for n in nudged]
    size = statistics.fmean(abs(x) for d in pairs for x in d)
    if not size > 0:
        raise ValueError("the nudged runs equal the baseline: nothing was nudged, or a NaN is in them")
    return Yardstick(size, math.sqrt(statistics.fmean(statistics.fmean(d) ** 2 for d in pairs)))


def judge(
    candidate: Curve,
    baseline: Curve,
    seeds: Sequence[Curve],
    *,
    nudged: Sequence[Curve] = (),
    window: int = 50,
) -> Verdict:
    """Verdict on one loss curve (nat per step).

    Args:
        candidate: the run with the kernels under test.
        baseline: the run with the reference's, same initial weights and data.
        seeds: baseline runs with other seeds, ``baseline`` included: at least 3 in all.
        nudged: baseline runs from weights with some last bits flipped, same data: none, or at least 3.
        window: steps per window; shrunk to a fifth of the run where the run is short.

    Raises:
        ValueError: curves of different lengths, empty curves, too few seeds or nudged runs.
    """
    v = Verdict("gate3")
    if not candidate:
        raise ValueError("the candidate's curve is empty")
    if bad := [i for i, x in enumerate(candidate) if not math.isfinite(x)]:
        v.findings.append(Finding("有限", False, f"第 {bad[0]} 步起 loss 为 NaN 或 inf"))
        return v
    first = step0(candidate, baseline)
    v.findings.append(Finding("第 0 步", first <= STEP0, f"首步 loss 相对差 {first:.1e}", "", first, STEP0))

    d = paired(candidate, baseline)
    rounding = yardstick(nudged, baseline) if nudged else None
    if rounding:
        ratio = statistics.fmean(map(abs, d)) / rounding.size
        v.findings.append(
            Finding("配对差的大小", ratio <= NUDGE_RATIO, f"平均 |差| 是末位扰动的 {ratio:.2f}×", "", ratio, NUDGE_RATIO)
        )

    size = max(1, min(window, len(candidate) // 5))
    mean, sigma = band(seeds, size)
    own = windows(d, size)
    drift = statistics.fmean(own)
    if rounding:
        chance = NUDGE_DRIFT * rounding.drift
    else:
        chance = 3 * statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
    # The deviation of a seed's whole mean: what a change of seed moves.
    by_seed = statistics.stdev([statistics.fmean(windows(c, size)) for c in seeds])
    limit = max(chance, SEED_DRIFT * by_seed, SLACK * abs(statistics.fmean(mean)))
    v.findings.append(Finding("配对差的漂移", abs(drift) <= limit, f"平均差 {drift:+.1e}，限 {limit:.1e}", "", abs(drift), limit))

    outside = [i for i, (x, m, s) in enumerate(zip(windows(candidate, size), mean, sigma, strict=True))
               if abs(x - m) > SIGMA * s + SLACK * abs(m)]  # fmt: skip
    allowed = math.floor(OUTSIDE * len(mean))
    where = f"，从第 {outside[0] * size} 步起" if outside else ""
    v.findings.append(
        Finding("种子带", len(outside) <= allowed, f"{len(outside)}/{len(mean)} 个窗口在均值 ± {SIGMA:g}σ 之外{where}",
                "", float(len(outside)), float(allowed))
    )  # fmt: skip
    return v


def judge_runs(
    run: Callable[[str, int], Curve], seeds: Sequence[int], *, nudges: int = FEWEST, window: int = 50
) -> Verdict:
    """Train through ``run(variant, seed)`` and judge.

    ``variant`` is "baseline", "candidate" or "nudged 0", "nudged 1", ...; all but baseline run with the first seed.
    """
    curves = [run("baseline", s) for s in seeds]
    nudged = [run(f"nudged {k}", seeds[0]) for k in range(nudges)]
    return judge(run("candidate", seeds[0]), curves[0], curves, nudged=nudged, window=window)
