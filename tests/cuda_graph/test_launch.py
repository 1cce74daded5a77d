"""Bookkeeping of launches; what the profiler saw is sorted into kernels and launching calls."""

from types import SimpleNamespace

import torch

from snippets.cuda_graph import launch
from snippets.measure import check_tables


def test_smoke():
    tables = launch.measure(**launch.EXPERIMENT["smoke"])
    check_tables(launch.EXPERIMENT["tables"], tables)
    assert [r["way"] for r in tables["launches"]] == ["eager"] * 3 and all(r["host_us"] > 0 for r in tables["launches"])
    assert tables["step"][0]["host_ms"] > 0


def test_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def event(name, device, start, end):
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    seen = [event("gemm", cuda, 9, 12), event("aten::mm", cpu, 1, 6), event("cudaLaunchKernelExC", cpu, 2, 5), event("add", cuda, 7, 8)]
    device, calls = launch.events(SimpleNamespace(events=lambda: seen))
    assert [e["name"] for e in device] == ["add", "gemm"] and [e["name"] for e in calls] == ["cudaLaunchKernelExC"]
