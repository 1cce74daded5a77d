"""Decode, one token at a time: transformers eager, captured and compiled, and this project's decoder, over batch and context.

Caches hold random keys and values; nothing in a step's time depends on what they say. Every path runs ``tokens`` steps in a row without
a wait, as a server does, twice: once in order and once in the opposite order; a compiled path, whose compilation takes most of a
minute, once, in the middle. ``decode_compiled`` and ``decode_compiled_long`` are the same with torch.compile. The bytes that a token needs are the weights,
but for the input embedding, and the keys and values of its context; what a path moves beyond that is its own affair.

    python -m snippets.cuda_graph.decode            # a CUDA GPU with 130 GiB
    python -m snippets.cuda_graph.decode --smoke
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.cuda_graph import decode_kernels
from snippets.cuda_graph.decoder import Decoder
from snippets.cuda_graph.graphed import CaptureFailed, Graphed, GraphError, first_cause
from snippets.cuda_graph.hf_decode import HFDecoder
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "decode：batch × 上下文的阶梯",
    "needs": "cuda",
    "memory_gib": 130,
    "minutes": 6,
    "full": {
        "size": "8b", "layers": 36, "tokens": 24,
        "cases": [
            [1, 512, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [1, 4096, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [1, 16384, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [8, 512, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [8, 4096, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [8, 16384, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [32, 512, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [32, 4096, ["hf eager", "hf graph", "ours eager", "ours graph"]],
            [32, 16384, ["hf eager", "hf graph", "ours eager", "ours graph"]],
        ],
    },
    "smoke": {"size": "tiny", "layers": 1, "tokens": 3, "cases": [[1, 6, ["hf eager", "ours eager", "ours graph"]], [3, 6, ["ours eager", "hf graph"]]]},
    "tables": {
        "steps": {
            "batch": "1", "context": "1", "path": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms", "tokens_per_s": "1/s", "needed_gb": "GB",
            "tb_per_s": "TB/s", "of_copy": "1", "prepare_s": "s", "failed": "",
        },
        "memory": {"what": "", "tb_per_s": "TB/s", "ms": "ms"},
    },
}  # fmt: skip


def needed_bytes(model: torch.nn.Module, batch: int, context: int) -> int:
    """What one step has to read: every weight but the input embedding's, and the keys and values of each context."""
    config, table = model.config, model.model.embed_tokens.weight
    weights = sum(p.nbytes for p in model.parameters()) - (0 if table is model.lm_head.weight else table.nbytes)
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * table.element_size()
    return weights + batch * context * cache


def is_compiled(path: str) -> bool:
    """Whether it is a mode of torch.compile."""
    return path.startswith("hf ") and path not in ("hf eager", "hf graph")


def compiled(model: torch.nn.Module, mode: str) -> Callable[..., Any]:
    """The model under torch.compile; nothing is compiled before the first call."""
    return torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)


