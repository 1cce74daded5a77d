"""The trade-off itself: memory and time against the number of checkpointed layers, from none to all.

    python -m snippets.checkpointing.layers            # a CUDA GPU with 100 GiB, about four minutes
    python -m snippets.checkpointing.layers --smoke
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

import torch

from snippets.checkpointing import policies
from snippets.checkpointing.accumulate import accumulate
from snippets.checkpointing.chunked_loss import loss_and_backward
from snippets.checkpointing.pareto import batches_of, prepare
from snippets.checkpointing.plan import GIB
from snippets.checkpointing.recipes import MASK, clean, fixed_bytes, samples_us
from snippets.kernels import patch
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "显存与时间随 checkpoint 层数的变化",
    "needs": "cuda",
    "memory_gib": 100,
    "minutes": 6,
    "full": {"size": "8b", "layers": 36, "batch": 1, "sequence": 4096, "steps": 4},
    "smoke": {"size": "tiny", "layers": 2, "batch": 1, "sequence": 8, "steps": 5},
    "tables": {
        "curve": {"run": "", "policy": "", "checkpointed": "1", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms", "activation_gib": "GiB"},
    },
}  # fmt: skip

# What is switched layer by layer: transformers' block checkpoint on its own kernels, and ours on ours.
RUNS = {"hf": policies.Block(preserve_rng_state=True, name="block"), "ours": policies.Keep()}


def point(model: torch.nn.Module, run: str, k: int, batches: list[torch.Tensor], steps: int) -> dict[str, Any]:
    """Step time and activation memory with the first ``k`` layers checkpointed."""
    count = model.config.num_hidden_layers
    clean()
    fixed = fixed_bytes(model)
    with contextlib.ExitStack() as stack:
        if run == "ours":
            stack.enter_context(patch(model))
            stack.enter_context(accumulate(model))
        stack.enter_context(policies.apply(model, [RUNS[run]] * k + [policies.Nothing()] * (count - k)))

        def step(ids: torch.Tensor) -> None:
            if run == "ours":
                loss_and_backward(model, ids, attention_mask=MASK)
            else:
                model(ids, labels=ids, attention_mask=MASK, use_cache=False).loss.backward()

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        step(batches[0])
        peak = (torch.cuda.max_memory_allocated() - fixed) / GIB if torch.cuda.is_available() else None
        samples = [s / 1e3 for s in samples_us(step, batches, steps)]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return {
        "run": run, "policy": RUNS[run].name, "checkpointed": k, "median_ms": statistics.median(samples), "p20_ms": cuts[1],
        "p80_ms": cuts[7], "activation_gib": peak,
    }  # fmt: skip


def measure(*, size: str, layers: int, batch: int, sequence: int, steps: int) -> Tables:
    """One point for each number of checkpointed layers, both runs in turn, in a shuffled but fixed order.

    A rising order would mix the chip's warming up into the slope.
    """
    model = prepare(size, layers)
    batches = batches_of(model, batch, sequence)
    order = torch.randperm(layers + 1, generator=torch.Generator().manual_seed(0)).tolist()
    for run in RUNS:  # compiles
        point(model, run, 0, batches, steps)
    rows = []
    for i, k in enumerate(order):
        progress(f"{k} layers checkpointed", i, len(order))
        rows += [point(model, run, k, batches, steps) for run in RUNS]
    return {"curve": sorted(rows, key=lambda r: (r["run"], r["checkpointed"]))}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
