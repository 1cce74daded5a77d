"""lm_head and cross-entropy in slices: the same numbers, a slice of the memory."""

import pytest
import torch

from snippets import qwen3
from snippets.checkpointing.chunked_loss import head_backward, loss_and_backward


def case(rows=11, hidden=6, vocabulary=37, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(vocabulary, hidden, generator=g, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    labels[[0, rows // 2, rows - 1]] = -100
    return x, w, labels


def truth(x, w, labels, scale=1.0, items=None):
    loss = torch.nn.functional.cross_entropy(x @ w.T, labels, ignore_index=-100, reduction="mean" if items is None else "sum")
    loss = loss if items is None else loss / items
    return loss, *torch.autograd.grad(scale * loss, (x, w))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 40])
@pytest.mark.parametrize("items", [None, 5.0, torch.tensor(7)])
@pytest.mark.parametrize("before", [False, True])
def test_loss_and_gradients(rows, items, before):
    x, w, labels = case()
    want = truth(x, w, labels, 3.0, items)
    w.grad = torch.ones_like(w) if before else None
    loss, dx = head_backward(x, w, labels, slice_rows=rows, scale=3.0, num_items_in_batch=items)
    torch.testing.assert_close((loss, dx, w.grad - int(before)), (want[0].detach(), *want[1:]), rtol=1e-10, atol=1e-12)
    assert not loss.requires_grad and not dx.requires_grad and x.grad is None


def test_a_frozen_weight_gets_no_gradient():
    x, w, labels = case()
    want = truth(x, w, labels)
    w.requires_grad_(False)
    _, dx = head_backward(x, w, labels, slice_rows=4)
    torch.testing.assert_close(dx, want[1], rtol=1e-10, atol=1e-12)
    assert w.grad is None


def test_more_dimensions_are_rows():
    x, w, labels = case(rows=12)
    flat, dx = head_backward(x, w, labels, slice_rows=3)
    deep, dx3 = head_backward(x.view(3, 4, -1), w, labels.view(3, 4), slice_rows=3)
    assert flat.equal(deep) and dx.view(3, 4, -1).equal(dx3)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"slice_rows": 0}, "slice_rows is 0"), ({"weight": torch.zeros(37, 5)}, r"weight \(37, 5\)"), ({"labels": torch.zeros(3).long()}, "labels")],
)
def test_what_does_not_fit(change, says):
    x, w, labels = case()
    with pytest.raises(ValueError, match=says):
        head_backward(**({"hidden": x, "weight": w, "labels": labels} | change))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_it_is_the_model_s_own_loss(scale):
    model = qwen3.tiny(dtype=torch.float64)
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    want_loss = model(ids, labels=labels, use_cache=False).loss
    (scale * want_loss).backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss = loss_and_backward(model, ids, labels, slice_rows=4, scale=scale)
    torch.testing.assert_close(loss.float(), want_loss.detach(), rtol=1e-5, atol=0)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[n], rtol=1e-4, atol=1e-7)  # HF's loss is in fp32 even here


def test_what_has_no_effect_or_no_backward_is_refused_before_anything_is_added():
    model = qwen3.tiny()
    ids = torch.randint(0, 512, (1, 5))
    with pytest.raises(ValueError, match="logits_to_keep"):
        loss_and_backward(model, ids, logits_to_keep=2)
    with pytest.raises(RuntimeError, match="no_grad"), torch.no_grad():
        loss_and_backward(model, ids)
    with pytest.raises(RuntimeError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        loss_and_backward(model, ids)
    model.lm_head.weight.register_hook(lambda g: g * 0)
    with pytest.raises(RuntimeError, match="hooks"):
        loss_and_backward(model, ids)
    assert all(p.grad is None for p in model.parameters())


def test_another_ignore_index_and_a_frozen_decoder():
    model = qwen3.tiny()
    model.model.requires_grad_(False)
    ids = torch.randint(0, 3, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=0)
    (gradient,) = torch.autograd.grad(want, model.lm_head.weight)
    torch.testing.assert_close(loss_and_backward(model, ids, ignore_index=0), want.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.gpu
def test_memory_is_one_slice_and_nothing_syncs():
    rows, width, vocabulary = 4096, 1024, 65536
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    w.grad = torch.zeros_like(w)
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")
    head_backward(x, w, labels, slice_rows=512)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        head_backward(x, w, labels, slice_rows=512)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    slice_bytes = 512 * vocabulary * 2
    assert torch.cuda.max_memory_allocated() - before < slice_bytes + 3 * x.nbytes
