"""The rules of a capture as errors. What needs a device is marked; the rest is checked without."""

import pytest
import torch

from snippets import qwen3
from snippets.cuda_graph import graphed
from snippets.cuda_graph.graphed import Graphed, GraphError


def double(x):
    return x * 2


def test_a_cpu_is_refused():
    with pytest.raises(GraphError, match="needs inputs on a CUDA device"):
        Graphed(double).capture(torch.ones(3))


@pytest.mark.parametrize(("given", "says"), [(3, "input 0 is a int, which a graph would keep as a constant"), (torch.ones(2, requires_grad=True), "needs a gradient")])
def test_inputs_that_are_refused(given, says):
    with pytest.raises(GraphError, match=says):
        Graphed(double).capture(given)
    with pytest.raises(GraphError, match=says):
        Graphed(double)(given)


def test_what_was_not_captured_is_named():
    with pytest.raises(GraphError, match=r"not captured for \[2, 3\] float32 cpu; captured: nothing"):
        Graphed(double)(torch.ones(2, 3))


def test_other_operators_are_found(monkeypatch):
    model = qwen3.tiny(layers=1)
    ids = torch.randint(0, 512, (1, 5))

    def operators(capturing, mask):
        from transformers.utils import import_utils

        monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: capturing)
        with graphed._Operators() as seen, torch.no_grad():
            model(ids, attention_mask=mask, use_cache=False)
        return seen.names

    given = {"full_attention": None}
    graphed._compare(operators(False, given), operators(True, given))
    with pytest.raises(GraphError, match="other operators than the warm-up"):
        graphed._compare(operators(False, None), operators(True, None))


def test_a_shorter_capture_is_found():
    with pytest.raises(GraphError, match="operator 1 was b, then None"):
        graphed._compare(["a", "b"], ["a"])


@pytest.mark.gpu
def test_replays_with_other_values_and_shapes():
    both = Graphed(lambda x, y: {"sum": x + y, "product": (x * y).relu()})
    for n in (7, 3):
        both.capture(torch.ones(n, device="cuda"), torch.ones(n, device="cuda"))
    for n in (3, 7, 3):
        x, y = torch.randn(2, n, device="cuda")
        out = graphed.clone(both(x, y))
        torch.testing.assert_close(out["sum"], x + y)
        torch.testing.assert_close(out["product"], (x * y).relu())
    with pytest.raises(GraphError, match=r"not captured for \[5\] float32 cuda:0, \[5\] float32 cuda:0; captured: \[7\]"):
        both(torch.ones(5, device="cuda"), torch.ones(5, device="cuda"))
    with pytest.raises(GraphError, match="float16"):
        both(torch.ones(3, device="cuda").half(), torch.ones(3, device="cuda").half())


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x.cpu(), lambda x: x if x.sum() > 0 else -x])
def test_a_wait_is_refused_before_the_capture_and_the_process_goes_on(waits):
    x = torch.ones(4, device="cuda")
    with pytest.raises(GraphError, match="waits for the device"):
        Graphed(waits).capture(x)
    assert torch.cuda.get_sync_debug_mode() == 0
    again = Graphed(lambda x: torch.nn.functional.dropout(x, 0.5))
    again.capture(x)
    masks = {tuple(again(x).tolist()) for _ in range(20)}
    assert len(masks) > 1  # random numbers go on at each replay


@pytest.mark.gpu
def test_transformers_other_branch_is_refused():
    model = qwen3.build(1, vocab_size=1024).eval()
    ids = torch.randint(0, 1024, (1, 64), device="cuda")

    def forward(ids, mask):
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=False).logits

    with pytest.raises(GraphError, match="full_attention"):
        Graphed(lambda ids: forward(ids, None)).capture(ids)
    right = Graphed(lambda ids: forward(ids, {"full_attention": None}))
    right.capture(ids)
    other = torch.randint(0, 1024, (1, 64), device="cuda")
    torch.testing.assert_close(right(other), forward(other, {"full_attention": None}))


@pytest.mark.gpu
def test_what_the_warm_up_changed_is_put_back():
    total = torch.zeros((), device="cuda")
    add = Graphed(lambda x: total.add_(x.sum()), restore=total.zero_)
    add.capture(torch.ones(2, device="cuda"))
    assert total.item() == 0
    add(torch.full((2,), 3.0, device="cuda"))
    assert total.item() == 6
