"""The ways of use that the article shows: each leaves the model's gradients in the model, and the model as it was."""

import pytest
import torch

from snippets import qwen3
from snippets.checkpointing import usage

IDS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", [usage.selective, usage.mixed, usage.on_demand, usage.offloaded], ids=lambda f: f.__name__)
def test_gradients_are_the_model_s(way):
    model = qwen3.tiny(layers=3)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    model.zero_grad()
    way(model, IDS)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[n], rtol=1e-4, atol=1e-6)
    assert [type(m) for m in model.modules()] == classes
