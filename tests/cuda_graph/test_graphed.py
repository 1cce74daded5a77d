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


def test_graphs_that_share_share_before_the_first_capture_too():
    first = Graphed(double)
    assert Graphed(double, share=first)._memory is first._memory


def test_the_first_cause_of_a_broken_capture():
    try:
        try:
            raise RuntimeError("not permitted\nwhen capturing")
        finally:
            raise ValueError("due to a previous error")
    except ValueError as error:
        assert graphed.first_cause(error) == "RuntimeError: not permitted"
    assert graphed.first_cause(KeyError()) == "KeyError: no message"


def test_a_shorter_capture_is_found():
    with pytest.raises(GraphError, match="operator 1 was b, then None"):
        graphed._compare(["a", "b"], ["a"])


def test_the_line_that_waits_is_named():
    inside_torch = torch.nn.Linear(3, 3)
    for call in (lambda: torch.ones(2, 3).reshape(4), lambda: inside_torch(torch.ones(2))):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert graphed._place(raised.value).startswith("test_graphed.py:")
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2, 3).reshape(4)
    assert graphed._place(raised.value).endswith(": torch.ones(2, 3).reshape(4)")
