"""Recompute on demand: same bits, less stored, nothing computed that nobody asked for."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from snippets import qwen3
from snippets.checkpointing.on_demand import TENSORS, LayerHooks
from snippets.checkpointing.policies import Keep, apply
from snippets.kernels import patch

LINEAR = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"}
IDS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    net = qwen3.tiny(layers=2)
    patch(net)
    return net


def hooked(model, keep):
    return [LayerHooks(layer, keep) for layer in model.model.layers]


def gradients(model, ids=IDS):
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], b[1][n]) for n in a[1] | b[1])


@pytest.mark.parametrize("keep", [(), TENSORS, *((t,) for t in TENSORS), ("q", "k", "v", "h2", "gate", "up"), ("rope", "ln2")])
def test_gradients_have_the_same_bits(model, keep):
    expected = gradients(model)
    hooks = hooked(model, keep)
    assert same(gradients(model), expected)
    for each in hooks:
        each.off()
    assert same(gradients(model), expected)


def test_it_recomputes_what_was_dropped_once_and_nothing_else(model):
    (first, _) = hooked(model, ())
    gradients(model)
    # q_norm and k_norm run again on the way to rope; o_proj on the way to h2; down_proj never.
    assert first.recomputed == dict.fromkeys(["ln1", "q", "k", "v", "qn", "kn", "rope", "o", "h2", "ln2", "gate", "up", "product"], 1)


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        (TENSORS, []),
        (("q", "k", "v", "h2", "gate", "up"), ["ln1", "qn", "kn", "rope", "ln2", "product"]),
        (("ln1", "q", "k", "v", "rope", "h2", "ln2", "up", "product"), ["gate"]),
        (("ln1", "q", "k", "v", "rope", "ln2", "gate", "up", "product"), ["o", "h2"]),
        (("ln1", "q", "v", "rope", "h2", "ln2", "gate", "up", "product"), ["k"]),
    ],
)
def test_what_is_recomputed(model, keep, again):
    first, second = hooked(model, keep)
    gradients(model)
    assert first.recomputed == second.recomputed == dict.fromkeys(again, 1)


@pytest.mark.parametrize("kept", [(), ("gate",), ("q", "up"), ("k", "v", "gate")])
def test_what_is_dropped_is_freed_and_what_is_kept_is_not(model, kept):
    """A policy that silently stops saving, or dropping, what it says."""
    hooked(model, kept)
    storages = {}
    for name, path in LINEAR.items():
        module = model.get_submodule(f"model.layers.0.{path}")
        module.register_forward_hook(lambda m, a, out, name=name: storages.update({name: StorageWeakRef(out.untyped_storage())}))
    loss = model(IDS, labels=IDS, use_cache=False).loss
    alive = {name for name, storage in storages.items() if not storage.expired()}
    assert alive == set(kept)
    loss.backward()
    assert all(storage.expired() for storage in storages.values())


def test_nothing_is_left_behind_after_the_backward(model):
    """The notes must not form a cycle that only the garbage collector frees."""
    import gc

    hooked(model, ("gate",))
    gradients(model)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        for _ in range(3):
            gradients(model)
        assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= before
    finally:
        gc.enable()


def test_a_second_backward_and_an_evaluation(model):
    expected = gradients(model)[1]
    hooked(model, ())
    model.zero_grad(set_to_none=True)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(once[n], expected[n]) and torch.equal(p.grad, 2 * once[n]) for n, p in model.named_parameters())
    model.eval()
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_a_layer_leaves_no_hook_on(model, error):
    hooks = hooked(model, ())
    down = model.model.layers[1].mlp.down_proj

    def burst(*_):
        raise error

    handle = down.register_forward_hook(burst)
    with pytest.raises(error):
        gradients(model)
    handle.remove()
    assert not any(each._frames for each in hooks)
    x = torch.ones(3, requires_grad=True)
    assert x.exp().grad_fn._saved_result.shape == (3,)
    gradients(model)


OUTPUTS = ["self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj", "self_attn", "input_layernorm", "post_attention_layernorm",
           "mlp.gate_proj", "mlp"]  # fmt: skip
INPUTS = ["", "input_layernorm", "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("path", "output"), [*((m, True) for m in OUTPUTS), *((m, False) for m in INPUTS)])
def test_hooks_of_others_keep_their_effect(model, path, output, late):
    """A hook may replace what a module gets or gives; what is made again must be what was there."""

    def scaled(value):
        return (value[0] * 1.5, *value[1:]) if isinstance(value, tuple) else value * 1.5

    def register():
        for layer in model.model.layers:
            module = layer.get_submodule(path)
            if output:
                module.register_forward_hook(lambda m, a, out: scaled(out))
            else:
                module.register_forward_pre_hook(lambda m, a: scaled(a))

    if not late:
        register()
    hooks = hooked(model, ())
    if late:
        register()
    got = gradients(model)
    for each in hooks:
        each.off()
    assert same(got, gradients(model))


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_norm", "input_layernorm", "mlp.gate_proj", "mlp.up_proj"])
def test_a_weight_that_changed_in_between_is_refused(model, name):
    hooked(model, ())
    loss = model(IDS, labels=IDS, use_cache=False).loss
    with torch.no_grad():
        model.model.layers[0].get_submodule(name).weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed between the forward and the backward|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("path", ["", "self_attn", "mlp.gate_proj", "mlp.up_proj"])
@pytest.mark.parametrize("keep", [(), ("gate", "up", "h2")])
def test_what_is_written_in_place_during_the_forward(model, path, keep):
    """Another hook writes into what a module gave or got: that is what the backward has to see."""

    def scale(module, arguments, out=None):
        value = out if out is not None else arguments[0]
        with torch.no_grad():
            (value[0] if isinstance(value, tuple) else value).mul_(1.5)

    for layer in model.model.layers:
        module = layer.get_submodule(path)
        (module.register_forward_hook if path else module.register_forward_pre_hook)(scale)
    hooks = hooked(model, keep)
    got = gradients(model)
    for each in hooks:
        each.off()
    assert same(got, gradients(model))


def test_what_is_written_in_place_after_the_forward_is_refused(model):
    hooked(model, ("gate", "up"))
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    loss = model(IDS, labels=IDS, use_cache=False).loss
    with torch.no_grad():
        seen[0].add_(1)
    with pytest.raises(RuntimeError, match="h was written to in place|modified by an inplace operation"):
        loss.backward()


def test_a_layer_input_that_is_part_of_a_larger_tensor(model):
    """A stored tensor with an offset into its storage."""
    layer = model.model.layers[0]
    rotary = model.model.rotary_emb
    large = torch.randn(2, 8, model.config.hidden_size)

    def run():
        model.zero_grad()
        x = large[1:]
        out = layer(x, position_embeddings=rotary(x, torch.arange(8)[None]), attention_mask=None)
        out.sum().backward()
        return None, {n: q.grad.clone() for n, q in layer.named_parameters()}

    expected = run()[1]
    hooks = LayerHooks(layer, ())
    got = run()[1]
    hooks.off()
    assert all(torch.equal(got[n], expected[n]) for n in expected)


def test_refusals(model):
    layer = model.model.layers[0]
    with pytest.raises(ValueError, match="unknown tensors gat; known: ln1, q"):
        LayerHooks(layer, ("gat",))
    with pytest.raises(ValueError, match="call snippets.kernels.patch"):
        LayerHooks(qwen3.tiny().model.layers[0], ())
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        LayerHooks(layer, ())
    model.gradient_checkpointing_disable()
    hooked(model, ())
    with pytest.raises(RuntimeError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        model(IDS, labels=IDS)


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_that_is_dropped_without_a_backward_leaves_nothing(fails):
    import gc
    import weakref

    model = qwen3.tiny()
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda m, a: seen.append(weakref.ref(a[0])))
    if fails:
        def fail(*_):
            raise ValueError("as out of memory would")
        model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
    ids = torch.randint(0, 512, (1, 5))
    with patch(model), apply(model, Keep()):
        try:
            loss = model(ids, labels=ids, use_cache=False).loss
            del loss
        except ValueError:
            pass
        gc.collect()
        assert seen and seen[0]() is None
