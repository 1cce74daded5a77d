"""Memory against step time at 1×4096: this project's checkpointing beside every public recipe, in one process.

Eager recipes and recipes under a CUDA graph are visited in order, then once more in the opposite order, so that
a chip that warms up favours nobody; compiled ones, whose visit begins with a compilation, stand in between.

    python -m snippets.checkpointing.pareto            # a CUDA GPU with 100 GiB, about eight minutes
    python -m snippets.checkpointing.pareto --smoke    # CPU, tiny model
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing import costs as costs_module
from snippets.checkpointing import policies
from snippets.checkpointing.plan import GIB, Costs, PlanError
from snippets.checkpointing.recipes import clean, family, fixed_bytes, visit
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "1×4096 的显存与时间：各种 checkpointing 并排",
    "needs": "cuda",
    "memory_gib": 100,
    "minutes": 8,
    "full": {
        "size": "8b", "layers": 36, "cost_rounds": 20,
        "cases": [[1, 4096, 4, [
            "hf none", "hf full", "hf every2", "hf every4", "hf attention", "hf mlp", "hf selective", "hf offload",
            "liger none", "liger full", "liger every2", "liger selective", "liger offload",
            "ours none", "ours full", "ours keep", "ours plan 2.8", "ours plan 4", "ours plan 6", "ours plan 9", "ours plan 12", "ours plan 16",
            "ours plan 2.8 host", "ours plan 4 host", "ours plan 6 host", "ours plan 9 host",
            "hf none under graph", "hf full under graph", "ours none under graph", "ours plan 2.8 under graph", "ours plan 9 under graph",
        ]]],
        "compiled": ["compiled 1 flops", "compiled 0.5 flops", "compiled 0.3 flops", "compiled 0.1 flops", "compiled 0 flops", "compiled 0.5 profile", "compiled 0.3 profile"],
    },
    "smoke": {
        "size": "tiny", "layers": 2, "cost_rounds": 5,
        "cases": [[1, 8, 2, ["hf none", "hf selective", "ours none", "ours keep up offload gate", "ours plan 1", "ours none under graph"]]],
        "compiled": [],
    },
    "tables": {
        "runs": {
            "batch": "1", "sequence": "1", "recipe": "", "family": "", "kernels": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms",
            "activation_gib": "GiB", "host_gib": "GiB", "time_ratio": "1", "memory_ratio": "1", "fits_80gb": "", "dominated_by": "", "predicted_ms": "ms", "predicted_gib": "GiB",
            "ms_error": "1", "gib_error": "1", "stores": "", "loss": "1", "failed": "",
        },
        "visits": {"batch": "1", "sequence": "1", "recipe": "", "visit": "1", "median_ms": "ms"},
        "fixed": {"part": "", "gib": "GiB"},
    },
}  # fmt: skip

# What a card sold as 80 GB leaves to tensors: an H100 SXM shows 79.65 GiB (81559 MiB), a CUDA context takes about half a GiB,
# and as much again is left to the allocator's rounding.
CARD_GIB = 79.65 - 1.0


def prepare(size: str, layers: int) -> torch.nn.Module:
    """The model of a measurement: Qwen3-8B or a tiny one, with random weights."""
    return qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())


def weights_gib(model: torch.nn.Module) -> float:
    """Memory of the weights; gradients and each of AdamW's two moments in the same dtype take as much again."""
    return sum(p.nbytes for p in model.parameters()) / GIB


def batches_of(model: torch.nn.Module, batch: int, sequence: int, count: int = 4) -> list[torch.Tensor]:
    """Random token ids ``[batch, sequence]``, several of them."""
    place = next(model.parameters()).device
    return [torch.randint(0, model.config.vocab_size, (batch, sequence), device=place) for _ in range(count)]


