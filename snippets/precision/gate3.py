"""Gate 3: does training stay the same? Loss curves of the same model on the same data in the same order.

Four questions, from the sharpest to the widest:

1. step 0: before any update both losses come from equal weights; relative difference at most 1e-3.
2. paired difference with a yardstick: the mean |difference| per step, divided by that of a baseline
   run whose weights were nudged by a rounding; at most 3 (skipped without such a run).
3. paired difference with a sign: window means of (candidate - baseline) must not drift. Rejected
   when the mean drift exceeds both 3 standard errors and half the seed-to-seed deviation: what is
   statistically visible but far smaller than a change of seed is reported, not rejected.
4. band: the window means of the candidate inside mean ± 3σ of the baseline's seeds. σ is pooled
   over neighbouring windows, because K seeds alone estimate it badly; one window in twenty may lie
   outside by chance.

Everything here is a pure function of arrays; training is the caller's. The forms follow
Megatron-LM's golden statistics (band) and MLPerf's reference convergence points (test on means).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from snippets.precision.judge import Finding, Verdict

STEP0, NUDGE_RATIO, SIGMA, DRIFT = 1e-3, 3.0, 3.0, 0.5
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
        ValueError: fewer than 3 seeds, which give no deviation worth the name.
    """
    if len(seeds) < 3:
        raise ValueError(f"a band needs at least 3 baseline seeds, got {len(seeds)}")
    columns = list(zip(*(windows(c, size) for c in seeds), strict=True))
    variance = [statistics.variance(c) for c in columns]
    pooled = [math.sqrt(statistics.fmean(variance[max(0, i - 2) : i + 3])) for i in range(len(columns))]
    return [statistics.fmean(c) for c in columns], pooled


def judge(
    candidate: Curve,
    baseline: Curve,
    seeds: Sequence[Curve],
    *,
    nudged: Curve | None = None,
    window: int = 50,
) -> Verdict:
    """Verdict on one loss curve (nat per step).

    Args:
        candidate: the run with the kernels under test.
        baseline: the run with the reference's, same initial weights and data.
        seeds: baseline runs with other seeds, ``baseline`` included: at least 3 in all.
        nudged: the baseline from weights with some last bits flipped, same data.
        window: steps per window; shrunk to a fifth of the run where the run is short.

    Raises:
        ValueError: curves of different lengths, empty curves or too few seeds.
    """
    v = Verdict("gate3")
    if not candidate:
        raise ValueError("the candidate's curve is empty")
    if bad := [i for i, x in enumerate(candidate) if not math.isfinite(x)]:
        v.findings.append(Finding("有限", False, f"第 {bad[0]} 步起损失为 NaN 或 inf"))
        return v
    first = step0(candidate, baseline)
    v.findings.append(Finding("第 0 步", first <= STEP0, f"首步损失相对差 {first:.1e}", "", first, STEP0))

    d = paired(candidate, baseline)
    if nudged is not None:
        own = statistics.fmean(map(abs, paired(nudged, baseline)))
        ratio = statistics.fmean(map(abs, d)) / max(own, 1e-12)
        v.findings.append(
            Finding("配对差的大小", ratio <= NUDGE_RATIO, f"平均 |差| 是扰动末位时的 {ratio:.2f}×", "", ratio, NUDGE_RATIO)
        )

    size = max(1, min(window, len(candidate) // 5))
    mean, sigma = band(seeds, size)
    own = windows(d, size)
    drift = statistics.fmean(own)
    error = statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0
    # The deviation of a seed's whole mean: what a change of seed moves.
    by_seed = statistics.stdev([statistics.fmean(windows(c, size)) for c in seeds])
    limit = max(3 * error, DRIFT * by_seed, 1e-3 * abs(statistics.fmean(mean)))
    v.findings.append(Finding("配对差的漂移", abs(drift) <= limit, f"平均差 {drift:+.1e}，限 {limit:.1e}", "", abs(drift), limit))

    outside = [i for i, (x, m, s) in enumerate(zip(windows(candidate, size), mean, sigma, strict=True))
               if abs(x - m) > SIGMA * s + 1e-3 * abs(m)]  # fmt: skip
    allowed = math.floor(OUTSIDE * len(mean))
    where = f"，从第 {outside[0] * size} 步起" if outside else ""
    v.findings.append(
        Finding("种子带", len(outside) <= allowed, f"{len(outside)}/{len(mean)} 个窗口在均值 ± {SIGMA:g}σ 之外{where}",
                "", float(len(outside)), float(allowed))
    )  # fmt: skip
    return v


def judge_runs(
    run: Callable[[str, int], Curve], seeds: Sequence[int], *, nudged: bool = True, window: int = 50
) -> Verdict:
    """Train through ``run(variant, seed)`` and judge.

    ``variant`` is "baseline", "candidate" or "nudged"; candidate and nudged run with the first seed.
    """
    curves = [run("baseline", s) for s in seeds]
    return judge(
        run("candidate", seeds[0]),
        curves[0],
        curves,
        nudged=run("nudged", seeds[0]) if nudged else None,
        window=window,
    )
