"""The sweep's bookkeeping: every combination once, a step that cannot be captured is a row that says so."""

from snippets.cuda_graph import sweep
from snippets.measure import check_tables


def test_smoke():
    settings = sweep.EXPERIMENT["smoke"]
    tables = sweep.measure(**settings)
    check_tables(sweep.EXPERIMENT["tables"], tables)
    rows = tables["steps"]
    assert len(rows) == len(settings["tokens"]) * len(settings["recipes"]) * 4
    assert len({(r["tokens"], r["recipe"], r["way"], r["sync"]) for r in rows}) == len(rows)
    for r in rows:
        assert (r["median_ms"] is None) == (r["way"] == "graph") and ("CUDA" in r["failed"]) == (r["way"] == "graph")
        assert r["way"] == "graph" or 0 < r["host_ms"]
