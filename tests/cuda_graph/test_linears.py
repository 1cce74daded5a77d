"""The linear layers of a step: every layer kind is timed in every way, and what the decoder uses is marked."""

from snippets.cuda_graph import decode_kernels, linears
from snippets.measure import check_tables


def test_smoke():
    settings = linears.EXPERIMENT["smoke"]
    tables = linears.measure(**settings)
    check_tables(linears.EXPERIMENT["tables"], tables)
    rows = tables["linears"]
    for layer in ("qkv", "o", "gate_up", "down", "lm_head"):
        own = [r for r in rows if r["layer"] == layer]
        assert [(r["way"], r["used"]) for r in own] == [("ours", True), ("ours", False), ("cublas", False)]
        chosen = decode_kernels.LINEAR[layer == "gate_up", False]
        assert [own[0][k] for k in ("rows", "columns", "warps")] == [chosen[k] for k in ("ROWS", "COLUMNS", "num_warps")]
        assert [own[1][k] for k in ("rows", "columns", "warps")] == settings["launches"][0]
