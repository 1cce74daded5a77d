"""The cost of many graphs: what is counted, and a row that says why where nothing can be captured."""

import torch

from snippets.cuda_graph import buckets
from snippets.measure import check_tables


def test_smoke():
    tables = buckets.measure(**buckets.EXPERIMENT["smoke"])
    check_tables(buckets.EXPERIMENT["tables"], tables)
    assert [r["path"] for r in tables["graphs"]] == list(buckets.PATHS)
    assert all("CUDA" in r["failed"] and r["capture_s"] is None for r in tables["graphs"])


def test_bytes_of_pools_and_driver(monkeypatch):
    segments = [{"segment_pool_id": (0, 1), "total_size": 5}, {"segment_pool_id": (0, 2), "total_size": 7}, {"segment_pool_id": (0, 0), "total_size": 100}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20, 150))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 112)
    assert buckets.pool_bytes({(0, 1), (0, 2)}) == 12 and buckets.pool_bytes({(0, 1)}) == 5
    assert buckets.driver_bytes() == 18
