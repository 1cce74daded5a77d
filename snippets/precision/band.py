"""Does Gate 3 see a fault? The seed band of the baseline, correct kernels and deliberate faults.

Qwen3-8B at full width and vocabulary but reduced depth (4 of 36 layers, so that a dozen runs of
1000 steps fit into minutes). transformers' own modules are trained with several seeds (weights and
order of the data), which gives the band. Every other run has the first seed's weights and data, so
that it can also be compared step by step: the baseline from weights with a few last bits flipped
(hf_nudged: how far mere rounding drives two runs apart), our kernels, Liger, and faults of the kind
that code review misses:

    eps_outside      RMSNorm divides by sqrt(mean x²) + 1e-3 instead of sqrt(mean x² + 1e-6)
    gain_frozen      the backward of RMSNorm never returns the gradient of its gain
    ce_denominator   cross-entropy divides by all labels, ignored ones included
    label_shift      labels shifted by two positions instead of one
    gelu             GELU in place of SiLU (not in the recorded set)

The first part of every sequence carries ignored labels, as a prompt does: without them a wrong
denominator cannot be seen at all.

    python -m snippets.precision.band [--smoke] [--json FILE]
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from snippets import qwen3
from snippets.measure import MeasureError, Tables, cli, progress
from snippets.precision import corpus
from snippets.precision.training import IGNORE, LAST, Run, finite, make, train, variant

EXPERIMENT = {
    "title": "种子带与故意写错的核：关卡 3 看得见什么（4 层）",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 6,
    "full": {
        "model": "8b",
        "layers": 4,
        "seeds": [0, 1, 2, 3, 4],
        "controls": ["hf_nudged", "ours", "liger"],
        "faults": ["eps_outside", "gain_frozen", "ce_denominator", "label_shift"],
        "steps": 1000,
        "tokens": 512,
        "ignored": 72,
        "rate": 1e-4,
        "warmup": 100,
        "window": 50,
    },
    "smoke": {
        "model": "tiny",
        "layers": 2,
        "seeds": [0, 1, 2],
        "controls": ["hf_nudged"],
        "faults": ["ce_denominator", "label_shift"],
        "steps": 8,
        "tokens": 24,
        "ignored": 6,
        "rate": 1e-3,
        "warmup": 2,
        "window": 4,
    },
    "tables": {
        "curve": {"run": "", "kind": "", "seed": "1", "step": "1", "loss": "nat"},
        "band": {"step": "1", "mean": "nat", "low": "nat", "high": "nat"},
        "verdict": {
            "run": "",
            "kind": "",
            "first_relative": "1",
            "paired_mean": "nat",
            "paired_mean_abs": "nat",
            "paired_max_abs": "nat",
            "paired_ratio": "1",
            "last_mean_loss": "nat",
            "outside": "1",
            "accepted": "",
            "reason": "",
        },
    },
    "data": ["snippets/precision/data/tokens.npy.xz"],
}

FIRST = 1e-3  # the first loss comes before any update: relative difference allowed there
SIGMA = 3.0  # half-width of the seed band in standard deviations
PAIRED = 3.0  # times the nudged baseline's step-by-step difference
NUDGED = 1e-3  # share of weights whose last bit is flipped
CURVE_POINTS = 100  # points kept of a curve, each the mean of the steps between


# ---------------------------------------------------------------------------------- faults


def _norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).__name__ == "Qwen3RMSNorm"]


def _eps_outside(self: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    rms = wide.pow(2).mean(-1, keepdim=True).sqrt()
    return self.weight * (wide / (rms + 1e-3)).to(x.dtype)


def _gain_frozen(self: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight.detach() * (wide * rstd).to(x.dtype)


def _ce_denominator(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    shifted = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]
    total = F.cross_entropy(
        logits.float().view(-1, vocab_size), shifted.reshape(-1), ignore_index=IGNORE, reduction="sum"
    )
    return total / shifted.numel()


def _label_shift(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    shifted = F.pad(labels, (0, 2), value=IGNORE)[..., 2:]
    return F.cross_entropy(logits.float().view(-1, vocab_size), shifted.reshape(-1), ignore_index=IGNORE)


@contextlib.contextmanager
def fault(name: str, model: torch.nn.Module) -> Iterator[None]:
    """Run the body with one fault built into ``model``; the model is left as it was.

    Raises:
        ValueError: for a name that the module docstring doesn't list.
    """
    methods = {"eps_outside": _eps_outside, "gain_frozen": _gain_frozen}
    losses = {"ce_denominator": _ce_denominator, "label_shift": _label_shift}
    if name in methods:
        touched, attribute = _norms(model), "forward"
        values = [types.MethodType(methods[name], m) for m in touched]
    elif name in losses:
        touched, attribute, values = [model], "_loss_function", [losses[name]]
    elif name == "gelu":
        touched = [layer.mlp for layer in model.model.layers]
        attribute, values = "act_fn", [torch.nn.GELU() for _ in touched]
    else:
        raise ValueError(f"no fault {name!r}: known are {sorted([*methods, *losses, 'gelu'])}")
    old = [m.__dict__.get(attribute, m._modules.get(attribute)) for m in touched]
    for m, value in zip(touched, values, strict=True):
        setattr(m, attribute, value)
    try:
        yield
    finally:
        for m, value in zip(touched, old, strict=True):
            if value is None:
                delattr(m, attribute)
            else:
                setattr(m, attribute, value)


@contextlib.contextmanager
def applied(run: str, model: torch.nn.Module, faults: list[str]) -> Iterator[None]:
    """The kernels or the fault that a run is named after; "hf_nudged" has the baseline's."""
    with fault(run, model) if run in faults else variant("hf" if run == "hf_nudged" else run, model):
        yield