def prepared(path: str, model: torch.nn.Module, batch: int, context: int, places: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What advances a path by one token, and what puts it back to ``context`` tokens."""
    kind, _, way = path.partition(" ")
    if kind == "ours":
        decoder = Decoder(model, batch, places)
        decoder.keys.normal_()
        decoder.values.normal_()

        def back() -> None:
            decoder.lengths.fill_(context)

        back()
        if way == "graph":
            decoder.capture(batch)
        return (lambda: decoder.decode(batch, 1)), back
    if kind != "hf":
        raise ValueError(f"no path {path!r}: they begin with hf or ours")
    hf = HFDecoder(model, batch, places, compiled(model, way) if is_compiled(path) else None)

    def back_hf() -> None:
        for layer in hf.cache.layers:
            layer.cumulative_length.fill_(context)

    hf.fill(context)
    if way == "graph":
        hf.capture()
    return hf.advance, back_hf


def visit(path: str, model: torch.nn.Module, batch: int, context: int, tokens: int) -> dict[str, Any]:
    """Times of ``tokens`` steps in ms, and the seconds until the first; or why there are none, and whether the process is broken."""
    cuda = torch.cuda.is_available()
    start = time.perf_counter()
    try:
        advance, back = prepared(path, model, batch, context, context + tokens + 8)
        for _ in range(3):  # a compiled path warms up, records, replays
            advance()
        if cuda:
            torch.cuda.synchronize()
        ready = time.perf_counter() - start
        back()
        if not cuda:
            marks = [time.perf_counter()]
            for _ in range(tokens):
                advance()
                marks.append(time.perf_counter())
            return {"samples": [(b - a) * 1e3 for a, b in zip(marks, marks[1:], strict=False)], "prepare_s": ready}
        events = [torch.cuda.Event(enable_timing=True) for _ in range(tokens + 1)]
        advance()
        events[0].record()
        for event in events[1:]:
            advance()
            event.record()
        torch.cuda.synchronize()
        return {"samples": [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)], "prepare_s": ready}
    except CaptureFailed as error:
        return {"failed": str(error).splitlines()[0], "broken": True}
    except (torch.OutOfMemoryError, GraphError) as error:
        return {"failed": str(error).splitlines()[0]}
    except Exception as error:  # compilers raise what they like, and minutes of other rows would be lost
        if not is_compiled(path):
            raise
        return {"failed": first_cause(error)}
    finally:
        advance = back = None
        torch._dynamo.reset()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def memory(model: torch.nn.Module, tokens: int) -> list[dict[str, Any]]:
    """How fast memory is: a copy, and the linear layers of a step alone, one after another in a CUDA graph."""
    rows = [{"what": "copy", "tb_per_s": measure_module.copy_bandwidth(1 << 30 if torch.cuda.is_available() else 1 << 20) / 1e3, "ms": None}]
    decoder = Decoder(model, 1, 8)
    head, hidden = model.lm_head.weight, torch.randn_like(decoder._hidden)

    def chain() -> None:
        with torch.no_grad():
            for layer in decoder.layers:
                decode_kernels.linear(hidden, layer.qkv, out=decoder._qkv, pdl=decoder.pdl)
                decode_kernels.linear(decoder._attended, layer.o, out=decoder._between, pdl=decoder.pdl)
                decode_kernels.linear(hidden, layer.gate_up, gated=True, out=decoder._inner, pdl=decoder.pdl)
                decode_kernels.linear(decoder._inner, layer.down, out=decoder._between, pdl=decoder.pdl)
            decode_kernels.linear(hidden, head, out=decoder.logits, pdl=decoder.pdl)

    run = chain
    if torch.cuda.is_available():
        run = Graphed(chain)
        run.capture()
    ms = measure_module.time_cuda(run, rounds=max(5, tokens), warmup=3)["median_us"] / 1e3
    return [*rows, {"what": "linear layers alone", "tb_per_s": needed_bytes(model, 1, 0) / ms / 1e9, "ms": ms}]


def measure(*, size: str, layers: int, tokens: int, cases: list[list[Any]]) -> Tables:
    """Time the paths of each case.

    Args:
        size, layers: "8b" or "tiny", and its number of decoder layers.
        tokens: timed steps of each visit to a path.
        cases: [batch, context, paths] each; a path is "hf" or "ours" and "eager" or "graph", or "hf" and a mode of torch.compile.

    Returns:
        ``steps``: per path the time of a step, tokens of all sequences per second, the bytes that a step needs, the rate that
        this makes, that rate over a copy's (which counts what it reads and what it writes), and the seconds of the last
        visit until it was ready. ``memory``: rates to compare with.
    """
    model = (qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())).eval()
    rates = memory(model, tokens)
    rows, broken = [], ""
    for batch, context, paths in cases:
        seen: dict[str, list[dict[str, Any]]] = {p: [] for p in paths}
        order = [*(p for p in paths if not is_compiled(p)), *filter(is_compiled, paths), *(p for p in paths[::-1] if not is_compiled(p))]
        for i, path in enumerate(order):
            if broken:
                seen[path] = seen[path] or [{"failed": broken}]
            elif not any("failed" in v for v in seen[path]):
                progress(f"{batch} × {context} {path}", i, len(order))
                seen[path].append(visit(path, model, batch, context, tokens))
                if seen[path][-1].get("broken"):
                    broken = f"nothing is measured after a capture that broke off ({batch} × {context} {path})"
        needed = needed_bytes(model, batch, context)
        rows += [{"batch": batch, "context": context, "path": path} | summary(seen[path], batch, needed, rates[0]["tb_per_s"]) for path in paths]
    return {"steps": rows, "memory": rates}


def summary(visits: list[dict[str, Any]], batch: int, needed: int, copy: float) -> dict[str, Any]:
    """One row of ``steps``."""
    keys = ("median_ms", "p20_ms", "p80_ms", "tokens_per_s", "tb_per_s", "of_copy", "prepare_s")
    failed = next((v["failed"] for v in visits if "failed" in v), "")
    if failed:
        return dict.fromkeys(keys) | {"needed_gb": needed / 1e9, "failed": failed}
    samples = [s for v in visits for s in v["samples"]]
    cuts, median = statistics.quantiles(samples, n=10, method="inclusive"), statistics.median(samples)
    values = (median, cuts[1], cuts[7], batch / median * 1e3, needed / median / 1e9, needed / median / 1e9 / copy, visits[-1]["prepare_s"])
    return dict(zip(keys, values, strict=True)) | {"needed_gb": needed / 1e9, "failed": ""}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
