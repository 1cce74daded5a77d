import importlib

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from snippets import measure as measure_module
from snippets.kernels import bench, tune


@pytest.fixture
def small(monkeypatch):
    for name, value in {"HIDDEN": 64, "INTERMEDIATE": 96, "HEADS": 4, "HEAD_DIM": 16, "VOCABULARY": 500}.items():
        monkeypatch.setattr(bench, name, value)


def test_every_case_gives_complete_rows(small):
    tables = bench.measure(kernels=list(bench.CASES), rows=[3], rounds=5)
    measure_module.check_tables(bench.EXPERIMENT["tables"], tables)
    rows = tables["speed"]
    for kernel in bench.CASES:
        of_kernel = [r for r in rows if r["kernel"] == kernel]
        assert {(r["direction"], r["impl"]) for r in of_kernel} >= {
            (d, i) for d in bench.DIRECTIONS for i in ("eager", "ours")
        }
    one = next(r for r in rows if (r["kernel"], r["direction"], r["impl"]) == ("swiglu", "backward", "ours"))
    moved = 5 * 3 * 96 * 2  # gate, up and dy read, two gradients written, in bf16
    assert one["gbps"] == pytest.approx(moved / one["median_us"] / 1e3)


def test_a_kernel_that_computes_something_else_is_not_timed(small, monkeypatch):
    monkeypatch.setattr(bench, "swiglu", lambda gate, up: torch.relu(gate) * up)
    with pytest.raises(measure_module.MeasureError, match="swiglu: gradient 0 of ours differs"):
        bench.measure(kernels=["swiglu"], rows=[3], rounds=5)


def test_eager_norm_is_transformers_line_for_line():
    module = Qwen3RMSNorm(40, eps=bench.EPS).bfloat16()
    torch.nn.init.normal_(module.weight)
    x = torch.randn(5, 40).bfloat16()
    assert torch.equal(bench.hf_rms_norm(x, module.weight), module(x))


def test_candidates_fit_the_tables_they_are_for():
    for module, key, case, direction, candidates in tune.searches():
        config = importlib.import_module(f"snippets.kernels.{module}").CONFIG
        assert case in bench.CASES and direction in bench.DIRECTIONS
        assert all(c.keys() == config[key].keys() for c in candidates)
