"""Training steps of 128 to 8192 tokens, eager and as one CUDA graph: where launches are what a step waits for.

A step is forward, backward, clipping and AdamW. Beside its time stands the time that the host needs to launch it: as long as that is
the smaller of the two, eager costs nothing but the gaps between kernels. It is taken where a step is shortest. The launches are the
same for every size, but a queue takes some thousand, and where the device is slower than the host the host waits for places in it:
its time is then the device's. With ``sync`` the host reads the loss after every step, as a training loop that logs does, and so
starts the next one late.

    python -m snippets.cuda_graph.sweep            # a CUDA GPU with 130 GiB
    python -m snippets.cuda_graph.sweep --smoke
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.recipes import clean, recipe
from snippets.cuda_graph.graphed import CaptureFailed, GraphError
from snippets.cuda_graph.train_step import TrainStep
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "训练一步：token 数从 128 到 8192，eager 与 CUDA Graph",
    "needs": "cuda",
    "memory_gib": 130,
    "minutes": 8,
    "full": {"size": "8b", "layers": 36, "steps": 8, "tokens": [128, 256, 512, 1024, 2048, 4096, 8192], "recipes": ["hf none", "hf full", "ours none", "ours full"]},
    "smoke": {"size": "tiny", "layers": 1, "steps": 2, "tokens": [8, 16], "recipes": ["hf none", "ours full"]},
    "tables": {
        "steps": {
            "tokens": "1", "recipe": "", "way": "", "sync": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms", "host_ms": "ms",
            "capture_s": "s", "failed": "",
        },
    },
}  # fmt: skip


HOST_ROUNDS = 7


def host_ms(run, batches: list[torch.Tensor]) -> float:
    """The host's median time to launch a step, from an empty queue, in ms."""
    samples = []
    for i in range(HOST_ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(batches[i % len(batches)])
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def timed(run, batches: list[torch.Tensor], steps: int, sync: bool) -> dict[str, Any]:
    """Median and spread of a step, in ms."""
    cuda = torch.cuda.is_available()

    def once(i: int) -> None:
        loss, _ = run(batches[i % len(batches)])
        if sync:
            loss.item()

    once(0)
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
    return {"median_ms": statistics.median(samples), "p20_ms": cuts[1], "p80_ms": cuts[7]}


NOTHING = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "host_ms", "capture_s"))
WAYS = ("eager", "graph")


def rows_of(model: torch.nn.Module, name: str, tokens: int, steps: int, *, host: bool, ways: tuple[str, ...] = WAYS) -> tuple[list[dict[str, Any]], str]:
    """Eager and graph, without and with a look at the loss after each step; ``host``: with the host's time to launch one.

    Returns:
        The rows, and why the process is of no more use: what a capture said that broke off, or "".
    """
    place = next(model.parameters()).device
    steps = max(3, min(steps, 16384 // tokens))  # long ones take long and vary little
    # Drawn on the CPU, so that they are the same for every case.
    batches = list(torch.randint(0, model.config.vocab_size, (4, 1, 1, tokens), generator=torch.Generator().manual_seed(tokens)).to(place))
    rows, broken = [], ""
    try:
        with recipe(name, model) as ready:
            step = TrainStep(model, ready.step)
            for way in ways:
                if broken:
                    rows += failed(way, broken)
                    continue
                run, capture_s = None, None
                try:
                    if way == "graph":
                        step.optimizer.state.clear()  # or the capture would hold a copy of it, which no training needs
                        start = time.perf_counter()
                        run = step.captured(batches[0])
                        capture_s = time.perf_counter() - start
                    run = run or step
                    mine = [{"sync": sync} | timed(run, batches, steps, sync) for sync in (False, True)]
                    about = {"host_ms": host_ms(run, batches) if host else None, "capture_s": capture_s, "failed": ""}
                    rows += [{"way": way} | row | about for row in mine]
                except CaptureFailed as error:
                    broken = f"nothing is measured after a capture that broke off ({name}, {tokens} tokens: {error})"
                    rows += failed(way, error)
                except (torch.OutOfMemoryError, GraphError) as error:
                    rows += failed(way, error)
                run = None
                clean()
    finally:
        step = None
        for p in model.parameters():
            p.grad = None
        clean()
    return [{"tokens": tokens, "recipe": name} | row for row in rows], broken


def failed(way: str, why: object) -> list[dict[str, Any]]:
    """The rows of a way that could not be measured."""
    return [{"way": way, "sync": sync} | NOTHING | {"failed": str(why).splitlines()[0]} for sync in (False, True)]


def measure(*, size: str, layers: int, steps: int, tokens: list[int], recipes: list[str]) -> Tables:
    """Time a training step for every recipe of ``checkpointing.recipes`` and number of tokens, in a shuffled but fixed order.

    Eager comes first in every other case. After a capture that broke off nothing more is measured, and the rows say so.

    Returns:
        ``steps``: step time, at the smallest size the host's time to launch it, and for a graph the seconds of its capture.
    """
    model = qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())
    cases = [(t, r) for t in tokens for r in recipes]
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0)).tolist()
    rows: list[dict[str, Any]] = []
    broken = ""
    for done, i in enumerate(order):
        count, name = cases[i]
        progress(f"{count} tokens, {name}", done, len(order))
        if broken:
            rows += [{"tokens": count, "recipe": name} | row for way in WAYS for row in failed(way, broken)]
            continue
        found, broken = rows_of(model, name, count, steps, host=count == min(tokens), ways=WAYS if done % 2 == 0 else WAYS[::-1])
        rows += found
    return {"steps": sorted(rows, key=lambda r: (recipes.index(r["recipe"]), r["tokens"], r["way"], r["sync"]))}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
