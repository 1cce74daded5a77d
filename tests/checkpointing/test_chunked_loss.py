"""lm_head and cross-entropy in slices: the same numbers, a slice of the memory."""

import pytest
import torch

from snippets import qwen3
from snippets.checkpointing.chunked_loss import causal_loss, linear_cross_entropy


def case(rows=11, hidden=6, vocabulary=37, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(vocabulary, hidden, generator=g, dtype=dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    labels[[0, rows // 2, rows - 1]] = -100
    return x, w, labels


def truth(x, w, labels, scale=1.0, items=None):
    loss = torch.nn.functional.cross_entropy(x @ w.T, labels, ignore_index=-100, reduction="mean" if items is None else "sum")
    return torch.autograd.grad(scale * (loss if items is None else loss / items), (x, w)), loss


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 11, 40])
@pytest.mark.parametrize("items", [None, 5.0, torch.tensor(7)])
def test_loss_and_gradients(slices, items):
    x, w, labels = case()
    want, want_loss = truth(x, w, labels, 3.0, items)
    loss = linear_cross_entropy(x, w, labels, slices=slices, num_items_in_batch=items)
    torch.testing.assert_close(loss, want_loss / (1 if items is None else items), rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(3.0 * loss, (x, w))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    x, w, labels = case()
    want, _ = truth(x, w, labels)
    (x, w)[frozen].requires_grad_(False)
    other = (x, w)[1 - frozen]
    (got,) = torch.autograd.grad(linear_cross_entropy(x, w, labels, slices=3), other)
    torch.testing.assert_close(got, want[1 - frozen], rtol=1e-10, atol=1e-12)


def test_without_gradients_and_in_three_dimensions():
    x, w, labels = case(rows=12)
    with torch.no_grad():
        flat = linear_cross_entropy(x, w, labels, slices=5)
        deep = linear_cross_entropy(x.view(3, 4, -1), w, labels.view(3, 4), slices=5)
    assert flat.equal(deep) and not flat.requires_grad


def test_a_second_backward_is_refused():
    x, w, labels = case()
    loss = linear_cross_entropy(x, w, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, w, labels), x, create_graph=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"slices": 0}, "slices is 0"), ({"weight": torch.zeros(37, 5)}, r"weight \(37, 5\)"), ({"labels": torch.zeros(3).long()}, "labels")],
)
def test_what_does_not_fit(change, says):
    x, w, labels = case()
    with pytest.raises(ValueError, match=says):
        linear_cross_entropy(**({"hidden": x, "weight": w, "labels": labels} | change))


def test_it_is_the_model_s_own_loss():
    model = qwen3.tiny(dtype=torch.float64)
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    model(ids, labels=labels, use_cache=False).loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    causal_loss(model, ids, labels, slices=3).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[n], rtol=1e-4, atol=1e-7)  # HF's loss is in fp32 even here
