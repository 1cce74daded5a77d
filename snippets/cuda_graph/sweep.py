"""Training steps of 128 to 8192 tokens, eager and as one CUDA graph: where launches are what a step waits for.

A step is forward, backward, clipping and AdamW. Beside its time stands the time that the host needs to launch it, taken from an
empty queue: as long as that is the smaller of the two, eager costs nothing but the gaps between kernels. With ``sync`` the host reads
the loss after every step, as a training loop that logs does, and so starts the next one late.

    python -m snippets.cuda_graph.sweep            # a CUDA GPU with 130 GiB
    python -m snippets.cuda_graph.sweep --smoke
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.recipes import recipe
from snippets.cuda_graph.graphed import GraphError
from snippets.cuda_graph.train_step import TrainStep
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "训练一步：token 数从 128 到 8192，eager 与 CUDA Graph",
    "needs": "cuda",
    "memory_gib": 130,
    "minutes": 8,
    "full": {"size": "8b", "layers": 36, "steps": 8, "tokens": [128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192], "recipes": ["hf none", "hf full", "ours none", "ours full"]},
    "smoke": {"size": "tiny", "layers": 1, "steps": 2, "tokens": [8, 16], "recipes": ["hf none", "ours full"]},
    "tables": {
        "steps": {
            "tokens": "1", "recipe": "", "way": "", "sync": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms", "host_ms": "ms",
            "capture_s": "s", "failed": "",
        },
    },
}  # fmt: skip


def timed(run, batches: list[torch.Tensor], steps: int, sync: bool) -> dict[str, Any]:
    """Median and spread of a step, in ms, and the host's median time to launch one from an empty queue."""
    cuda = torch.cuda.is_available()

    def once(i: int) -> None:
        loss, _ = run(batches[i % len(batches)])
        if sync:
            loss.item()

    once(0)
    hosts = []
    for i in range(2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(batches[i % len(batches)])
        hosts.append((time.perf_counter() - start) * 1e3)
    if cuda:
        torch.cuda.synchronize()
    once(0)  # so that the first event stands in a running queue
    marks: list[Any] = []
    for i in range(steps + 1):
        mark = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()
        if cuda:
            mark.record()
        marks.append(mark)
        if i < steps:
            once(i)
    if cuda:
        torch.cuda.synchronize()
    samples = [a.elapsed_time(b) if cuda else (b - a) * 1e3 for a, b in zip(marks, marks[1:], strict=False)]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return {"median_ms": statistics.median(samples), "p20_ms": cuts[1], "p80_ms": cuts[7], "host_ms": statistics.median(hosts)}


def rows_of(model: torch.nn.Module, name: str, tokens: int, steps: int) -> list[dict[str, Any]]:
    """Eager and graph, without and with a look at the loss after each step."""
    nothing = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "host_ms", "capture_s"))
    place = next(model.parameters()).device
    steps = max(3, min(steps, 16384 // tokens))  # long ones take long and vary little
    batches = [torch.randint(0, model.config.vocab_size, (1, 1, tokens), device=place) for _ in range(4)]
    rows = []
    with recipe(name, model) as ready:
        step, graph = TrainStep(model, ready.step), None
        for way in ("eager", "graph"):
            capture_s, failed = None, ""
            try:
                if way == "graph":
                    start = time.perf_counter()
                    graph = step.captured(batches[0])
                    capture_s = time.perf_counter() - start
                run = graph or step
                for sync in (False, True):
                    rows.append({"way": way, "sync": sync} | timed(run, batches, steps, sync) | {"capture_s": capture_s, "failed": ""})
            except (torch.OutOfMemoryError, GraphError) as error:
                failed = str(error).splitlines()[0]
            if failed:
                rows += [{"way": way, "sync": sync} | nothing | {"failed": failed} for sync in (False, True)]
        step = graph = run = None
    for p in model.parameters():
        p.grad = None
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
    return [{"tokens": tokens, "recipe": name} | row for row in rows]


def measure(*, size: str, layers: int, steps: int, tokens: list[int], recipes: list[str]) -> Tables:
    """Time a training step for every recipe of ``checkpointing.recipes`` and number of tokens, in a shuffled but fixed order.

    Returns:
        ``steps``: step time, the host's time to launch it, and for a graph the seconds of its capture.
    """
    model = qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())
    cases = [(t, r) for t in tokens for r in recipes]
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0)).tolist()
    rows: list[dict[str, Any]] = []
    for done, i in enumerate(order):
        progress(f"{cases[i][0]} tokens, {cases[i][1]}", done, len(order))
        rows += rows_of(model, cases[i][1], cases[i][0], steps)
    return {"steps": sorted(rows, key=lambda r: (recipes.index(r["recipe"]), r["tokens"], r["way"], r["sync"]))}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
