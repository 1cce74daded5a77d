"""Every granularity: same bits, restores the model, recomputes what it says, refuses what goes wrong silently."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snippets import qwen3
from snippets.checkpointing import policies as p
from snippets.checkpointing.accumulate import accumulate
from snippets.checkpointing.switching import switch_class
from snippets.kernels import patch

IDS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MM = torch.ops.aten.mm.default


class Count(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.runs = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.runs[function] = self.runs.get(function, 0) + 1
        return function(*args, **(kwargs or {}))


def gradients(model):
    model.zero_grad(set_to_none=True)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {n: g.grad.clone() for n, g in model.named_parameters()} | {"loss": loss.detach()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def state(model):
    return [(n, type(m), {k: v for k, v in vars(m).items() if "checkpointing" in k}, len(m._forward_hooks), len(m._forward_pre_hooks))
            for n, m in model.named_modules()]  # fmt: skip


POLICIES = [
    p.Nothing(), p.Block(), p.Block(preserve_rng_state=True, early_stop=False), p.SubBlock("mlp"), p.SubBlock("attention"),
    p.Selective(p.ATTENTION), p.Selective(p.ATTENTION + p.MATMUL), p.Selective(p.ATTENTION + p.MATMUL, skip=(1, 3, 5)),
    p.Selective(p.MATMUL, recompute_attention=True),
    [p.Block(), p.Nothing(), p.SubBlock("mlp")], p.every(2, p.Block(), 3),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: x.name if not isinstance(x, list) else "+".join(y.name for y in x))
def test_gradients_have_the_same_bits_and_the_model_is_restored(policy):
    model = qwen3.tiny(layers=3)
    before, expected = state(model), gradients(model)
    with p.apply(model, policy):
        assert same(gradients(model), expected)
        model.eval()
        with torch.no_grad():
            assert model(IDS).logits.isfinite().all()
        model.train()
    assert state(model) == before and same(gradients(model), expected)


@pytest.mark.parametrize("policy", [p.Block(), p.SubBlock("mlp"), p.Selective(p.ATTENTION), p.Keep(("q", "gate")), p.Keep()])
def test_together_with_the_kernels(policy):
    model = qwen3.tiny(layers=2)
    patch(model)
    before, expected = state(model), gradients(model)
    with p.apply(model, policy):
        assert same(gradients(model), expected)
    assert state(model) == before


# A layer's forward has 7 matmuls and 1 attention; its backward 14. The lm_head adds 1 and 2. Early stop
# leaves out down_proj, the last one.
@pytest.mark.parametrize(
    ("policy", "matmuls", "attentions"),
    [
        (p.Nothing(), 0, 0),
        (p.Block(), 6, 1),
        (p.Block(early_stop=False), 7, 1),
        (p.SubBlock("mlp"), 2, 0),
        (p.SubBlock("attention"), 3, 1),
        (p.Selective(p.ATTENTION), 6, 0),
        (p.Selective(p.ATTENTION + p.MATMUL), 0, 0),
        (p.Selective(p.ATTENTION + p.MATMUL, skip=(1, 3, 5)), 3, 0),
        (p.Selective(p.ATTENTION + p.MATMUL, skip=(1, 3, 5), early_stop=False), 3, 0),
        (p.Selective(p.ATTENTION, early_stop=False), 7, 0),
        (p.Selective(p.MATMUL, recompute_attention=True), 0, 1),
    ],
    ids=lambda x: getattr(x, "name", x),
)
@pytest.mark.parametrize("accumulated", [False, True])
def test_what_runs_again(policy, matmuls, attentions, accumulated):
    """A policy that silently stops saving what it says would run more."""
    layers = 2
    model = qwen3.tiny(layers=layers)
    with accumulate(model) if accumulated else nullcontext(), p.apply(model, policy), Count() as count:
        gradients(model)
    assert count.runs[MM] == 3 + 21 * layers + matmuls * layers
    assert count.runs[FLASH] == (1 + attentions) * layers


def test_an_attention_that_no_rule_saves_is_refused_when_it_runs():
    model = qwen3.tiny()
    with p.apply(model, p.Selective(p.MATMUL)), pytest.raises(p.PolicyError, match="flash_attention_for_cpu.*computed twice"):
        gradients(model)


def rule(answer):
    """Save everything but what ``answer`` says otherwise."""
    must_save = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    return lambda context, op, *args, **kwargs: answer.get(op, must_save)


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint.CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="torch before 2.11")
@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD", "MUST_RECOMPUTE", "PREFER_RECOMPUTE"])
def test_a_rule_that_does_not_do_what_it_says_is_refused_when_it_runs(name):
    policy = torch.utils.checkpoint.CheckpointPolicy[name]
    model = qwen3.tiny()
    expected = gradients(model)
    with p.apply(model, p.ByRule(rule({}))):
        assert same(gradients(model), expected)
    op, says = (MM, f"{name} for aten.mm.default") if "OFFLOAD" in name else (FLASH, "computed twice")
    with p.apply(model, p.ByRule(rule({op: policy}))), pytest.raises(p.PolicyError, match=says):
        gradients(model)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: p.Selective((torch.ops.aten.mm,)), r"packet of overloads and never matches; write aten.mm.default"),
        (lambda: p.Selective(("mm",)), "no operator"),
        (lambda: p.Selective(()), r"use Block\(\)"),
        (lambda: p.SubBlock("ffn"), "'attention' or 'mlp'"),
        (lambda: p.Keep(("gat",)), "unknown tensors gat"),
        (lambda: p.every(0, p.Block(), 3), "give 1"),
    ],
)
def test_policies_that_cannot_be(make, says):
    with pytest.raises(p.PolicyError, match=says):
        make()


def test_models_that_cannot_take_one():
    model = qwen3.tiny()
    with pytest.raises(p.PolicyError, match="3 policies for 2"):
        p.apply(model, [p.Block()] * 3)
    with pytest.raises(p.PolicyError, match="no model.layers"):
        p.apply(torch.nn.Linear(2, 2), p.Block())
    before = state(model)
    with pytest.raises(p.PolicyError, match="snippets.kernels.patch"):  # the first layer takes its policy, the second can't
        p.apply(model, [p.Block(), p.Keep()])
    assert state(model) == before
    with p.apply(model, p.Block()), pytest.raises(p.PolicyError, match="checkpointed already"):
        p.apply(model, p.Block())


def test_the_keywords_that_fall_back_to_reentrant():
    model = qwen3.tiny()
    p.audit(model)
    model.gradient_checkpointing_enable({"preserve_rng_state": False})
    with pytest.raises(p.PolicyError, match='Add "use_reentrant": False'):
        p.audit(model)
    for sound in (None, {"use_reentrant": False, "preserve_rng_state": False}):
        model.gradient_checkpointing_enable(sound)
        p.audit(model)


ON_TOP = [(p.Keep(), p.Keep()), (p.Keep(), p.SubBlock("mlp")), (p.Keep(), p.Block()), (p.SubBlock("mlp"), p.SubBlock("mlp")),
          (p.SubBlock("attention"), p.Keep()), (p.SubBlock("mlp"), p.Selective(p.MATMUL))]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), ON_TOP, ids=lambda x: x.name)
def test_a_second_policy_on_the_same_part_is_refused(first, second):
    model = qwen3.tiny()
    with patch(model), p.apply(model, first):
        inside = state(model)
        with pytest.raises(p.PolicyError, match=rf"under {type(first).__name__}.* already; call its off"):
            p.apply(model, second)
        assert state(model) == inside


def test_two_halves_by_two_policies():
    model = qwen3.tiny()
    before, expected = state(model), gradients(model)
    with p.apply(model, p.SubBlock("mlp")), p.apply(model, p.SubBlock("attention")):
        assert same(gradients(model), expected)
    assert state(model) == before


@pytest.mark.parametrize("policy", [p.SubBlock("mlp"), p.Keep()], ids=lambda x: x.name)
def test_taken_out_in_another_order_it_says_so_and_can_be_taken_out_later(policy):
    model = qwen3.tiny()
    before = state(model)
    patched = patch(model)
    applied = p.apply(model, policy)
    undone = [switch_class(layer.mlp, "another", {})[1] for layer in model.model.layers]
    with pytest.raises(p.PolicyError, match="switched by another since; call that one's off"):
        applied.off()
    for undo in undone:
        undo()
    applied.off()
    patched.off()
    assert state(model) == before


@pytest.mark.parametrize("policy", [p.SubBlock("attention"), p.Keep()], ids=lambda x: x.name)
@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_copies_under_a_policy_are_refused_and_the_state_dict_is_not(policy, how):
    model = qwen3.tiny()
    with patch(model), p.apply(model, policy):
        with pytest.raises(TypeError, match="under .* can be neither copied nor pickled"):
            how(model.model.layers[0])
        how(model.state_dict())
    copy.deepcopy(model)
