"""Liger's settings, replayed: what passes, what doesn't, and that the comparison itself is right."""

import math

import pytest
import torch
import torch.nn.functional as F

from snippets import measure as measure_module
from snippets.precision import liger_ci as c

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smoke():
    return c.measure(**c.EXPERIMENT["smoke"])


def rows(tables, **where):
    return [r for r in tables["verdicts"] if all(r[k] == v for k, v in where.items())]


def test_rows_match_the_declaration(smoke):
    measure_module.check_tables(c.EXPERIMENT["tables"], smoke)


def test_right_kernels_pass_both(smoke):
    right = rows(smoke, correct=True)
    assert right and all(r["passes_liger"] and r["passes_gate2"] and r["ratio"] <= 1.0 for r in right)


def test_the_bf16_mlp_test_passes_every_wrong_activation(smoke):
    wrong = rows(smoke, test="SwiGLU MLP", dtype="bf16", correct=False)
    assert len(wrong) == 3 and all(r["passes_liger"] and not r["passes_gate2"] and r["ratio"] > 5 for r in wrong)


def test_the_elementwise_and_the_fp32_tests_reject_them(smoke):
    wrong = rows(smoke, test="SiLU·mul 逐元素", correct=False)
    wrong += rows(smoke, test="SwiGLU MLP", dtype="fp32", correct=False)
    assert len(wrong) == 9 and not any(r["passes_liger"] or r["passes_gate2"] for r in wrong)


def test_eps_faults_pass_liger_on_its_data_and_not_gate2(smoke):
    for kernel in ("ε 在根号外", "漏掉 ε"):
        for r in rows(smoke, test="RMSNorm", kernel=kernel):
            assert r["passes_liger"] and not r["passes_gate2"]


def test_a_tolerance_above_the_data_passes_anything_of_that_size(smoke):
    scale = [r for r in smoke["scale"] if r["test"] == "SwiGLU MLP" and r["dtype"] == "bf16"]
    assert all(r["atol_over_rms"] > 1 for r in scale)


def test_comparison_covers_gradients():
    x = torch.randn(4, 8)
    want = c.run(F.silu, [x], torch.ones(4, 8))
    got = c.run(c.WrongSiLU.apply, [x], torch.ones(4, 8))
    assert torch.equal(got[0], want[0]) and not c.passes_liger(got, want, 1e-3, 1e-3)
    assert c.passes_liger(want, want, 0.0, 0.0)


def test_low_precision_weight_gradient_is_wrong_only_there():
    torch.manual_seed(0)
    x, w, dy = torch.randn(600, 16), torch.ones(16), torch.randn(600, 16)
    got, want = (c.run(f, [x, w], dy) for f in (c.LowPrecisionWeightGrad.apply, c.rms_norm))
    assert torch.equal(got[0], want[0]) and torch.allclose(got[1], want[1])
    assert (got[2] - want[2]).abs().max() > 1e-3


def test_reference_is_transformers_norm():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(0)
    norm = Qwen3RMSNorm(32).bfloat16()
    x = torch.randn(5, 32).bfloat16()
    assert torch.equal(c.rms_norm(x, norm.weight), norm(x))


def test_ratio_of_a_broken_kernel_is_not_hidden_by_nan():
    x = torch.randn(4, 8)
    assert not c.error_ratio(lambda t: t * math.nan, lambda t: t * 2, [x], torch.ones(4, 8)) <= 2


@pytest.mark.gpu
def test_ligers_own_kernels_pass():
    tables = c.measure(**c.EXPERIMENT["full"])
    own = rows(tables, kernel=c.LIGER)
    assert len(own) == 12 and all(r["passes_liger"] and r["passes_gate2"] for r in own)
