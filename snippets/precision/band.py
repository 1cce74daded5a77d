"""Does Gate 3 see a fault? The seed band of the baseline, correct kernels and deliberate faults.

Qwen3-8B at full width and vocabulary but reduced depth (4 of 36 layers, so that a dozen runs of
1000 steps fit into minutes). transformers' own modules are trained with several seeds (weights and
order of the data), which gives the band. Every other run has the first seed's weights and data, so
that it can also be compared step by step: the baseline from weights with a few last bits flipped
(hf_nudged: how far mere rounding drives two runs apart, the yardstick), our kernels, Liger, and
faults of the kind that code review misses. ``gate3`` judges them all.

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
import math
import statistics
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from snippets import qwen3
from snippets.measure import MeasureError, Tables, cli, progress
from snippets.precision import corpus, gate3
from snippets.precision.loop import IGNORE, LAST, Run, finite, make, train
from snippets.variants import variant

EXPERIMENT = {
    "title": "种子带与故意写错的 kernel：Gate 3 看得见什么（4 层）",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 8,
    "full": {
        "model": "8b",
        "layers": 4,
        "seeds": [0, 1, 2, 3],
        "nudges": 3,
        "controls": ["ours", "liger"],
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
        "nudges": 3,
        "controls": [],
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
            "drift_limit": "nat",
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

NUDGED = "hf_nudged"
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
    """The kernels or the fault that a run is named after; a nudged baseline has the baseline's."""
    with fault(run, model) if run in faults else variant("hf" if run.startswith(NUDGED) else run, model):
        yield


# ------------------------------------------------------------------------------ experiment


def curve_rows(run: str, kind: str, seed: int, losses: torch.Tensor) -> list[dict[str, Any]]:
    """A loss curve [steps] thinned to at most CURVE_POINTS means; ``step`` is the last step of each."""
    every = max(1, len(losses) // CURVE_POINTS)
    return [
        {"run": run, "kind": kind, "seed": seed, "step": i + len(part), "loss": finite(part.mean())}
        for i, part in ((i, losses[i : i + every]) for i in range(0, len(losses), every))
    ]


def verdict_row(run: str, kind: str, losses: list[float], seeds: list[list[float]], nudged: list[list[float]], window: int) -> dict[str, Any]:
    """Gate 3 on one run, with the numbers that it judges by.

    Args:
        losses, seeds, nudged: see ``gate3.judge``; ``seeds[0]`` is the paired baseline.
    """
    v = gate3.judge(losses, seeds[0], seeds, nudged=nudged, window=window)
    value = {f.check: f for f in v.findings}
    paired = gate3.paired(losses, seeds[0])
    judged = "种子带" in value  # a NaN ends the judging early
    return {
        "run": run,
        "kind": kind,
        "first_relative": finite(gate3.step0(losses, seeds[0])),
        "paired_mean": finite(statistics.fmean(paired)),
        "drift_limit": value["配对差的漂移"].limit if judged else None,
        "paired_mean_abs": finite(statistics.fmean(map(abs, paired))),
        "paired_max_abs": finite(max(map(abs, paired))),
        "paired_ratio": value["配对差的大小"].value if judged else None,
        "last_mean_loss": finite(statistics.fmean(losses[-LAST:])),
        "outside": value["种子带"].value / len(gate3.band(seeds, window)[0]) if judged else None,
        "accepted": v.ok,
        "reason": "；".join(f.text for f in v.failed) or "四项都在限内",
    }


def measure(
    *,
    model: str,
    layers: int,
    seeds: list[int],
    nudges: int,
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
        nudges: runs of the baseline with the first seed from nudged weights.
        controls: variants of ``snippets.variants``.
        faults: see ``fault``.
        ignored: labels at the start of each sequence that don't count.
        window: steps that one point of the band is averaged over.
    """
    net, vocab = make(model, layers, seeds[0])
    plan = [("hf", "baseline", s) for s in seeds]
    plan += [(f"{NUDGED}_{k}", "yardstick", seeds[0]) for k in range(nudges)]
    plan += [(c, "control", seeds[0]) for c in controls] + [(f, "fault", seeds[0]) for f in faults]
    runs: list[tuple[str, str, int, Run]] = []
    for number, (name, kind, seed) in enumerate(plan, 1):
        progress(f"{name}（seed {seed}）", number, len(plan))
        qwen3.initialize(net, seed)
        if kind == "yardstick":
            gate3.nudge(net, int(name.removeprefix(f"{NUDGED}_")))
        rows = corpus.sequences("train", steps, tokens, seed=seed, vocab=vocab)
        with applied(name, net, faults):
            run = train(net, rows, rate=rate, warmup=warmup, ignored=ignored, name=name, say=lambda *_: None)
        runs.append((name, kind, seed, run))

    def losses(wanted: str) -> list[list[float]]:
        return [r.losses.tolist() for _, kind, _, r in runs if kind == wanted]

    baseline, nudged = losses("baseline"), losses("yardstick")
    if any(not math.isfinite(x) for curve in baseline + nudged for x in curve):
        raise MeasureError(f"the baseline's loss became NaN or infinite; lower the rate ({rate})")
    mean, deviation = gate3.band(baseline, window)
    return {
        "curve": [row for name, kind, seed, r in runs for row in curve_rows(name, kind, seed, r.losses)],
        "band": [
            {"step": i * window, "mean": m, "low": m - gate3.SIGMA * d, "high": m + gate3.SIGMA * d}
            for i, (m, d) in enumerate(zip(mean, deviation, strict=True), 1)
        ],
        "verdict": [
            verdict_row(name, kind, r.losses.tolist(), baseline, nudged, window)
            for name, kind, _, r in runs
            if kind != "baseline"
        ],
    }


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
