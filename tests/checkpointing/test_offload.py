"""Tensors in host memory: same bits, freed on the device in time, fetched one layer ahead, and loud when written to."""

import gc
import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from snippets import qwen3
from snippets.checkpointing import agreement, offload, pareto, recipes
from snippets.checkpointing import policies as p
from snippets.checkpointing.on_demand import TENSORS, LayerHooks
from snippets.kernels import patch

IDS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nobody_offloads_yet():
    offload.users.clear()
    offload._idle.clear()


@pytest.fixture
def model():
    net = qwen3.tiny(layers=3)
    patch(net)
    return net


def hooked(model, keep, away):
    return [LayerHooks(layer, keep, away) for layer in model.model.layers]


def loss_of(model, ids=IDS):
    return model(ids, labels=ids, use_cache=False).loss


def gradients(model):
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()
    return {n: q.grad.clone() for n, q in model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a | b)


@pytest.mark.parametrize(("keep", "away"), [((), TENSORS), (("up",), ("gate",)), (("gate",), ("q", "h2")), ((), ("product",)),
                                            *(((), (t,)) for t in TENSORS)])  # fmt: skip
def test_gradients_have_the_same_bits_and_nothing_sent_is_recomputed(model, keep, away):
    expected = gradients(model)
    hooks = hooked(model, keep, away)
    for _ in range(2):
        assert same(gradients(model), expected)
    assert not set(hooks[0].recomputed) & {*keep, *away}
    for each in hooks:
        each.off()
    assert same(gradients(model), expected)


def watch(model, path="mlp.gate_proj"):
    seen = []
    for layer in model.model.layers:
        layer.get_submodule(path).register_forward_hook(lambda m, a, out: seen.append(StorageWeakRef(out.untyped_storage())))
    return seen


def test_only_the_last_layer_s_stay_on_the_device(model):
    hooked(model, ("up",), ("gate",))
    seen = watch(model)
    loss = loss_of(model)
    assert [s.expired() for s in seen] == [True, True, False]
    loss.backward()
    assert all(s.expired() for s in seen)


def test_fetched_one_layer_ahead_once_each_and_the_last_never(model, monkeypatch):
    log = []
    copy = offload.Parcel._copy
    monkeypatch.setattr(offload.Parcel, "_copy", lambda self, to, source: (log.append("out" if to is self.host else "back"), copy(self, to, source))[1])
    hooked(model, (), ("q", "gate", "up"))
    for i, layer in enumerate(model.model.layers):
        layer.register_full_backward_hook(lambda *_, i=i: log.append(i))
    loss = loss_of(model)
    assert log == ["out"] * 9
    log.clear()
    loss.backward()
    # The two layers below come back while the one above is at work; the last layer's tensors have not left.
    assert log == ["back"] * 3 + [2] + ["back"] * 3 + [1] + [0]


def test_a_second_backward(model):
    expected = gradients(model)
    hooked(model, (), ("gate", "v"))
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(q.grad, 2 * expected[n]) for n, q in model.named_parameters())


def test_two_models_whose_forwards_interleave(model):
    other = qwen3.tiny(layers=2)
    patch(other)
    expected = [gradients(m) for m in (model, other)]
    for m in (model, other):
        hooked(m, (), ("gate", "up"))
        m.zero_grad(set_to_none=True)
    a, b, c = loss_of(model), loss_of(other), loss_of(model)
    a.backward()
    b.backward()
    del c
    assert same(expected[1], {n: q.grad for n, q in other.named_parameters()}) and same(expected[0], {n: q.grad for n, q in model.named_parameters()})


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_left_behind(model, backward):
    """Neither after a backward nor of a graph that is dropped without one; no cycle that only the collector frees."""
    hooked(model, (), ("gate", "up"))

    def once():
        model.zero_grad(set_to_none=True)
        loss = loss_of(model)
        if backward:
            loss.backward()

    once()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) in (torch.Tensor, offload.Parcel, offload.Shipment) for o in gc.get_objects())
        for _ in range(3):
            once()
        assert sum(type(o) in (torch.Tensor, offload.Parcel, offload.Shipment) for o in gc.get_objects()) <= before
    finally:
        gc.enable()


