"""The training loop of Gate 3: one model, one sequence a step, the same data in the same order.

One sequence of 512 tokens a step; weights, gradients and both Adam moments in the weights' dtype, no
master weights (Qwen3-8B in bf16: 16 + 16 + 33 GB); fused AdamW, betas (0.9, 0.95), weight decay 0.1;
linear warm-up, then a constant rate; gradient norm clipped to 1. beta2 is 0.95 for a reason besides
custom: with 0.999 one step changes the second moment by up to 0.1 %, less than half a bf16 step (0.2
to 0.4 %), so it would stick.

No kernel is imported here: which ones run is decided by what the caller has put into the model.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from snippets import qwen3
from snippets.measure import device, progress

LAST = 100  # steps at the end that a run's final loss is averaged over
IGNORE = -100


def make(model: str, layers: int, seed: int, *, pretrained: bool = True):
    """The model under test and the vocabulary its token ids are folded into (None: not folded).

    Args:
        model: "8b" (bf16) or "tiny" (fp32, random, vocabulary 512).
        pretrained: take QWEN3_8B's weights, if it is set and all 36 layers are asked for.
    """
    if model == "tiny":
        return qwen3.tiny(layers, device=device(), seed=seed), qwen3.TINY["vocab_size"]
    if model != "8b":
        raise ValueError(f"no model {model!r}: known are 8b, tiny")
    if pretrained and layers == qwen3.QWEN3_8B["num_hidden_layers"] and qwen3.weights():
        return qwen3.load(device=device()), None
    return qwen3.build(layers, device=device(), seed=seed), None


@dataclass
class Run:
    """One training run. ``losses`` and ``norms`` are fp32 CPU tensors [steps] (nat; before clipping).

    The norm is computed from bf16 gradients in their dtype: three significant digits.
    """

    losses: torch.Tensor
    norms: torch.Tensor
    seconds: float
    peak_gib: float


def forward(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor | None = None, **arguments: Any):
    """The model's output for unpadded sequences [batch, tokens].

    The mask is given as "none needed" for the layers of type full_attention. That skips the search
    for padding and packed sequences on every call, and lets SDPA run with is_causal=True, which
    alone leaves the flash kernel open.
    """
    mask = {"full_attention": None}
    return model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False, **arguments)


def train(
    model: torch.nn.Module,
    rows: torch.Tensor,
    *,
    rate: float,
    warmup: int,
    ignored: int = 0,
    name: str = "",
    say: Callable[..., None] = progress,
) -> Run:
    """Train on one sequence a step, in the given order.

    Nothing in the loop waits for the device but the progress line of every 100th step: losses and
    norms stay there until the end.

    Args:
        rows: token ids, int64 [steps, tokens], on any device.
        rate, warmup: peak learning rate, reached linearly after ``warmup`` steps, then constant.
        ignored: this many labels at the start of each sequence are set to -100, as a prompt's are.
        name: for the progress lines.
    """
    where = next(model.parameters()).device
    cuda = where.type == "cuda"
    steps = len(rows)
    rows = rows.to(where)
    labels = rows.clone()
    labels[:, :ignored] = IGNORE
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda or None)
    losses = torch.empty(steps, device=where)
    norms = torch.empty(steps, device=where)
    model.train()
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warmup)
        loss = forward(model, rows[step : step + 1], labels[step : step + 1]).loss
        loss.backward()
        norms[step] = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
        if (step + 1) % 100 == 0 or step == 0:
            say(f"{name} 损失 {float(losses[step]):.3f}", step + 1, steps)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return Run(losses.float().cpu(), norms.float().cpu(), seconds, peak)


def finite(value: Any) -> float | None:
    """A float for a table, None where it is NaN or infinite."""
    value = float(value)
    return value if math.isfinite(value) else None


def summary_rows(runs: dict[str, Run], reference: str, source: str) -> list[dict[str, Any]]:
    """One row a run: its losses, and its step-by-step differences from the reference run."""
    out = []
    for name, run in runs.items():
        paired = run.losses - runs[reference].losses
        out.append(
            {
                "variant": name,
                "first_loss": finite(run.losses[0]),
                "last_mean_loss": finite(run.losses[-LAST:].mean()),
                "paired_first": finite(paired[0]),
                "paired_mean": finite(paired.mean()),
                "paired_mean_abs": finite(paired.abs().mean()),
                "paired_max_abs": finite(paired.abs().max()),
                "peak_gib": run.peak_gib,
                "weights": source,
            }
        )
    return out
