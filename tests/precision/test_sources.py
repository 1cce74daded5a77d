"""The seven demonstrations show the effect that they name, on small inputs."""

import pytest
import torch

from snippets import measure as measure_module
from snippets.precision import sources

CPU = torch.device("cpu")


def by(demonstration, metric=None):
    """{setting: value} of one metric of a demonstration."""
    return {s: float(v) for s, m, v, _ in demonstration if metric is None or m == metric}


@pytest.fixture(scope="module")
def smoke():
    torch.manual_seed(0)
    return sources.measure(**sources.EXPERIMENT["smoke"] | {"drift_steps": 10})


def test_rows_match_the_declaration(smoke):
    measure_module.check_tables(sources.EXPERIMENT["tables"], smoke)


def test_all_seven_sources_are_there_and_each_names_its_gate(smoke):
    assert {r["source"] for r in smoke["sources"]} == set(sources.SEEN_BY) and len(sources.SEEN_BY) == 7
    assert all(r["seen_by"] for r in smoke["sources"])


def test_bf16_running_sum_of_ones_stalls_and_pairs_do_not():
    torch.manual_seed(0)
    error = by(sources.reduction_order(2048, 4, CPU))
    assert error["逐个累加，bf16，|randn|，n=2048"] > 0.3
    assert error["两两归并，bf16，|randn|，n=2048"] < 0.01
    assert error["逐个累加，fp32，|randn|，n=2048"] < 1e-5


def test_weight_gradient_is_right_both_ways():
    """Both variants sum the same numbers: an error here would make the spread meaningless."""
    torch.manual_seed(0)
    dy = torch.randn(32, 64, device=measure_module.device())
    for atomic in (True, False):
        out, partial = torch.zeros(64, device=dy.device), torch.zeros(8, 64, device=dy.device)
        sources.weight_grad[(8,)](dy, out, partial, 64, 4, atomic)
        torch.testing.assert_close(out if atomic else partial.sum(0), dy.sum(0))


def test_one_rounding_beats_two_and_they_differ_by_one_ulp():
    torch.manual_seed(0)
    rows = {(s, m): float(v) for s, m, v, _ in sources.cast_order(64, 512, CPU)}
    error = {s: v for (s, m), v in rows.items() if m.startswith("rms")}
    assert error["先乘后转（融合），H=512"] < 0.85 * error["先转后乘（HF），H=512"]
    assert rows["先转后乘 对 先乘后转，H=512", "相差最多"] == 1
    assert 0.1 < rows["先转后乘 对 先乘后转，H=512", "结果不同的元素"] < 0.4


def test_eps_matters_only_for_small_rows():
    difference = list(by(sources.eps_position(256, CPU), "相对差（fp64）").values())
    assert difference == sorted(difference)
    assert difference[0] < 1e-6 and difference[-1] > 1


def test_masks_are_independent_and_rates_equal():
    torch.manual_seed(0)
    n = 65536
    ours, theirs, agree, expected = (float(v) for _, _, v, _ in sources.rng(n, measure_module.device()))
    sigma = (0.1 * 0.9 / n) ** 0.5
    assert abs(ours - 0.9) < 5 * sigma and abs(theirs - 0.9) < 5 * sigma
    assert abs(agree - expected) < 5 * (0.82 * 0.18 / n) ** 0.5


def test_top_left_is_wrong_exactly_where_q_is_shorter():
    torch.manual_seed(0)
    far = by(sources.causal_alignment(measure_module.device()))
    assert far["is_causal=True（左上），q=2，k=5"] > 0.1
    assert max(v for s, v in far.items() if s != "is_causal=True（左上），q=2，k=5") < 1e-2


def test_small_steps_vanish_in_bf16():
    torch.manual_seed(0)
    still = by(sources.master_weights([1e-3, 1e-5], 128, CPU))
    assert still["权重 N(0, 0.02²)，lr=0.001"] < 0.01
    assert still["权重 N(0, 0.02²)，lr=1e-05"] > 0.7
    assert still["norm 增益 1.0，lr=0.001"] == 1


def test_drift_sees_the_same_data_and_starts_equal():
    rows = list(sources.drift(1e-5, 2, CPU))
    first = {r["storage"]: r["loss"] for r in rows if r["step"] == 0}
    assert len(set(first.values())) == 1 and len(first) == 2


def test_matmul_switches_are_restored():
    switch = torch.backends.cuda.matmul
    before = switch.allow_tf32, switch.allow_bf16_reduced_precision_reduction
    list(sources.matmul_modes([[8, 8, 32]], measure_module.device()))
    assert before == (switch.allow_tf32, switch.allow_bf16_reduced_precision_reduction)


@pytest.mark.gpu
def test_atomics_differ_between_runs_and_partials_never():
    rows = [(s, float(v)) for s, m, v, _ in sources.atomics(4096, 1024, 30, torch.device("cuda")) if "最多" in m]
    assert next(v for s, v in rows if s.startswith("tl.atomic_add")) > 1
    assert next(v for s, v in rows if s.startswith("分块部分和")) == 1


@pytest.mark.gpu
def test_tf32_loses_bits():
    rows = list(sources.matmul_modes([[512, 512, 512]], torch.device("cuda")))
    off, on = ([r["rms_rel"] for r in rows if r["setting"].startswith("fp32") and r["setting"].endswith(s)] for s in "关开")
    assert len(off) == len(on) == 1 and on[0] > 50 * off[0]
