"""Each habit finds what it is for, and says nothing where nothing is wrong."""

import pytest
import torch
import torch.nn.functional as F

from snippets import measure as measure_module
from snippets import qwen3
from snippets.precision import techniques as t


@pytest.fixture(scope="module")
def smoke():
    torch.manual_seed(0)
    return t.measure(**t.EXPERIMENT["smoke"])


@pytest.fixture
def model():
    return qwen3.tiny(4)


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(512, (1, 10))


def value(tables, metric):
    (row,) = [r for r in tables["techniques"] if r["metric"] == metric]
    return row["value"]


def test_rows_match_the_declaration_and_all_eight_are_there(smoke):
    measure_module.check_tables(t.EXPERIMENT["tables"], smoke)
    assert len({r["name"] for r in smoke["techniques"]}) == 8


def test_switch_changes_the_model_and_restores_it_bitwise(smoke):
    assert value(smoke, "打开后不同的 logits") > 0
    assert value(smoke, "关回去后不同的 logits") == 0


def test_golden_sees_eps_and_refuses_edits(smoke):
    assert value(smoke, "代码没变时的漂移") == 0
    assert value(smoke, "ε 从 1e-6 改成 1e-5") > 0.1
    assert value(smoke, "被改过的文件遭拒") == 1


@pytest.mark.parametrize("change", [lambda x: x.reshape(2, 2), lambda x: x.double(), lambda x: x + 1e-7])
def test_fingerprint_sees_shape_dtype_and_bits(change):
    x = torch.ones(4)
    assert t.fingerprint({"x": x}) == t.fingerprint({"x": x.clone()})
    assert t.fingerprint({"x": x}) != t.fingerprint({"x": change(x)})


def test_layer_hooks_point_at_the_planted_layer_only(smoke):
    for fault, direction, seen in [
        ("无", "前向", False), ("无", "反向", False),
        ("GELU 冒充 SiLU", "前向", True), ("GELU 冒充 SiLU", "反向", True),
        ("SiLU 导数少一项", "前向", False), ("SiLU 导数少一项", "反向", True),
    ]:  # fmt: skip
        rows = [r for r in smoke["layers"] if r["fault"] == fault and r["direction"] == direction]
        assert [r["layer"] for r in rows if r["found"]] == [r["layer"] for r in rows if r["planted"] and seen]


def test_hooks_are_removed_and_leave_the_gradient_alone(model, ids):
    _, before = t.gradients(model, ids)
    t.trace(model, ids)
    _, after = t.gradients(model, ids)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)


def test_outliers_need_to_stand_out():
    assert t.outliers([1.0, 1.2, 9.0, 0.8], 0.1) == {2}
    assert t.outliers([1e-9, 5e-9, 1e-9], 1e-7) == set()


def test_progressive_starts_at_zero_and_stays_small(smoke):
    steps = smoke["progressive"]
    assert steps[0]["logit_max_diff"] == 0 and steps[0]["ratio"] == 1
    assert len(steps) == 1 + len(t.KINDS)
    assert steps[0]["changed"] == 0 < steps[1]["changed"] <= 1
    assert all(0 < r["logit_max_diff"] < 1e-4 and r["ratio"] < 1.5 for r in steps[1:])


def test_liger_is_undone(model, ids):
    from transformers.models.qwen3 import modeling_qwen3

    rotary, before = modeling_qwen3.apply_rotary_pos_emb, t.forward(model, ids)[0]
    with t.liger_on(model):
        assert modeling_qwen3.apply_rotary_pos_emb is not rotary
        assert t.patched_modules(model)["mlp"] == [4, 4]
    assert modeling_qwen3.apply_rotary_pos_emb is rotary
    assert t.patched_modules(model)["mlp"] == [0, 4]
    assert torch.equal(t.forward(model, ids)[0], before)


def test_fp64_truth_is_fp64_all_the_way_and_gives_the_weights_back(model, ids):
    weights = {n: p.detach().clone() for n, p in [*model.named_parameters(), *model.named_buffers()]}
    with t.in_fp64(model) as exact:
        truth, _ = t.forward(exact, ids)
    with t.in_fp64(model, fix_norms=False) as naive:
        shortcut, _ = t.forward(naive, ids)
    assert truth.dtype == torch.float64
    # The untouched norms round to fp32 inside: that is far above fp64's own noise.
    assert t.relative(shortcut, truth) > 1e-9
    now = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(now[n].dtype == w.dtype and torch.equal(now[n], w) for n, w in weights.items())
    plain, _ = t.forward(model, ids)
    assert t.relative(plain, truth) < 1e-5


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_bisect_finds_every_culprit_in_log_runs(count):
    for culprit in range(count):
        found, runs = t.bisect(count, lambda m, c=culprit: m > c)
        assert found == culprit and 2**runs < 2 * count + 1


def test_wrong_derivative_hides_from_the_loss(smoke):
    assert value(smoke, "SiLU 导数少一项：第 0 步 loss 差") == 0
    assert value(smoke, "SiLU 导数少一项：梯度差最大的参数") > 100 * value(smoke, "融合 kernel：梯度差最大的参数")
    assert value(smoke, "二分定位到的层") == t.EXPERIMENT["smoke"]["plant"]


def test_broken_mlp_with_the_right_activation_changes_nothing(model, ids):
    before, _ = t.forward(model, ids)
    with t.broken_mlp(model.model.layers[0].mlp, F.silu):
        assert torch.equal(t.forward(model, ids)[0], before)
    with t.broken_mlp(model.model.layers[0].mlp, F.gelu):
        assert not torch.equal(t.forward(model, ids)[0], before)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="plant"):
        t.measure(size="tiny", layers=2, batch=1, sequence=8, plant=2)


@pytest.mark.gpu
def test_ours_and_liger_agree_in_bf16():
    torch.manual_seed(0)
    model = qwen3.tiny(2, torch.bfloat16, "cuda", hidden_size=256, intermediate_size=512)
    ids = torch.randint(512, (2, 64), device="cuda")
    rows = {m: v for m, v, *_ in t.align_liger(model, ids, t.liger_table(model, lambda: qwen3.tiny(1, device="cuda")))}
    assert 0 < rows["logits：本项目对 Liger"] < 0.05
