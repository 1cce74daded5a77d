"""The linear layers of a decode step at batch 1: ``decode_kernels.linear`` under several launch parameters, and cuBLAS.

Each way runs all decoder layers' matrices of one kind one after another in a CUDA graph, so that none is in the L2 cache and no
launch is waited for. Ours includes what is folded into it (norm, activation, residual); cuBLAS is the bare product. The rows of
one layer are timed in rounds of rotating order.

    python -m snippets.cuda_graph.linears            # a CUDA GPU with 24 GiB
    python -m snippets.cuda_graph.linears --smoke
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snippets import measure as measure_module
from snippets import qwen3
from snippets.cuda_graph import decode_kernels
from snippets.cuda_graph.decoder import Decoder
from snippets.cuda_graph.graphed import Graphed
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "decode 的线性层：launch 参数与 cuBLAS",
    "needs": "cuda",
    "memory_gib": 24,
    "minutes": 3,
    "full": {
        "size": "8b", "layers": 36, "rounds": 15,
        "launches": [
            [1, 2048, 4], [1, 4096, 4], [1, 4096, 8], [2, 1024, 4], [2, 2048, 4], [2, 2048, 8], [2, 4096, 8], [4, 1024, 4], [4, 2048, 8], [4, 4096, 8],
        ],
    },
    "smoke": {"size": "tiny", "layers": 1, "rounds": 5, "launches": [[32, 64, 4]]},
    "tables": {
        "linears": {
            "layer": "", "way": "", "rows": "1", "columns": "1", "warps": "1", "used": "", "pdl": "", "median_us": "µs", "p20_us": "µs", "p80_us": "µs", "tb_per_s": "TB/s",
        },
    },
}  # fmt: skip


def calls(decoder: Decoder) -> dict[str, list[tuple[dict[str, Any], Tensor]]]:
    """Per kind of layer the arguments of ``linear`` in a step, and the weight, of every decoder layer."""
    hidden, between, inner = decoder._hidden[:1], decoder._between[:1], decoder._inner[:1]
    attended, qkv, logits = decoder._attended[:1], decoder._qkv[:1], decoder.logits[:1]
    norm, head = decoder.model.model.norm.weight, decoder.model.lm_head.weight
    return {
        "qkv": [(dict(x=hidden, norm=layer.norm, out=qkv), layer.qkv) for layer in decoder.layers],
        "o": [(dict(x=attended, residual=hidden, out=between), layer.o) for layer in decoder.layers],
        "gate_up": [(dict(x=between, norm=layer.mlp_norm, gated=True, out=inner), layer.gate_up) for layer in decoder.layers],
        "down": [(dict(x=inner, residual=between, out=hidden), layer.down) for layer in decoder.layers],
        "lm_head": [(dict(x=hidden, norm=norm, out=logits), head)],
    }


@torch.no_grad()
def ours(arguments: list[tuple[dict[str, Any], Tensor]], pdl: bool, launch: dict[str, int]) -> None:
    """Every layer's call."""
    for given, weight in arguments:
        decode_kernels.linear(weight=weight, pdl=pdl, **given, **launch)


@torch.no_grad()
def cublas(arguments: list[tuple[dict[str, Any], Tensor]], out: Tensor) -> None:
    """Every layer's bare product."""
    for given, weight in arguments:
        torch.mm(given["x"], weight.T, out=out)


def measure(*, size: str, layers: int, rounds: int, launches: list[list[int]]) -> Tables:
    """Time the linear layers of a step.

    Args:
        size, layers: "8b" or "tiny", and its number of decoder layers.
        rounds: timed calls of each way.
        launches: [rows a program makes, columns it reads at a time, warps] each; those that ``LINEAR`` names are added.

    Returns:
        ``linears``: time of one layer's call and the rate at which its weight is read; ``used`` marks what ``LINEAR`` names,
        ``pdl`` whether a kernel starts before the one before has ended.
    """
    model = (qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())).eval()
    decoder = Decoder(model, 1, 8)
    rows = []
    for done, (layer, arguments) in enumerate(calls(decoder).items()):
        progress(layer, done, 5)
        weight, gated = arguments[0][1], arguments[0][0].get("gated", False)
        chosen = decode_kernels.LINEAR[gated, weight.shape[1] > 8192]
        used = (chosen["ROWS"], chosen["COLUMNS"], chosen["num_warps"])
        ways: dict[tuple[str, tuple[int, int, int] | None, bool], Callable[[], None]] = {}
        for pdl in dict.fromkeys((decoder.pdl, False)):
            ways["ours", used, pdl] = functools.partial(ours, arguments, pdl, {})
        for launch in dict.fromkeys(map(tuple, launches)):
            if launch != used:
                ways["ours", launch, decoder.pdl] = functools.partial(ours, arguments, decoder.pdl, dict(zip(("ROWS", "COLUMNS", "num_warps"), launch, strict=True)))
        ways["cublas", None, False] = functools.partial(cublas, arguments, weight.new_empty(1, weight.shape[0]))
        timed = measure_module.side_by_side({str(key): _captured(run) for key, run in ways.items()}, rounds=rounds, warmup=3)
        for (way, launch, pdl), key in zip(ways, map(str, ways), strict=True):
            times = {name: value / len(arguments) for name, value in timed[key].items()}
            shape = dict(zip(("rows", "columns", "warps"), launch or (None,) * 3, strict=True))
            rows.append({"layer": layer, "way": way, **shape, "used": launch == used, "pdl": pdl, **times, "tb_per_s": weight.nbytes / times["median_us"] / 1e6})
    return {"linears": rows}


def _captured(run: Callable[[], None]) -> Callable[[int], None]:
    if not torch.cuda.is_available():
        return lambda _: run()
    graph = Graphed(run)
    graph.capture()
    return lambda _: graph()


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
