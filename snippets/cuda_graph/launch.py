"""What a launch costs: the host's time for each, the device's gap between two, and both inside a CUDA graph; then a real step.

    python -m snippets.cuda_graph.launch            # a CUDA GPU with 40 GiB
    python -m snippets.cuda_graph.launch --smoke
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from snippets import measure as measure_module
from snippets import qwen3
from snippets.cuda_graph.graphed import Graphed
from snippets.cuda_graph.hf_decode import HFDecoder
from snippets.kernels.common import on
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "一次 launch 的代价，与 decode 一步的时间线",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 3,
    "full": {"size": "8b", "layers": 36, "count": 500, "rounds": 30, "window_us": 600},
    "smoke": {"size": "tiny", "layers": 1, "count": 20, "rounds": 3, "window_us": 600},
    "tables": {
        "launches": {"what": "", "way": "", "host_us": "µs", "device_us": "µs"},
        "step": {"way": "", "kernels": "1", "device_ms": "ms", "wall_ms": "ms", "host_ms": "ms"},
        "timeline": {"way": "", "lane": "", "start_us": "µs", "end_us": "µs", "name": ""},
    },
}  # fmt: skip


# Some 30 ms, in which the host gets ahead, so that the device's own pace shows: longer than 500 launches take any host.
SLEEP_CYCLES = 60_000_000


@triton.jit
def _one(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1.0)


def _triton_add(x: torch.Tensor) -> None:
    with on(x):
        _one[1,](x)


def launches(count: int, rounds: int) -> list[dict[str, Any]]:
    """Host time and device time of one launch in a row of ``count`` that do next to nothing."""
    place = measure_module.device()
    x = torch.zeros(1, device=place)
    a = torch.zeros(16, 16, device=place)
    out = torch.zeros_like(a)
    ways: dict[str, Callable[[], Any]] = {"torch 逐元素": lambda: x.add_(1), "torch 矩阵乘": lambda: torch.mm(a, a, out=out), "Triton kernel": lambda: _triton_add(x)}
    rows = []
    for what, one in ways.items():
        def row(one: Callable[[], Any] = one) -> None:
            for _ in range(count):
                one()

        rows.append({"what": what, "way": "eager"} | _per_launch(row, count, rounds))
        if place.type == "cuda":
            graph = Graphed(row)
            graph.capture()
            rows.append({"what": what, "way": "graph"} | _per_launch(graph, count, rounds))
    return rows


def _per_launch(run: Callable[[], Any], count: int, rounds: int) -> dict[str, float | None]:
    cuda = torch.cuda.is_available()
    hosts, devices = [], []
    for _ in range(rounds + 2):
        if cuda:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
        before = time.perf_counter()
        run()
        hosts.append((time.perf_counter() - before) * 1e6 / count)
        if cuda:
            end.record()
            end.synchronize()
            devices.append(start.elapsed_time(end) * 1e3 / count)
    return {"host_us": statistics.median(hosts[2:]), "device_us": statistics.median(devices[2:]) if devices else None}


def step(model: torch.nn.Module, rounds: int, window_us: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """transformers' decode step at batch 1: kernels, their time, a step's time, the host's; and the first µs of it.

    The profiler delays every launch, so from it come only the kernels and their times, and the timeline's picture; a step's time
    and the host's are taken without it.
    """
    rows, timeline = [], []
    for way in ("eager", "graph"):
        hf = HFDecoder(model, 1, 512)
        hf.fill(256)
        if way == "graph":
            if not torch.cuda.is_available():
                continue
            hf.capture()
        for _ in range(3):
            hf.advance()
        host = []
        for _ in range(rounds):
            _wait()
            before = time.perf_counter()
            hf.advance()
            host.append((time.perf_counter() - before) * 1e3)
        wall = _steps(hf.advance, rounds)
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * torch.cuda.is_available()
        for _ in range(2):  # the first starts the profiler up
            _wait()
            with torch.profiler.profile(activities=activities) as profile:
                hf.advance()
                _wait()
        device, calls = events(profile)
        if torch.cuda.is_available() and not device:
            raise RuntimeError("the profiler saw no kernel: CUPTI cannot be used here (another profiler, or counters reserved for administrators)")
        first = min(e["start_us"] for e in device + calls)
        rows.append({
            "way": way, "kernels": len(device), "device_ms": sum(e["end_us"] - e["start_us"] for e in device) / 1e3,
            "wall_ms": wall, "host_ms": statistics.median(host),
        })  # fmt: skip
        for lane, found in (("host", calls), ("device", device)):
            timeline += [
                {"way": way, "lane": lane, "start_us": e["start_us"] - first, "end_us": e["end_us"] - first, "name": e["name"]}
                for e in found if e["start_us"] - first < window_us
            ]  # fmt: skip
    return rows, timeline


def _steps(advance: Callable[[], Any], rounds: int) -> float | None:
    """Median time of a step among others, in ms."""
    if not torch.cuda.is_available():
        return None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    advance()
    for mark in marks[:-1]:
        mark.record()
        advance()
    marks[-1].record()
    _wait()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


def events(profile: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kernels on the device and launching calls of the host (without a device: all calls), by start, in µs."""
    launching = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    device, calls = [], []
    for e in profile.events():
        row = {"start_us": e.time_range.start, "end_us": e.time_range.end, "name": e.name[:60]}
        if e.device_type == torch.autograd.DeviceType.CUDA:
            device.append(row)
        elif e.name.startswith(launching if torch.cuda.is_available() else ""):
            calls.append(row)
    key = lambda r: r["start_us"]  # noqa: E731
    return sorted(device, key=key), sorted(calls, key=key)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(*, size: str, layers: int, count: int, rounds: int, window_us: float) -> Tables:
    """Launches alone, then a decode step of the model.

    Returns:
        ``launches``: per kind and way the host's and the device's time for one launch in a row of ``count``. ``step``: kernels
        of a decode step, the sum of their times, the time of a step in a row of them, and the host's time to launch one. ``timeline``: what host and
        device do in the first ``window_us`` of it.
    """
    progress("launches")
    rows = launches(count, rounds)
    progress("a decode step")
    model = (qwen3.build(layers) if size == "8b" else qwen3.tiny(layers, device=measure_module.device())).eval()
    steps, timeline = step(model, rounds, window_us)
    return {"launches": rows, "step": steps, "timeline": timeline}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
