"""Every pitfall is one here, every fix is one, and nothing stays switched."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing import pitfalls as p

NAMES = [case.name for case in p.CASES]
ON_CPU = [name for name in NAMES if not name.startswith("liger")]
LAYERS = p.EXPERIMENT["smoke"]["layers"]
TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2])


def state():
    """What a case could leave switched in the process."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "mode": torch._C._len_torch_dispatch_stack(),
        "layer": dict(vars(__import__("transformers.modeling_layers", fromlist=["x"]).GradientCheckpointingLayer)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def smoke():
    torch.manual_seed(3)
    before = state()
    tables = p.measure(**p.EXPERIMENT["smoke"])
    assert state() == before
    return tables


@pytest.fixture
def lab():
    ids = torch.randint(512, (2, 24), generator=torch.Generator().manual_seed(1))
    return p.Lab("tiny", LAYERS, ids, torch.device("cpu"))


def test_rows_match_the_declaration_and_every_case_is_there(smoke):
    measure_module.check_tables(p.EXPERIMENT["tables"], smoke)
    assert [r["name"] for r in smoke["pitfalls"]] == ON_CPU
    assert all(r["symptom"] in ("报错", "静默") for r in smoke["pitfalls"])


# wrong is what is counted, or the least of it.
@pytest.mark.parametrize(
    ("name", "wrong", "right", "says"),
    [
        ("rng_dropout", 0.05, 0, "loss 逐位相同"),
        ("keyword_trap", 7, 6, "UserWarning: torch.utils.checkpoint: the use_reentrant parameter.*policies.audit 拒绝"),
        ("reentrant_frozen", 11 * LAYERS, 0, "model.norm.weight、lm_head.weight；.*None of the inputs have requires_grad=True"),
        ("op_packet", 6, 0, "每层重算 6 个矩阵乘"),
        ("cpu_offload_policy", 6, 0, "每层重算 6 个矩阵乘"),
        ("missing_attention", 2, 1, "_scaled_dot_product_flash_attention_for_cpu.default，不在列表里"),
        ("kv_cache", 1, 0, "^torch.utils.checkpoint.CheckpointError: .*different metadata.*前向.* 48, 32.，重算 .* 96, 32."),
        ("sdpa_context", 1, 0, "^torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: .* the forward pass"),
        ("second_backward", 1, 0, "^RuntimeError: .*" + ("backward an extra time.*；.*同样报错$" if TORCH >= (2, 13) else "；.*没有报错")),
        ("eval_off", 0, 6, "每层重算 0 个矩阵乘"),
        ("bf16_deterministic", 50, 0, "模拟 GPU 的 atomic add.*use_deterministic_algorithms 之下 0 个.*25 个参数里 0 个梯度"),
        ("bf16_autocast", 4, 0, "4 个梯度里 4 个不同"),
    ],
)
def test_the_wrong_code_is_wrong_and_the_fix_is_right(smoke, name, wrong, right, says):
    (row,) = [r for r in smoke["pitfalls"] if r["name"] == name]
    if name == "cpu_offload_policy" and TORCH < (2, 11):
        assert not row["ok"] and "没有 MUST_CPU_OFFLOAD" in row["outcome"]
        return
    assert row["ok"] and row["fixed"] == row["expected"] == right
    assert row["wrong"] >= wrong if name in ("rng_dropout", "bf16_deterministic") else row["wrong"] == wrong
    assert re.search(says, row["outcome"])


def test_eval_stores_as_much_as_no_checkpointing_at_all(lab):
    everything = lab.stored(p.plain)
    assert lab.stored(p.eval_off_wrong) == everything > 2 * lab.stored(p.eval_off_fixed)


def test_the_fixed_gradients_are_those_without_checkpointing(lab):
    """A fix that silences the symptom and breaks the gradient is none."""
    model, ids = lab.inputs()
    p.plain(model, ids)
    want = p.gradients(model)
    for step in (p.keyword_trap_fixed, p.op_packet_fixed, p.cpu_offload_policy_fixed, p.missing_attention_fixed, p.eval_off_fixed):
        model, ids = lab.inputs()
        with p.quiet():
            step(model, ids)
        # Not bit for bit: what a CPU rounds in a bf16 product depends on its kind and on the strides of what was offloaded.
        assert p.relative(p.gradients(model), want) < 4e-3, step.__name__


def test_the_sum_of_two_losses_has_the_gradient_of_both(lab):
    def separately(model, ids):
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward(retain_graph=True)
        (1e-4 * out.logits.float().logsumexp(-1).square().mean()).backward()

    gradients = []
    for step in (separately, p.second_backward_fixed):
        model = lab.model(torch.float32)
        step(model, lab.ids)
        gradients.append(p.gradients(model))
    assert p.relative(gradients[1], gradients[0]) < 1e-5


def test_torch_refuses_a_packet_in_a_list():
    with pytest.raises(ValueError, match="OpOverloadPacket"):
        create_selective_checkpoint_contexts([torch.ops.aten.mm])


@pytest.mark.parametrize("name", NAMES)
def test_every_case_has_a_section_short_enough_to_read(name):
    source = Path(p.__file__).read_text(encoding="utf-8")
    start, end = f"# --8<-- [start:{name}]\n", f"# --8<-- [end:{name}]\n"
    assert source.count(start) == source.count(end) == 1
    section = source.split(start)[1].split(end)[0]
    assert f"def {name}_wrong(" in section and f"def {name}_fixed(" in section
    assert len(section.splitlines()) <= 30


def test_what_this_torch_lacks_is_a_row_and_no_crash(lab, monkeypatch):
    monkeypatch.setattr(p, "CheckpointPolicy", type("Old", (), {}))
    row = p.row(next(c for c in p.CASES if c.name == "cpu_offload_policy"), lab)
    assert row["ok"] is False and row["wrong"] is None and "没有 MUST_CPU_OFFLOAD" in row["outcome"]
    measure_module.check_tables(p.EXPERIMENT["tables"], {"pitfalls": [row]})


@pytest.mark.parametrize("name", ["missing_attention", "sdpa_context", "op_packet"])
def test_a_pitfall_that_does_not_occur_says_so(lab, monkeypatch, name):
    monkeypatch.setattr(p, f"{name}_wrong", getattr(p, f"{name}_fixed"))
    row = p.row(next(c for c in p.CASES if c.name == name), lab)
    assert row["ok"] is False and row["outcome"].startswith("这里没有出现：") and row["wrong"] == row["expected"]


def test_a_fix_that_raises_is_not_ok(lab, monkeypatch):
    monkeypatch.setattr(p, "sdpa_context_fixed", p.sdpa_context_wrong)
    row = p.row(next(c for c in p.CASES if c.name == "sdpa_context"), lab)
    assert row["ok"] is False and "修复后仍报 torch.utils.checkpoint.CheckpointError" in row["outcome"]


def test_memory_that_runs_out_is_no_pitfall():
    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        p.attempt(step)


def test_determinism_is_restored_after_an_error():
    before = state()
    with contextlib.suppress(ZeroDivisionError), p.deterministic():
        1 / 0
    assert state() == before


def test_liger_loss_twice_interpreted(lab):
    """Its kernel runs in Triton's interpreter; on a GPU there is a row."""
    result = p.liger_double(lab)
    assert result.wrong == 2 * result.expected and result.fixed == result.expected
    assert result.expected % 3 == 0  # logits, gradient of the hidden states, gradient of the weight, for each chunk


def test_tiled_mlp_three_times(lab, monkeypatch):
    """With torch's own activation in place of Liger's kernel, which Triton's interpreter cannot run."""
    from liger_kernel.transformers import tiled_mlp

    class SiLUMul:
        apply = staticmethod(lambda gate, up: F.silu(gate) * up)

    monkeypatch.setattr(tiled_mlp, "LigerSiLUMulFunction", SiLUMul)
    result = p.liger_tiled(lab)
    assert (result.wrong, result.fixed, result.expected) == (3, 2, 2)
    model, ids = lab.inputs()
    p.plain(model, ids)
    fixed, _ = lab.inputs()
    p.liger_tiled_fixed(fixed, ids)
    assert p.relative(p.gradients(fixed), p.gradients(model)) < 2e-2  # tiles add up in another order, in bf16


def test_settings_are_checked():
    with pytest.raises(ValueError, match="'8b' or 'tiny'"):
        p.measure(size="4b", layers=1, batch=1, sequence=8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name):
    device = torch.device("cuda")
    ids = torch.randint(qwen3.TINY["vocab_size"], (2, 1024), generator=torch.Generator().manual_seed(0)).to(device)
    row = p.row(next(c for c in p.CASES if c.name == name), p.Lab("8b", 2, ids, device))
    if not row["ok"] and row["outcome"].startswith("这里没有出现"):
        pytest.skip(row["outcome"])
    assert row["ok"], row
