"""A step equals the usual training loop; a learning rate of 0 leaves the weights; what is wrong is refused."""

import pytest
import torch

from snippets import qwen3
from snippets.cuda_graph.train_step import TrainStep


def forward_backward(model):
    def run(ids):
        loss = model(ids, labels=ids, attention_mask={"full_attention": None}, use_cache=False).loss
        loss.backward()
        return loss

    return run


def plain(model, batches, rates, clip, micro):
    """The loop as everybody writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    seen = []
    for ids, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        losses = [forward_backward(lambda i, **k: _scaled(model(i, **k), micro))(part) for part in ids]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else torch.zeros(())
        optimizer.step()
        seen.append((sum(losses), norm))
    return seen


def _scaled(out, micro):
    out.loss = out.loss / micro
    return out


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_is_the_usual_loop(micro, clip):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 512, (micro, 2, 7), generator=generator) for _ in range(4)]
    rates = [1e-3, 5e-4, 2e-3, 1e-3]
    model, other = qwen3.tiny(layers=1), qwen3.tiny(layers=1)
    other.load_state_dict(model.state_dict())
    want = plain(other, batches, rates, clip, micro)
    step = TrainStep(model, forward_backward(model), micro_batches=micro, clip=clip)
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda i: rates[min(i, 3)] / 1e-4)
    for ids, (loss, norm) in zip(batches, want, strict=True):
        got = step(ids)
        schedule.step()
        torch.testing.assert_close(got[0], loss.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1], norm, rtol=1e-3, atol=1e-5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        # Adam makes a whole step of a gradient that is all rounding, so single weights may part; a step is some 1e-3.
        assert (p - q).abs().mean() < 1e-5
    assert step.optimizer.param_groups[0]["lr"] is step.learning_rate  # still the tensor that a graph reads


def test_a_learning_rate_of_0_leaves_the_weights_bits():
    model = qwen3.tiny(layers=1)
    before = [p.clone() for p in model.parameters()]
    step = TrainStep(model, forward_backward(model), learning_rate=0.0)
    step(torch.randint(0, 512, (1, 2, 7)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_addresses_stay():
    model = qwen3.tiny(layers=1)
    step = TrainStep(model, forward_backward(model))
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    for _ in range(2):
        step(torch.randint(0, 512, (1, 2, 7)))
    assert addresses == [p.grad.data_ptr() for p in model.parameters()]


def test_what_is_refused():
    model = qwen3.tiny(layers=1)
    with pytest.raises(ValueError, match="first size must be 2"):
        TrainStep(model, forward_backward(model), micro_batches=2)(torch.zeros(3, 1, 4, dtype=torch.int64))
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        TrainStep(model, forward_backward(model))
