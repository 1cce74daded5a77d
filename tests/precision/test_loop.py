"""The training loop of Gate 3, on the tiny model on the CPU."""

import math

import pytest
import torch

from snippets import qwen3
from snippets.precision import corpus, loop


@pytest.fixture(scope="module")
def rows():
    return corpus.sequences("train", 6, 24, seed=0, vocab=qwen3.TINY["vocab_size"])


def silent(*_):
    pass


def test_no_mask_reaches_sdpa_as_is_causal(monkeypatch, rows):
    """The dict mask must mean causal attention without a mask tensor, not full attention."""
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return sdpa(*args, **kwargs)

    model = qwen3.tiny()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    ours = loop.forward(model, rows[:1]).logits
    assert seen == [(None, True)] * 2
    assert torch.allclose(ours, model(rows[:1]).logits, atol=1e-6)
    changed = rows[:1].clone()
    changed[0, -1] = (changed[0, -1] + 1) % 512
    assert torch.equal(loop.forward(model, changed).logits[0, :-1], ours[0, :-1])


def test_training_repeats_exactly_and_learns():
    steps = 30
    rows = corpus.sequences("train", 1, 24, seed=0, vocab=512).repeat(steps, 1)  # one text: memorised quickly
    a, b = (loop.train(qwen3.tiny(seed=1), rows, rate=3e-3, warmup=5, say=silent) for _ in range(2))
    assert torch.equal(a.losses, b.losses)
    assert a.losses[0] == pytest.approx(math.log(512), rel=0.05) and a.losses[-1] < 0.7 * a.losses[0]
    assert (a.norms > 0).all() and a.seconds > 0


def test_first_loss_is_the_plain_mean_over_labels_that_count(rows):
    model = qwen3.tiny(seed=2)
    with torch.no_grad():
        logits = model(rows[:1]).logits[0, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits, rows[0, 1:], reduction="none")
    whole = loop.train(qwen3.tiny(seed=2), rows[:1], rate=1e-3, warmup=1, say=silent)
    part = loop.train(qwen3.tiny(seed=2), rows[:1], rate=1e-3, warmup=1, ignored=5, say=silent)
    assert float(whole.losses[0]) == pytest.approx(float(losses.mean()), rel=1e-6)
    # labels 0..4 are ignored: targets 5.. remain, which positions 4.. predict
    assert float(part.losses[0]) == pytest.approx(float(losses[4:].mean()), rel=1e-6)


def test_warm_up_scales_the_first_update(rows):
    """Adam's first step moves a weight by the current rate: warm-up 10 must move a tenth as far as warm-up 1."""
    moved = {}
    for warmup in (1, 10):
        model = qwen3.tiny(seed=3)
        before = model.lm_head.weight.detach().clone()
        loop.train(model, rows[:1], rate=1e-3, warmup=warmup, say=silent)
        moved[warmup] = float((model.lm_head.weight.detach() - before).abs().median())
    assert moved[1] == pytest.approx(10 * moved[10], rel=0.01)