def compare(
    model: torch.nn.Module, batch: int, sequence: int, order: Sequence[str], steps: int, costs: Costs | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Visit the recipes in the given order (a name may come several times) and summarise each over its visits.

    Returns:
        Rows of ``runs`` and of ``visits``; ratios are against "hf none" where it ran.
    """
    batches = batches_of(model, batch, sequence)
    seen: dict[str, list[Any]] = {name: [] for name in order}
    where = {"batch": batch, "sequence": sequence}
    visits = []
    for i, name in enumerate(order):
        if any("failed" in v for v in seen[name]):
            continue
        progress(f"{batch}×{sequence} {name}", i, len(order))
        try:
            count = 2 * steps if family(name) == "compile" else steps  # those come once
            seen[name].append(visit(name, model, batches, count, costs))
        except PlanError as error:
            seen[name].append({"failed": str(error)})
        if "failed" not in seen[name][-1]:
            visits.append(where | {"recipe": name, "visit": len(seen[name]), "median_ms": statistics.median(seen[name][-1]["samples_us"]) / 1e3})
    fixed = weights_gib(model)
    rows = [where | {"recipe": name, "family": family(name), "kernels": _kernels(name)} | _summary(seen[name], fixed) for name in seen]
    base = next((r for r in rows if r["recipe"] == "hf none" and r["median_ms"]), None)
    for r in rows:
        r["time_ratio"] = r["median_ms"] / base["median_ms"] if base and r["median_ms"] else None
        r["memory_ratio"] = r["activation_gib"] / base["activation_gib"] if base and base["activation_gib"] and r["activation_gib"] else None
        r["dominated_by"] = ", ".join(o["recipe"] for o in rows if _dominates(o, r))
    return rows, visits


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether ``a``, with other kernels, is both faster and smaller than ``b``; eager recipes against eager and compiled ones."""
    rivals = a["kernels"] != b["kernels"] and (a["family"] == "graph") == (b["family"] == "graph")
    return rivals and all(a[k] is not None and b[k] is not None and a[k] < b[k] for k in ("median_ms", "activation_gib"))


def _kernels(name: str) -> str:
    return {"compiled": "compile + liger"}.get(first := name.split()[0], first)


def _summary(visits: list[Any], fixed_gib: float) -> dict[str, Any]:
    failed = next((v["failed"] for v in visits if "failed" in v), "")
    if failed:
        none = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "activation_gib", "host_gib", "predicted_ms", "predicted_gib", "ms_error", "gib_error", "loss"))
        return none | {"fits_80gb": False, "stores": "", "failed": failed}
    samples = [s / 1e3 for v in visits for s in v["samples_us"]]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    peaks = [v["peak_bytes"] for v in visits if v["peak_bytes"] is not None]
    gib = max(peaks) / GIB if peaks else None
    hosts = [v["host_bytes"] for v in visits if v["host_bytes"] is not None]
    first, median = visits[0], statistics.median(samples)
    predicted_ms = first["predicted_us"] / 1e3 if first["predicted_us"] else None
    predicted_gib = first["predicted_bytes"] / GIB if first["predicted_bytes"] else None
    return {
        "median_ms": median, "p20_ms": cuts[1], "p80_ms": cuts[7], "activation_gib": gib, "host_gib": max(hosts) / GIB if hosts else None,
        "fits_80gb": gib is not None and 4 * fixed_gib + gib <= CARD_GIB,
        "predicted_ms": predicted_ms, "predicted_gib": predicted_gib, "ms_error": predicted_ms and predicted_ms / median - 1,
        "gib_error": predicted_gib / gib - 1 if predicted_gib and gib else None,
        "stores": stores(first["policies"]), "loss": first["loss"], "failed": "",
    }  # fmt: skip


def stores(each: Sequence[policies.Policy] | None) -> str:
    """A list of policies in words: "20 × keep q+gate, 16 × block"."""
    runs: list[list[Any]] = []  # count and name
    for policy in each or []:
        if runs and runs[-1][1] == policy.name:
            runs[-1][0] += 1
        else:
            runs.append([1, policy.name])
    return ", ".join(f"{n} × {name}" for n, name in runs)


def measure(*, size: str, layers: int, cost_rounds: int, cases: list[list[Any]], compiled: list[str]) -> Tables:
    """Run the recipes of every case.

    Args:
        size, layers: "8b" or "tiny", and its number of decoder layers.
        cost_rounds: timed runs of each part whose cost the planner needs.
        cases: [batch, sequence, steps, recipes] each; ``steps`` are timed in each of the two visits to a recipe.
        compiled: recipes that every case also visits, once, with twice the steps.

    Returns:
        ``runs``: per recipe the step time, the peak above weights and gradients, both against "hf none", the pinned host
        memory held after the last step (the allocator rounds each tensor up to a power of two), whether it fits a card of 80 GB beside weights, gradients and AdamW's two moments in bf16, which recipe with other
        kernels beats it in both, and the planner's prediction and its relative error where it chose. ``visits``: the
        median of each visit, to show drift. ``fixed``: the bytes that everybody has.
    """
    model = prepare(size, layers)
    tables: Tables = {"runs": [], "visits": []}
    for batch, sequence, steps, recipes in cases:
        costs = None
        if any(" plan " in name for name in recipes):
            measured = costs_module.measure(size=size, shapes=[[batch, sequence]], rounds=cost_rounds)
            costs = Costs.read(measured, batch, sequence, layers)
            clean()
        order = [*recipes, *compiled, *(compiled and ["hf none"]), *recipes[::-1]]
        runs, visits = compare(model, batch, sequence, order, steps, costs)
        tables["runs"] += runs
        tables["visits"] += visits
    fixed_bytes(model)
    part = weights_gib(model)
    tables["fixed"] = [{"part": p, "gib": part} for p in ("weights", "gradients", "AdamW exp_avg", "AdamW exp_avg_sq")]
    return tables


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
