"""The training step of ``sweep`` with torch.compile of the whole model, beside eager and the manual graph.

Compiled is the forward and the backward that torch.compile makes of it; clipping and AdamW are the same fused operators for
everybody. With ``reduce-overhead`` the two are CUDA graphs, and what is around them is launched as usual.

    python -m snippets.cuda_graph.sweep_compiled            # a CUDA GPU with 110 GiB
    python -m snippets.cuda_graph.sweep_compiled --smoke
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.recipes import MASK, clean
from snippets.cuda_graph.graphed import first_cause
from snippets.cuda_graph.sweep import failed, rows_of, timed
from snippets.cuda_graph.train_step import TrainStep
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "训练一步：eager、手工录图与 torch.compile",
    "needs": "cuda",
    "memory_gib": 110,
    "minutes": 8,
    "full": {"size": "8b", "layers": 36, "steps": 8, "tokens": [1024], "modes": ["default", "reduce-overhead"]},
    "smoke": {"size": "tiny", "layers": 1, "steps": 2, "tokens": [8], "modes": ["default"]},
    "tables": {
        "steps": {
            "tokens": "1", "recipe": "", "way": "", "sync": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms", "host_ms": "ms",
            "capture_s": "s", "failed": "",
        },
    },
}  # fmt: skip


def compiled_rows(model: torch.nn.Module, mode: str, tokens: int, steps: int) -> list[dict[str, Any]]:
    """A mode of torch.compile, without and with a look at the loss after each step; ``capture_s``: until it was ready."""
    torch._dynamo.reset()
    compiled = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)

    def forward_backward(ids: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(ids, labels=ids, attention_mask=MASK, use_cache=False).loss
        loss.backward()
        return loss.detach().clone()  # the next step writes over the graph's own

    place = next(model.parameters()).device
    batches = list(torch.randint(0, model.config.vocab_size, (4, 1, 1, tokens), generator=torch.Generator().manual_seed(tokens)).to(place))
    try:
        step = TrainStep(model, forward_backward)
        start = time.perf_counter()
        for i in range(3):  # warms up, records, replays
            step(batches[i])[0].item()
        ready = time.perf_counter() - start
        rows = [{"way": mode, "sync": sync} | timed(step, batches, steps, sync) | {"host_ms": None, "capture_s": ready, "failed": ""} for sync in (False, True)]
    except Exception as error:  # compilers raise what they like, and minutes of other rows would be lost
        rows = failed(mode, first_cause(error))
    finally:
        step = compiled = None
        for p in model.parameters():
            p.grad = None
        torch._dynamo.reset()
        clean()
    return [{"tokens": tokens, "recipe": "hf none"} | row for row in rows]


def measure(*, size: str, layers: int, steps: int, tokens: list[int], modes: list[str]) -> Tables:
    """Time a training step of transformers' kernels: eager, as one graph, and in these modes of torch.compile.

    Returns:
        ``steps``: as ``sweep``'s; ``way`` is "eager", "graph" or the mode.
    """
    model = qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())
    rows: list[dict[str, Any]] = []
    for count in tokens:
        for mode in modes:
            progress(f"{count} tokens, {mode}")
            rows += compiled_rows(model, mode, count, steps)
        progress(f"{count} tokens, eager and graph")
        rows += rows_of(model, "hf none", count, steps, host=False)[0]
    return {"steps": rows}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
