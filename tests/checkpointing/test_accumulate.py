"""Weight gradients added inside the matrix product: the sum that autograd would have made, where it belongs."""

import pytest
import torch

from snippets import qwen3
from snippets.checkpointing import policies as p
from snippets.checkpointing.accumulate import AccumulatingLinear, accumulate
from snippets.checkpointing.switching import PolicyError, switch_class
from snippets.kernels import patch

IDS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))


def gradients(model, steps=1):
    model.zero_grad()
    for i in range(steps):
        (model(IDS.roll(i, 1), labels=IDS, use_cache=False).loss / steps).backward()
    return {n: q.grad.clone() for n, q in model.named_parameters()}


@pytest.mark.parametrize("policy", [p.Nothing(), p.Block(), p.Keep(), p.Keep(("gate", "v")), p.Selective(p.ATTENTION + p.MATMUL)], ids=lambda x: x.name)
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_the_same_under_every_policy(policy, steps):
    model = qwen3.tiny()
    with patch(model), p.apply(model, policy):
        want = gradients(model, steps)
        with accumulate(model):
            got = gradients(model, steps)
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=1e-5, atol=1e-7)


def test_the_gradient_tensor_stays_the_same_object_and_only_the_weights_of_linear_modules_are_meant():
    model = qwen3.tiny()
    with accumulate(model):
        gradients(model)
        places = {n: q.grad.data_ptr() for n, q in model.named_parameters()}
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        assert {n: q.grad.data_ptr() for n, q in model.named_parameters()} == places
        assert any(isinstance(m, AccumulatingLinear) for m in model.modules())
    assert not any(isinstance(m, AccumulatingLinear) for m in model.modules())


def test_frozen_weights_stay_without_gradient_and_hooks_see_theirs():
    model = qwen3.tiny()
    frozen, hooked = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    frozen.requires_grad_(False)
    seen = []
    hooked.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone()))
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    want = hooked.grad.clone()
    with accumulate(model):
        model.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert frozen.grad is None
    torch.testing.assert_close(seen[-1], want)
    torch.testing.assert_close(hooked.grad, want)


def test_a_weight_that_changed_in_between_is_refused():
    model = qwen3.tiny()
    with accumulate(model):
        loss = model(IDS, labels=IDS, use_cache=False).loss
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
            loss.backward()


def test_a_weight_that_is_made_of_others_passes_its_gradient_on():
    model = qwen3.tiny()
    got = []
    for on in (False, True):
        scale = torch.ones((), requires_grad=True)
        weights = {n: q.detach() * scale for n, q in model.named_parameters()}
        switch = accumulate(model) if on else None
        torch.func.functional_call(model, weights, (), {"input_ids": IDS, "labels": IDS, "use_cache": False}).loss.backward()
        got.append(scale.grad)
        if switch:
            switch.off()
    torch.testing.assert_close(got[1], got[0])


@pytest.mark.parametrize("how", ["grad of the input", "grad of the weights", "backward for the embedding alone"])
def test_only_the_gradients_that_were_asked_for(how):
    model = qwen3.tiny()
    embedding, weight = model.model.embed_tokens.weight, model.model.layers[0].mlp.up_proj.weight

    def run():
        model.zero_grad()
        loss = model(IDS, labels=IDS, use_cache=False).loss
        if how == "backward for the embedding alone":
            loss.backward(inputs=[embedding])
            return [embedding.grad]
        return torch.autograd.grad(loss, [embedding] if how == "grad of the input" else [weight, model.lm_head.weight])

    want = run()
    with accumulate(model):
        got = run()
    assert {n for n, q in model.named_parameters() if q.grad is not None} <= {"model.embed_tokens.weight"}
    assert (weight.grad, model.lm_head.weight.grad) == (None, None)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("policy", [p.Nothing(), p.Block(), p.Keep()], ids=lambda x: x.name)
def test_gradients_of_another_dtype_under_the_weights(policy):
    model = qwen3.tiny().double()
    weights = [m.weight for m in model.modules() if type(m) is torch.nn.Linear]
    if not hasattr(weights[0], "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    want = gradients(model)
    for w in weights:
        w.grad, w.grad_dtype = None, torch.float32
    with patch(model), p.apply(model, policy), accumulate(model):
        got = gradients(model, 2)
    assert all(w.grad.dtype == torch.float32 for w in weights)
    assert got.keys() == want.keys() and all(g.isfinite().all() for g in got.values())


def test_switches_on_top_are_not_overrun():
    model = qwen3.tiny()
    switch = accumulate(model)
    module = model.model.layers[0].mlp.up_proj
    _, undo = switch_class(module, "another", {})
    with pytest.raises(PolicyError, match="switched by another since"):
        switch.off()
    undo()
    switch.off()
    assert not any(isinstance(m, AccumulatingLinear) for m in model.modules())


def test_no_second_derivative_and_no_second_switch():
    model = qwen3.tiny()
    with accumulate(model):
        with pytest.raises(ValueError, match="is it on already"):
            accumulate(model)
        loss = model(IDS, labels=IDS, use_cache=False).loss
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, model.model.embed_tokens.weight, create_graph=True)


def test_autocast_goes_the_usual_way():
    model = qwen3.tiny()
    with accumulate(model), torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert all(q.grad is not None and q.grad.dtype == torch.float32 for q in model.parameters())
