import copy
import importlib
import pickle

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from snippets import qwen3
from snippets.kernels import Patch, causal_lm_loss, patch
from tests.kernels.common import DEVICE

CLASSES = ("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention")


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = qwen3.tiny(device=DEVICE)
    for name, p in net.named_parameters():
        if "norm" in name:  # all ones would hide a swapped or missing weight
            torch.nn.init.normal_(p, 1.0, 0.3)
    return net


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 512, (2, 11), device=DEVICE)
    labels = ids.clone()
    labels[0, :4] = -100
    positions = torch.stack([torch.arange(11), torch.arange(7, 18)]).to(DEVICE)  # cos/sin with a batch of 2
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def fused(model):
    return {n: type(m).__name__.startswith("Fused") for n, m in model.named_modules()}


def run(model):
    model.zero_grad(set_to_none=True)
    out = model(**batch())
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach()} | {
        n: p.grad.clone() for n, p in model.named_parameters()
    }


def test_same_logits_loss_and_gradients(model):
    before = run(model)
    with patch(model):
        inside = run(model)
    after = run(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    for name, want in before.items():
        scale = want.abs().max().item()
        torch.testing.assert_close(inside[name], want, rtol=1e-4, atol=2e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def test_every_module_runs_the_kernels(model, monkeypatch):
    """Count the calls: a patch that reaches only some modules leaves the results right, and is useless."""
    module = importlib.import_module("snippets.kernels.patch")
    calls = []
    for name in ("rms_norm", "swiglu", "rope"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=original: (calls.append(n), f(*a))[1])
    with patch(model):
        model(**batch())
    layers = len(model.model.layers)
    assert {n: calls.count(n) for n in set(calls)} == {"rms_norm": 4 * layers + 1, "swiglu": layers, "rope": layers}


@pytest.mark.parametrize(
    ("flags", "norms", "head_norms"),
    [({"qk_norm": False}, 5, 0), ({"rms_norm": False}, 0, 0), ({"rms_norm": False, "qk_norm": True}, 0, 4), ({}, 5, 4)],
)
def test_norm_flags(model, flags, norms, head_norms):
    with Patch(model, **flags):
        changed = [n for n, m in model.named_modules() if type(m).__name__ == "FusedQwen3RMSNorm"]
    assert sum("q_norm" in n or "k_norm" in n for n in changed) == head_norms
    assert len(changed) == norms + head_norms


def test_off_restores_the_objects_exactly(model):
    def state():
        return {n: (type(m), dict(vars(m))) for n, m in model.named_modules()}

    before = state()
    handle = patch(model)
    assert handle.active and model.loss_function is causal_lm_loss
    handle.on()  # again: nothing
    handle.off()
    handle.off()
    assert not handle.active and state() == before and model.loss_function is not causal_lm_loss
    handle.on()
    assert handle.active
    handle.off()
    assert state() == before


def test_another_model_and_transformers_stay_untouched(model):
    other = copy.deepcopy(model)
    original = modeling_qwen3.apply_rotary_pos_emb
    methods = {n: vars(getattr(modeling_qwen3, n))["forward"] for n in CLASSES}
    with patch(model):
        assert modeling_qwen3.apply_rotary_pos_emb is original
        assert methods == {n: vars(getattr(modeling_qwen3, n))["forward"] for n in CLASSES}
        assert not any(fused(other).values())


def test_nested_blocks_end_with_the_outermost(model):
    switch = patch(model)
    with switch:
        with switch:
            pass
        assert switch.active
    assert not switch.active


def test_a_copy_can_be_switched_by_its_own_patch(model):
    plain = run(model)
    with patch(model):
        inside, twin = run(model), copy.deepcopy(model)
    assert all(torch.equal(v, inside[n]) for n, v in run(twin).items())
    twin._kernel_patch.off()
    assert all(torch.equal(v, plain[n]) for n, v in run(twin).items())


def test_a_shallow_copy_uses_its_own_weights(model):
    with patch(model):
        norm = copy.copy(model.model.norm)
        norm._parameters = {"weight": torch.nn.Parameter(torch.zeros_like(norm.weight))}
        assert not norm(torch.ones(2, 64, device=DEVICE)).any()


def test_a_patched_model_can_be_pickled(model):
    with patch(model):
        inside, loaded = run(model), pickle.loads(pickle.dumps(model))
    assert fused(loaded) == {n: "norm" in n or n.endswith(("mlp", "self_attn")) for n in fused(loaded)}
    assert all(torch.equal(v, inside[n]) for n, v in run(loaded).items())


def test_wrappers_of_other_libraries_are_refused_before_and_after(model):
    norm = model.model.layers[0].input_layernorm
    norm.forward = norm.forward
    with pytest.raises(ValueError, match="layers.0.input_layernorm.*own"):
        patch(model)
    assert not any(fused(model).values()) and "_kernel_patch" not in vars(model)
    del norm.forward
    switch = patch(model)
    norm.forward = norm.forward
    with pytest.raises(ValueError, match="input_layernorm.*goes on calling"):
        switch.off()
    assert switch.active
    del norm.forward
    switch.off()
    assert not any(fused(model).values())


def test_off_after_an_exception(model):
    with pytest.raises(KeyError), patch(model):
        raise KeyError
    assert not any(fused(model).values())


def test_generation_with_a_cache(model):
    ids = batch()["input_ids"][:1]
    model.eval()
    plain = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with patch(model):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), plain)


def test_gradient_checkpointing(model):
    plain = run(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with patch(model):
        inside = run(model)
    for name, want in plain.items():
        torch.testing.assert_close(inside[name], want, rtol=1e-4, atol=2e-5 * want.abs().max().item())


def test_refuses_other_models(model):
    with pytest.raises(TypeError, match=r"Linear.*model\.module"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Qwen3Model"):
        patch(model.model)
    with patch(model), pytest.raises(ValueError, match=r"off\(\)"):
        patch(model)


def test_refuses_another_activation(model):
    model.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="swiglu=False"):
        patch(model)
    with patch(model, swiglu=False):
        pass


@pytest.mark.gpu
def test_bf16_model_on_gpu():
    """Patched and unpatched bf16 logits are equally far from fp64: the kernels add no error of their own."""
    model = qwen3.tiny(dtype=torch.float64, device="cuda")
    model.model.rotary_emb.double()
    truth = model(**batch()).logits
    model.to(torch.bfloat16)
    plain = model(**batch()).logits
    with patch(model):
        ours = model(**batch()).logits

    def error(logits):
        return (logits.double() - truth).square().mean().sqrt().item()

    assert error(ours) < 1.1 * error(plain)