def test_host_memory_is_used_again_and_given_back(model):
    hooks = hooked(model, ("up",), ("gate", "product"))
    sizes = []
    for ids in (IDS, IDS[:, :-1], IDS):  # a little shorter: the same memory
        loss_of(model, ids).backward()
        sizes.append({key: sorted(t.data_ptr() for t in idle) for key, idle in offload._idle.items()})
    assert sizes[0] == sizes[1] == sizes[2] and [len(v) for v in sizes[0].values()] == [6]  # both have one size
    loss = loss_of(model)
    other = loss_of(model)  # while the first graph lives, its memory is not for others
    assert sum(map(len, offload._idle.values())) == 0
    del loss, other
    assert sum(map(len, offload._idle.values())) == 12
    for each in hooks:
        each.off()
    assert not offload._idle


def test_two_graphs_at_once_have_the_right_gradients(model):
    more = IDS.flip(0, 1)
    want = []
    for ids in (IDS, more):
        model.zero_grad(set_to_none=True)
        loss_of(model, ids).backward()
        want.append({n: q.grad.clone() for n, q in model.named_parameters()})
    hooked(model, (), ("q", "gate", "up"))
    gradients(model)  # memory that the next ones use again
    first, second = loss_of(model), loss_of(model, more)
    for loss, expected in ((second, want[1]), (first, want[0])):
        model.zero_grad(set_to_none=True)
        loss.backward()
        assert same({n: q.grad for n, q in model.named_parameters()}, expected)


def test_pinned_memory_goes_with_the_last_graph_when_the_policy_went_before(model):
    with p.apply(model, p.Keep((), ("gate",))):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
    expected = {n: q.grad.clone() for n, q in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert same({n: q.grad for n, q in model.named_parameters()}, expected)
    del loss
    assert not offload._idle


def test_a_copy_that_fails_is_made_again(model, monkeypatch):
    expected = gradients(model)
    hooked(model, (), ("gate", "q"))
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(offload.Parcel, "_copy", stop)
        loss.backward(retain_graph=True)
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert same({n: q.grad for n, q in model.named_parameters()}, expected)


def test_another_thread_s_forward_takes_nothing_away(model, monkeypatch):
    expected = gradients(model)
    other = qwen3.tiny(layers=2)
    patch(other)
    for each in (model, other):
        hooked(each, (), ("gate",))
    take = offload.Parcel.take
    once = []

    def pausing(self, name):  # where threads may change over
        if not once:
            once.append(threading.Thread(target=loss_of, args=(other,)))
            once[0].start()
            once[0].join()
        return take(self, name)

    monkeypatch.setattr(offload.Parcel, "take", pausing)
    assert same(gradients(model), expected) and once


def test_frozen_layers_send_nothing(model, monkeypatch):
    for q in model.parameters():
        q.requires_grad_(False)
    model.model.layers[2].mlp.down_proj.weight.requires_grad_()
    sent = []
    copy = offload.Parcel._copy
    monkeypatch.setattr(offload.Parcel, "_copy", lambda self, to, source: (sent.append(1), copy(self, to, source)))
    hooks = hooked(model, (), ("gate", "product"))
    loss_of(model).backward()
    assert not sent and model.model.layers[2].mlp.down_proj.weight.grad is not None
    for each in hooks:
        each.off()


def test_what_was_sent_stays_on_the_device_until_another_layer_sends(model):
    """What plan.predict counts on."""
    seen = watch(model)
    p.apply(model, [p.Keep((), ("gate",)), p.Keep(), p.Block()])
    loss = loss_of(model)
    assert [s.expired() for s in seen] == [False, True, True]
    loss.backward()
    assert all(s.expired() for s in seen)


@pytest.mark.parametrize("index", [0, 2], ids=["while it leaves", "while it waits"])
def test_a_tensor_written_to_after_it_was_saved(model, index):
    hooked(model, ("up",), ("gate",))
    held = []
    model.model.layers[index].mlp.gate_proj.register_forward_hook(lambda m, a, out: held.append(out.detach()))

    def write(*_):
        held.pop().zero_()

    model.model.layers[index].register_forward_hook(write)
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="gate was written to in place"):
        loss.backward()


def test_what_is_refused(model):
    layer = model.model.layers[0]
    with pytest.raises(p.PolicyError, match="cannot be both kept and offloaded"):
        LayerHooks(layer, ("gate",), ("gate", "up"))
    with pytest.raises(p.PolicyError, match="cannot be both kept and offloaded"):
        p.Keep(("gate",), offload=("gate",))
    for wrong in (lambda: p.Keep("gate"), lambda: p.Keep((), "q"), lambda: LayerHooks(layer, "q"), lambda: LayerHooks(layer, (), "q")):
        with pytest.raises(p.PolicyError, match="not as one string"):
            wrong()
    with pytest.raises(p.PolicyError, match="unknown tensors gat"):
        p.Keep((), offload=("gat",))
    assert p.Keep(("up",), offload=("gate", "q")).name == "keep up offload q+gate"


