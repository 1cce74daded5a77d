"""What many graphs cost: seconds of capture and memory, by the number of batch sizes captured, with one memory pool and with one each.

Captured from the largest batch down, as serving engines do, so that every later graph finds its memory in the pool. Beside the
pool, which holds what the captured kernels write, the driver keeps the graph itself: that is the rest of what the device lost, once
each graph has run. Each way has a process of its own, for the driver keeps memory of graphs that are gone. In neither number is the
workspace that cuBLAS takes for every stream, which the warm-up gets from the common pool.

    python -m snippets.cuda_graph.buckets            # a CUDA GPU with 80 GiB
    python -m snippets.cuda_graph.buckets --smoke
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.recipes import clean
from snippets.cuda_graph.decoder import Decoder
from snippets.cuda_graph.graphed import Graphed, GraphError
from snippets.cuda_graph.hf_decode import HFDecoder
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "录多少张图：耗时与显存",
    "needs": "cuda",
    "memory_gib": 80,
    "minutes": 3,
    "full": {
        "size": "8b", "layers": 36, "places": 1024, "counts": [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1],
    },
    "smoke": {"size": "tiny", "layers": 1, "places": 8, "counts": [2, 1]},
    "tables": {
        "graphs": {"path": "", "graphs": "1", "batch": "1", "capture_s": "s", "pool_gib": "GiB", "driver_gib": "GiB", "failed": ""},
    },
}  # fmt: skip

GIB = 2**30
PATHS = ("ours, one pool", "ours, a pool each", "transformers, one pool")


def pool_bytes(handles: set[tuple[int, int]]) -> int:
    """Bytes that the caching allocator holds in these memory pools."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in handles)


def driver_bytes() -> int:
    """Bytes in use on the device that the caching allocator doesn't hold: contexts, kernels, graphs."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def captured(path: str, model: torch.nn.Module, places: int, counts: list[int]) -> list[dict[str, Any]]:
    """One row for each graph: seconds and memory of it and of all before it."""
    kind, _, how = path.partition(", ")
    decoders = [Decoder(model, max(counts), places)] * len(counts) if kind == "ours" else [HFDecoder(model, n, places) for n in counts]
    steps = [functools.partial(d.step, n) if kind == "ours" else d.step for d, n in zip(decoders, counts, strict=True)]
    for decoder, step in zip(decoders, steps, strict=True):
        with decoder._untouched():
            step()  # compiles and loads kernels for each size, which a server does once; it is no cost of the graphs
    clean()
    before = driver_bytes() if torch.cuda.is_available() else 0
    rows: list[dict[str, Any]] = []
    graphs: list[Graphed] = []
    seconds = 0.0
    for decoder, step, count in zip(decoders, steps, counts, strict=True):
        graph = Graphed(step, share=graphs[0] if graphs and how == "one pool" else None)
        row = {"path": path, "graphs": len(graphs) + 1, "batch": count}
        start = time.perf_counter()
        try:
            with decoder._untouched():
                graph.capture()
                seconds += time.perf_counter() - start
                graph()  # the driver gets the rest of its memory when a graph runs first
        except (GraphError, torch.OutOfMemoryError) as error:
            return [*rows, row | dict.fromkeys(("capture_s", "pool_gib", "driver_gib")) | {"failed": str(error).splitlines()[0]}]
        graphs.append(graph)
        torch.cuda.empty_cache()
        pools = {tuple(g._memory.pool) for g in graphs}
        rows.append(row | {"capture_s": seconds, "pool_gib": pool_bytes(pools) / GIB, "driver_gib": (driver_bytes() - before) / GIB, "failed": ""})
    return rows


def measure(*, size: str, layers: int, places: int, counts: list[int]) -> Tables:
    """Capture a decode step for one batch size after another.

    Args:
        size, layers: "8b" or "tiny", and its number of decoder layers.
        places: tokens of each cache.
        counts: batch sizes in the order of capture.

    Returns:
        ``graphs``: after each graph the seconds of all captures so far (warm-up runs in them, compilation not), the memory in
        their pools, and what the driver took beside.
    """
    rows = []
    for i, path in enumerate(PATHS):
        progress(path, i, len(PATHS))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            rows += apart.submit(_in_process, path, size, layers, places, counts).result()
    return {"graphs": rows}


def _in_process(path: str, size: str, layers: int, places: int, counts: list[int]) -> list[dict[str, Any]]:
    model = (qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())).eval()
    return captured(path, model, places, counts)


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
