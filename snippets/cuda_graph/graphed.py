"""A function of tensors as CUDA graphs, one for each set of input shapes: the manual way, with its rules checked.

    forward = Graphed(model_forward)
    forward.capture(example)             # once for each shape, the largest first
    out = forward(batch)                 # copies batch into the static input, replays; out is overwritten by the next call

A graph repeats the launches of one run with the same addresses. From that follow the rules, each of which torch leaves to the
caller, and each of which is an error here:

* The inputs live at fixed addresses: a call copies into them, and a shape, dtype or device that was not captured is refused.
* Nothing may wait for the device during a capture. A run with waiting made an error comes before it, since a capture that
  failed leaves its process with a broken random-number state and memory that nobody frees.
* What is captured has to be what runs otherwise. Libraries ask whether a capture is going on and then do something else:
  transformers 5.17 builds the whole attention mask, which keeps it from the fast attention. So the operators of the warm-up
  are compared with those of the capture.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

WARMUPS = 3  # the first compiles and fills caches; autotuners may take another


class GraphError(RuntimeError):
    """The function cannot be captured as it is, or a call does not fit what was captured."""


class _Operators(TorchDispatchMode):
    """Lists the operators that run, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


# --8<-- [start:graphed]
@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any


Key = tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]


class Graphed:
    """CUDA graphs of ``function``, which takes tensors and returns tensors (nested in tuples, lists or dicts).

    Args:
        function: what to capture. It may change tensors that it reaches otherwise, such as weights, gradients or a cache;
            then ``restore`` has to put them back, for the warm-up runs it for real.
        restore: called after the warm-up and after the capture.
        same_operators: compare the operators of the warm-up with those of the capture. Turn it off for functions whose
            operators differ from run to run for a reason.
        share: another one, whose memory pool and stream this one uses too.

    All graphs of one object, and of those that share, use one memory pool, so their outputs share memory too: read or copy an
    output before the next call with any shape.
    """

    def __init__(
        self, function: Callable[..., Any], *, restore: Callable[[], None] | None = None, same_operators: bool = True, share: Graphed | None = None
    ):
        self.function, self.restore, self.same_operators = function, restore or (lambda: None), same_operators
        self._captured: dict[Key, _Captured] = {}
        self._pool, self._stream = (share._pool, share._stream) if share else (None, None)

    def capture(self, *example: Tensor) -> None:
        """Warm up and capture for inputs like these; their values are copied.

        Raises:
            GraphError: no CUDA device, an input that is none of its tensors or needs a gradient, a function that waits for the
                device or runs other operators under a capture, or a capture that failed.
        """
        key = _key(example)
        if any(not t.is_cuda for t in example) or not torch.cuda.is_available():
            raise GraphError("a CUDA graph needs inputs on a CUDA device; move them there")
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        inputs = [t.detach().clone() for t in example]
        warm = self._warm_up(inputs)
        graph = torch.cuda.CUDAGraph()
        captured = _Operators()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream), captured:
                output = self.function(*inputs)
        except RuntimeError as error:
            cause = str(error.__context__ or error).splitlines()[0]
            raise GraphError(f"the capture failed: {cause}. Its memory is lost to this process; start a new one") from error
        self.restore()
        if self.same_operators:
            _compare(warm, captured.names)
        self._captured[key] = _Captured(graph, inputs, output)

    def _warm_up(self, inputs: Sequence[Tensor]) -> list[str]:
        """Run on the capture's own stream, the last time with every wait an error; returns that run's operators."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUPS - 1):
                self.function(*inputs)
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with _Operators() as operators:
                    self.function(*inputs)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                raise GraphError(
                    f"the function waits for the device ({_place(error)}); nothing was captured. Keep the value on the device, or "
                    'leave that part outside the graph; for masks of transformers give attention_mask={"full_attention": None}'
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        self.restore()
        return operators.names

    def __call__(self, *inputs: Tensor) -> Any:
        """Copy the inputs in, replay, return the static outputs.

        Raises:
            GraphError: shapes, dtypes or devices that were not captured; the message lists those that were.
        """
        captured = self._captured.get(key := _key(inputs))
        if captured is None:
            known = "; ".join(_said(k) for k in self._captured) or "nothing"
            raise GraphError(f"not captured for {_said(key)}; captured: {known}. Pad to one of these, or capture it first")
        for static, given in zip(captured.inputs, inputs, strict=True):
            if static is not given:
                static.copy_(given, non_blocking=True)
        captured.graph.replay()
        return captured.output
# --8<-- [end:graphed]


def _key(tensors: Sequence[Tensor]) -> Key:
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise GraphError(f"input {i} is a {type(t).__name__}, which a graph would keep as a constant; give a tensor on the device")
        if t.requires_grad:
            raise GraphError(f"input {i} needs a gradient, which a copy into the static input cuts off; capture the backward inside the function")
    return tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)


def _said(key: Key) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')} {device}" for shape, dtype, device in key)


def _place(error: BaseException) -> str:
    """The innermost line of Python that isn't torch's own or this file's: ``masking_utils.py:755: if not is_tracing(...``."""
    own = (str(Path(torch.__file__).parent), __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else "in a function without Python source"


def _compare(warm: Sequence[str], captured: Sequence[str]) -> None:
    for i, (a, b) in enumerate(itertools.zip_longest(warm, captured)):
        if a != b:
            raise GraphError(
                f"the capture ran other operators than the warm-up: operator {i} was {a}, then {b}. The function asks whether it is captured; "
                'for transformers give attention_mask={"full_attention": None}'
            )


def clone(output: Any) -> Any:
    """A copy of a graph's output that the next replay doesn't overwrite."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, output)
