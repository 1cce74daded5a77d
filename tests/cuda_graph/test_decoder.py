"""Decoding equals transformers: logits by teacher forcing, tokens, at several lengths and batch sizes, to the end of the cache."""

import pytest
import torch

from snippets import qwen3
from snippets.cuda_graph import graphed
from snippets.cuda_graph.decoder import Decoder, joined

PLACES = 16


@pytest.fixture(scope="module")
def model():
    net = qwen3.tiny(layers=2).eval()
    with torch.no_grad():  # random gains, or a norm that is left out would not be seen
        for p in net.parameters():
            if p.ndim == 1:
                p.uniform_(0.5, 1.5)
    return net


def prompts_of(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 512, (n,), generator=generator) for n in sizes]


def reference(model, ids):
    with torch.no_grad():
        return model(ids[None], attention_mask={"full_attention": None}, use_cache=False).logits[0]


@pytest.mark.parametrize("sizes", [(1,), (15,), (3, 7), (2, 9, 4, 9), (1, 2, 3, 4, 5)])
def test_greedy_tokens_are_those_of_transformers(model, sizes):
    prompts = prompts_of(*sizes)
    new = min(5, PLACES + 1 - max(sizes))
    got = Decoder(model, batch=5, places=PLACES).generate(prompts, new)
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = prompt
        for _ in range(new):
            ids = torch.cat((ids, reference(model, ids)[-1].argmax()[None]))
        assert torch.equal(tokens, ids[len(prompt) :])


@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities_by_teacher_forcing_from_the_first_token_to_the_end_of_the_cache(model, count):
    """No prefill: every token is given, so each step's logits can be compared, whatever the step before chose."""
    texts = prompts_of(*[PLACES + 1] * count, seed=1)
    decoder = Decoder(model, batch=4, places=PLACES)
    decoder.tokens[:count] = torch.stack(texts)
    decoder.given[:count] = PLACES + 1
    want = torch.stack([reference(model, t[:PLACES]) for t in texts]).log_softmax(-1)
    for i in range(PLACES):
        decoder.step(count)
        torch.testing.assert_close(decoder.logits[:count].log_softmax(-1), want[:, i], rtol=1e-4, atol=1e-4)
    assert decoder.lengths[:count].tolist() == [PLACES] * count and torch.equal(decoder.tokens[:count], torch.stack(texts))


def test_a_prefix_that_is_given_then_free(model):
    (text,) = prompts_of(6)
    decoder = Decoder(model, batch=1, places=PLACES)
    decoder.tokens[0, :6], decoder.given[0] = text, 6
    decoder.decode(1, 10)
    (want,) = Decoder(model, batch=1, places=PLACES).generate([text], 5)
    assert torch.equal(decoder.tokens[0, 6:11], want)


def test_past_the_end_nothing_is_written_and_nothing_breaks(model):
    decoder = Decoder(model, batch=2, places=4)
    decoder.tokens[:] = 7
    decoder.given[:] = 5
    for _ in range(6):
        decoder.step(2)
    assert decoder.lengths.tolist() == [4, 4] and bool((decoder.tokens == 7).all())


def test_a_second_generation_sees_nothing_of_the_first(model):
    decoder = Decoder(model, batch=2, places=PLACES)
    first = decoder.generate(prompts_of(9, 3), 4)
    decoder.generate(prompts_of(10, 13, seed=2), 3)
    again = decoder.generate(prompts_of(9, 3), 4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_warm_up_between_prefill_and_decode_leaves_no_trace(model):
    """A capture warms up from length 0 and so writes the first places of a cache that may be in use."""
    decoder = Decoder(model, batch=2, places=PLACES)
    decoder.prefill(prompts_of(9, 3))
    before = [t.clone() for t in (decoder.keys, decoder.values, decoder.tokens, decoder.lengths, decoder.given)]
    with decoder._untouched():
        for _ in range(graphed.WARMUPS):
            decoder.step(2)
    after = (decoder.keys, decoder.values, decoder.tokens, decoder.lengths, decoder.given)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_stop(model):
    decoder = Decoder(model, batch=2, places=PLACES)
    whole = decoder.generate(prompts_of(4, 5), 9)
    stop = int(whole[0][2])
    cut = decoder.generate(prompts_of(4, 5), 9, stop=stop)
    for full, short in zip(whole, cut, strict=True):
        ends = (full == stop).nonzero()
        assert torch.equal(short, full[: int(ends[0]) + 1] if len(ends) else full)
    assert len(cut[0]) <= 3


def test_the_model_still_works_and_nothing_is_held_twice(model):
    ids = prompts_of(12)[0]
    before = reference(model, ids)
    attention = model.model.layers[0].self_attn
    together = joined(attention.q_proj, attention.k_proj, attention.v_proj)
    assert joined(attention.q_proj, attention.k_proj, attention.v_proj).data_ptr() == together.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == together.untyped_storage().data_ptr()
    torch.testing.assert_close(reference(model, ids), before)
    with torch.no_grad():
        attention.k_proj.weight.mul_(1.0)  # still a parameter that can be written to


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: Decoder(m, batch=0, places=4), "batch 0"),
        (lambda m: Decoder(m, batch=1, places=10**6), "at most"),
        (lambda m: Decoder(m.train(), batch=1, places=4), "model.eval"),
        (lambda m: Decoder(m, batch=1, places=8).generate(prompts_of(3, 3), 2), "2 prompts"),
        (lambda m: Decoder(m, batch=1, places=8).generate([], 2), "0 prompts"),
        (lambda m: Decoder(m, batch=1, places=8).generate(prompts_of(9), 1), "9 tokens|room for 0"),
        (lambda m: Decoder(m, batch=1, places=8).generate(prompts_of(0), 1), "0 tokens"),
        (lambda m: Decoder(m, batch=1, places=8).generate(prompts_of(4), 6), "room for 5"),
        (lambda m: Decoder(m, batch=2, places=8).capture(3), "room for 2"),
    ],
)
def test_what_is_refused(model, call, says):
    try:
        with pytest.raises(ValueError, match=says):
            call(model)
    finally:
        model.eval()