# ------------------------------------------------------------------------------ experiment


def curve_rows(run: str, kind: str, seed: int, losses: torch.Tensor) -> list[dict[str, Any]]:
    """A loss curve [steps] thinned to at most CURVE_POINTS means; ``step`` is the last step of each."""
    every = max(1, len(losses) // CURVE_POINTS)
    return [
        {"run": run, "kind": kind, "seed": seed, "step": i + len(part), "loss": finite(part.mean())}
        for i, part in ((i, losses[i : i + every]) for i in range(0, len(losses), every))
    ]


@torch.no_grad()
def nudge(model: torch.nn.Module, seed: int) -> None:
    """Flip the last bit of a random thousandth of all weights: a change no larger than one rounding.

    What training makes of it is the yardstick for paired differences, since every correct kernel
    that rounds elsewhere disturbs the run in this way.
    """
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator(device=parameter.device).manual_seed(seed * 100_003 + number)
        bits = parameter.view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
        bits ^= (torch.rand(bits.shape, generator=generator, device=bits.device) < NUDGED).to(bits.dtype)


def windows(losses: torch.Tensor, window: int) -> torch.Tensor:
    """Means over consecutive windows of a loss curve [..., steps] → [..., steps // window]; a rest is dropped."""
    whole = losses.shape[-1] // window * window
    return losses[..., :whole].unflatten(-1, (-1, window)).mean(-1)


def seed_band(seeds: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sample standard deviation over the seeds of the windowed curves, each [steps // window].

    Args:
        seeds: losses of the baseline, [seeds, steps], at least 3 seeds.
    """
    if len(seeds) < 3:
        raise MeasureError(f"{len(seeds)} seeds give no standard deviation worth the name; take at least 3")
    means = windows(seeds.double(), window)
    return means.mean(0), means.std(0)


def verdict(losses: torch.Tensor, seeds: torch.Tensor, nudged: torch.Tensor, window: int) -> dict[str, Any]:
    """Gate 3 for one run, from loss curves alone.

    Three checks: the first loss (before any update) agrees to 1e-3; the mean absolute step-by-step
    difference from the baseline on the same weights and data is at most 3 times that of the nudged
    baseline; every window mean lies within 3 standard deviations of the seeds' mean. The paired
    check is the sharp one: the band is as wide as different data make it.

    Args:
        losses: the run, [steps]. seeds: the baseline, [seeds, steps]; the first has the run's own
            weights and data. nudged: the nudged baseline, [steps].
    """
    losses, seeds, nudged = losses.double(), seeds.double(), nudged.double()
    reference = seeds[0]
    paired, noise = losses - reference, float((nudged - reference).abs().mean())
    first = float((paired[0] / reference[0]).abs())
    mean_abs = float(paired.abs().mean())
    ratio = mean_abs / noise if noise else (1.0 if mean_abs == 0 else float("inf"))
    mean, deviation = seed_band(seeds, window)
    outside = float(((windows(losses, window) - mean).abs() > SIGMA * deviation).double().mean())
    reasons = []
    # "not <=" instead of ">": a NaN must fail
    if not first <= FIRST:
        reasons.append(f"首步损失相差 {first:.1e}，上限 {FIRST:.0e}")
    if not ratio <= PAIRED:
        reasons.append(f"逐步差是舍入扰动的 {ratio:.3g} 倍，上限 {PAIRED:.0f}")
    if not losses.isfinite().all():
        reasons.append("损失出现 NaN 或无穷")
    elif outside > 0:
        reasons.append(f"{outside:.0%} 的窗口在种子带之外")
    return {
        "first_relative": finite(first),
        "paired_mean": finite(paired.mean()),
        "paired_mean_abs": finite(mean_abs),
        "paired_max_abs": finite(paired.abs().max()),
        "paired_ratio": finite(ratio),
        "last_mean_loss": finite(losses[-LAST:].mean()),
        "outside": outside,
        "accepted": not reasons,
        "reason": "；".join(reasons) or "三项都在限内",
    }


def measure(
    *,
    model: str,
    layers: int,
    seeds: list[int],
    controls: list[str],
    faults: list[str],
    steps: int,
    tokens: int,
    ignored: int,
    rate: float,
    warmup: int,
    window: int,
) -> Tables:
    """Train the baseline with every seed, and every control and fault with the first; judge them.

    Args:
        controls: "hf_nudged" (needed, it is the yardstick) and variants of ``training.variant``.
        faults: see ``fault``.
        ignored: labels at the start of each sequence that don't count.
        window: steps that one point of the band is averaged over.
    """
    if "hf_nudged" not in controls:
        raise MeasureError('controls must contain "hf_nudged": paired differences are judged by it')
    net, vocab = make(model, layers, seeds[0])
    plan = [("hf", "baseline", s) for s in seeds]
    plan += [(c, "control", seeds[0]) for c in controls] + [(f, "fault", seeds[0]) for f in faults]
    runs: list[tuple[str, str, int, Run]] = []
    for number, (name, kind, seed) in enumerate(plan, 1):
        progress(f"{name}（seed {seed}）", number, len(plan))
        qwen3.initialize(net, seed)
        if name == "hf_nudged":
            nudge(net, seed)
        rows = corpus.sequences("train", steps, tokens, seed=seed, vocab=vocab)
        with applied(name, net, faults):
            run = train(net, rows, rate=rate, warmup=warmup, ignored=ignored, name=name, say=lambda *_: None)
        runs.append((name, kind, seed, run))

    baseline = torch.stack([r.losses for _, kind, _, r in runs if kind == "baseline"])
    if not baseline.isfinite().all():
        raise MeasureError(f"the baseline's loss became NaN or infinite; lower the rate ({rate})")
    nudged = next(r.losses for name, _, _, r in runs if name == "hf_nudged")
    mean, deviation = seed_band(baseline, window)
    return {
        "curve": [row for name, kind, seed, r in runs for row in curve_rows(name, kind, seed, r.losses)],
        "band": [
            {"step": i * window, "mean": m, "low": m - SIGMA * d, "high": m + SIGMA * d}
            for i, (m, d) in enumerate(zip(mean.tolist(), deviation.tolist(), strict=True), 1)
        ],
        "verdict": [
            {
                "run": name,
                "kind": kind,
                **verdict(r.losses, baseline, nudged, window),
            }
            for name, kind, _, r in runs
            if kind != "baseline"
        ],
    }


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