@pytest.mark.parametrize(("nbytes", "pinned"), [(1, 1), (2, 2), (3, 4), (96 << 20, 128 << 20), (128 << 20, 128 << 20)])
def test_pinned_memory_comes_in_powers_of_two(nbytes, pinned):
    assert offload.pinned_bytes(nbytes) == pinned


@pytest.mark.gpu
def test_on_a_gpu_less_memory_and_the_same_gradients():
    model = qwen3.build(6, vocab_size=4096)
    ids = pareto.batches_of(model, 1, 2048, 2)
    want = agreement.gradients(model, "ours keep gate+up", ids[0])
    reference = [q.grad.clone() for q in model.parameters()]
    peaks = []
    for name in ("ours keep gate+up", "ours keep up offload gate", "ours keep offload gate+up"):
        got = agreement.gradients(model, name, ids[0])  # once more than measured, so that pinned memory exists
        torch.cuda.reset_peak_memory_stats()
        got = agreement.gradients(model, name, ids[0])
        peaks.append(torch.cuda.max_memory_allocated())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
        assert agreement.difference(model, reference)[1] < 1e-2
    size = 2048 * model.config.intermediate_size * 2
    # Of six layers four need not be on the device at once.
    assert peaks[0] - peaks[1] >= 3 * size and peaks[0] - peaks[2] >= 6 * size


@pytest.mark.gpu
def test_on_a_gpu_a_host_that_runs_ahead_takes_no_more_memory():
    """Steps without a wait between them, each with other tokens: pinned memory is used again before the device is done with it."""
    model = qwen3.build(4, vocab_size=4096)
    batches = pareto.batches_of(model, 1, 2048, 4)
    seen = recipes.visit("ours keep up offload gate", model, batches, 8)
    assert seen["host_bytes"] == 4 * offload.pinned_bytes(2048 * model.config.intermediate_size * 2)
    assert recipes.visit("ours keep", model, batches, 2)["host_bytes"] == 0

    def after(name):
        recipes.fixed_bytes(model)
        torch._foreach_zero_([q.grad for q in model.parameters()])
        with recipes.recipe(name, model) as ready:
            for ids in batches:
                ready.step(ids)
        return [q.grad.clone() for q in model.parameters()]

    want = after("ours none")
    after("ours keep offload q+gate+up")
    assert agreement.difference(model, want)[1] < 1e-2


@pytest.mark.gpu
def test_on_a_gpu_a_tensor_fetched_on_one_stream_is_read_on_another():
    """Forwards of two models on two streams in turn: the second's backward fetches what the first's last layer had sent."""
    models = [qwen3.build(2, vocab_size=4096) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in models]
    batches = pareto.batches_of(models[0], 1, 2048, 2)
    want = []
    for net, ids in zip(models, batches, strict=True):
        agreement.gradients(net, "ours none", ids)
        want.append([q.grad.clone() for q in net.parameters()])
        net.zero_grad(set_to_none=True)
        patch(net)
    hooks = [each for net in models for each in hooked(net, ("up",), ("q", "gate"))]
    torch.cuda.synchronize()

    def on(i, run):
        with torch.cuda.stream(streams[i]):
            return run()

    for _ in range(5):
        for net in models:
            net.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        first = on(0, lambda: loss_of(models[0], batches[0]))
        second = on(1, lambda: loss_of(models[1], batches[1]))
        on(1, second.backward)
        on(0, first.backward)
        again = on(1, lambda: loss_of(models[1], batches[1]))  # takes the memory that the backwards gave up
        torch.cuda.synchronize()
        for net, reference in zip(models, want, strict=True):
            assert agreement.difference(net, reference)[1] < 2e-2
        del first, second, again
    for each in hooks:
        each.off()


@pytest.mark.gpu
def test_a_cuda_graph_is_refused_and_the_recipes_after_it_run():
    model = qwen3.build(2, vocab_size=4096)
    (ids,) = pareto.batches_of(model, 1, 256, 1)
    recipes.fixed_bytes(model)
    with recipes.recipe("ours keep offload gate under graph", model) as ready, pytest.raises(recipes.Unfit, match="inside the capture of a CUDA graph"):
        ready.step(ids)
    assert recipes.visit("ours keep offload gate", model, [ids], 5)["peak_bytes"] > 0
