"""What CUDA Graph Trees record under ``torch.compile(mode="reduce-overhead")``, and what they skip without stopping.

A skipped graph is a warning at most: the program goes on as compiled kernels that the host launches one by one. So here each
case says beforehand how many graphs are recorded and which reason is given, and what happened stands beside it. In a program of
one's own, ``torch._inductor.config.triton.cudagraph_or_error = True`` makes a skip an error.

    python -m snippets.cuda_graph.trees            # a CUDA GPU; on a CPU every row says that it needs one
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snippets import measure as measure_module
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "CUDA Graph Trees：录下了什么，跳过了什么",
    "needs": "cuda",
    "memory_gib": 10,
    "minutes": 2,
    "full": {"names": None},
    "smoke": {"names": ["static"]},
    "tables": {
        "cases": {
            "name": "", "title": "", "expected_graphs": "1", "graphs": "1", "expected_reason": "", "reason": "", "skips": "1", "breaks": "1",
            "same": "", "ok": "", "failed": "",
        },
    },
}  # fmt: skip

ROUNDS = 3  # the first runs to warm up, the second records, the third replays


@dataclass(frozen=True)
class Case:
    """``make`` gives a function and the arguments of its calls; it is asked twice, so that eager has a state of its own."""

    title: str
    make: Callable[[torch.device], tuple[Callable[..., Tensor], list[tuple[Any, ...]]]]
    graphs: int
    reason: str = ""  # part of the message; empty: nothing may be skipped
    dynamic: bool = False


def _x(place: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(place)


# --8<-- [start:cases]
def static(place: torch.device):
    """One shape."""
    weight = _x(place, 64, 64)
    return lambda x: (x @ weight).relu() + 1, [(_x(place, 8, 64),)]


def three_sizes(place: torch.device):
    """A graph for each shape; all of them share one memory pool."""
    weight = _x(place, 64, 64)
    return lambda x: (x @ weight).relu() + 1, [(_x(place, n, 64),) for n in (8, 16, 24)]


def changed_input(place: torch.device):
    """A cache that is written in place and is an ordinary input."""
    cache = torch.zeros(8, 64, device=place)

    def step(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 2

    return step, [(_x(place, 8, 64), cache)]


def static_cache(place: torch.device):
    """The same with an address that is promised not to change, which is what StaticCache does."""
    step, ((x, cache),) = changed_input(place)
    torch._dynamo.mark_static_address(cache)
    return step, [(x, cache)]


def cpu_part(place: torch.device):
    """A part on the CPU between two on the GPU."""
    table = torch.arange(64.0)
    return lambda x: (x * 2 + table.sin().to(x.device)).relu(), [(_x(place, 8, 64),)]


def read_back(place: torch.device):
    """A value that the host reads: torch.compile breaks the function in two there, and each part becomes a graph."""
    return lambda x: (x * 2) * (x * 2).sum().item(), [(_x(place, 8, 64),)]
# --8<-- [end:cases]


CASES = {
    "static": Case("形状固定", static, graphs=1),
    "three_sizes": Case("三种形状，dynamic=False", three_sizes, graphs=3),
    "three_sizes_dynamic": Case("三种形状，dynamic=True", three_sizes, graphs=3, dynamic=True),
    "changed_input": Case("就地修改普通输入", changed_input, graphs=0, reason="mutated inputs"),
    "static_cache": Case("就地修改，mark_static_address", static_cache, graphs=1),
    "cpu_part": Case("中间有一段在 CPU 上，切开", cpu_part, graphs=1),  # graph_partition, on by default, leaves that part out
    "read_back": Case(".item() 打断", read_back, graphs=2),
}


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """What inductor warns about graphs while the body runs."""
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Keep(logging.WARNING)
    # The artifact that says it is called cudagraphs in torch 2.13; older ones said it as a hint on performance.
    loggers = [torch._logging.getArtifactLogger("torch._inductor.cudagraph_utils", name) for name in ("cudagraphs", "perf_hints")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield seen
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def recorded() -> int:
    """Graphs that the trees of the current device hold."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    waiting, count = list(manager.get_roots()) if manager else [], 0
    while waiting:
        count, node = count + 1, waiting.pop()
        waiting += [child for children in node.children.values() for child in children]
    return count


@torch.no_grad()
def seen(case: Case, place: torch.device) -> dict[str, Any]:
    """Run a case eager and compiled; what was recorded, what was skipped and why, and whether the results agree."""
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    cudagraph_trees.reset_cudagraph_trees()
    counters.clear()
    plain, calls = case.make(place)
    want = [plain(*arguments).clone() for arguments in calls for _ in range(ROUNDS)]
    function, calls = case.make(place)
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=case.dynamic)
    got = []
    with _messages() as messages:
        for arguments in calls:
            for _ in range(ROUNDS):
                torch.compiler.cudagraph_mark_step_begin()
                got.append(compiled(*arguments).clone())
    out = {
        "graphs": recorded(), "skips": counters["inductor"]["cudagraph_skips"], "breaks": sum(counters["graph_break"].values()),
        "reason": "; ".join(sorted({m.strip().splitlines()[0] for m in messages if "skipping" in m})),
        "same": all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, want, strict=True)),
    }  # fmt: skip
    out["ok"] = judged(case, out)
    return out


def judged(case: Case, out: dict[str, Any]) -> bool:
    """Whether it is what the case said: number of graphs, the reason, no skip without one, the same results."""
    told = case.reason in out["reason"] if case.reason else not out["skips"] and not out["reason"]
    return out["same"] and out["graphs"] == case.graphs and told and bool(out["skips"]) == bool(case.reason)


def measure(*, names: list[str] | None) -> Tables:
    """Run the cases; None for all of them."""
    if unknown := set(names or ()) - set(CASES):
        raise ValueError(f"no cases {sorted(unknown)}; known are {', '.join(CASES)}")
    place = measure_module.device()
    rows = []
    for name in names or CASES:
        case = CASES[name]
        progress(name)
        row = {"name": name, "title": case.title, "expected_graphs": case.graphs, "expected_reason": case.reason}
        nothing = dict.fromkeys(("graphs", "skips", "breaks")) | {"reason": "", "same": False, "ok": False}
        if place.type != "cuda":
            rows.append(row | nothing | {"failed": "needs a CUDA device"})
            continue
        try:
            rows.append(row | seen(case, place) | {"failed": ""})
        except Exception as error:  # what it says is the result
            rows.append(row | nothing | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]})
    return {"cases": rows}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
