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

import gc
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


class CaptureFailed(GraphError):
    """A capture broke off. Its memory is lost to the process and the random-number state may be broken: start a new process."""


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
class _Memory:
    """What graphs share: a memory pool and the stream on which they are captured, made at the first capture."""

    pool: tuple[int, int] | None = None
    stream: torch.cuda.Stream | None = None


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

    All graphs of one object, and of those that share, use one memory pool: the output of one may lie where another keeps what it
    needs between its kernels. So read or copy an output before the next call with any shape.
    """

    def __init__(
        self, function: Callable[..., Any], *, restore: Callable[[], None] | None = None, same_operators: bool = True, share: Graphed | None = None
    ):
        self.function, self.restore, self.same_operators = function, restore or (lambda: None), same_operators
        self._captured: dict[Key, _Captured] = {}
        self._memory = share._memory if share else _Memory()

    def capture(self, *example: Tensor) -> None:
        """Warm up and capture for inputs like these; their values are copied.

        Raises:
            GraphError: no CUDA device, inputs of several devices, an input that is none of its tensors or needs a gradient, a
                function that waits for the device or runs other operators under a capture.
            CaptureFailed: the capture itself broke off.
        """
        key = _key(example)
        if any(not t.is_cuda for t in example) or not torch.cuda.is_available():
            raise GraphError("a CUDA graph needs inputs on a CUDA device; move them there")
        if len(devices := {t.device for t in example}) > 1:
            raise GraphError(f"the inputs are on {', '.join(sorted(map(str, devices)))}; a graph belongs to one device")
        with torch.cuda.device(next(iter(devices), torch.cuda.current_device())):
            self._capture(key, [t.detach().clone() for t in example])

    def _capture(self, key: Key, inputs: list[Tensor]) -> None:
        memory = self._memory
        if memory.stream is None:
            memory.stream, memory.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        # What an earlier backward left in reference cycles would tie this one to the stream it ran on, and holds memory.
        gc.collect()
        warm = self._warm_up(inputs)
        graph = torch.cuda.CUDAGraph()
        captured = _Operators()
        current = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream), captured:
                output = self.function(*inputs)
        except RuntimeError as error:
            raise CaptureFailed(f"the capture failed: {first_cause(error)}. Its memory is lost to this process; start a new one") from error
        finally:
            torch.cuda.set_stream(current)  # torch leaves its own as the current one when the end of a capture fails
        self.restore()
        if self.same_operators:
            _compare(warm, captured.names)
        self._captured[key] = _Captured(graph, inputs, output)

    def _warm_up(self, inputs: Sequence[Tensor]) -> list[str]:
        """Run on the capture's own stream, the last time with every wait an error; returns that run's operators."""
        current, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
        self._memory.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._memory.stream):
                for _ in range(WARMUPS - 1):
                    self.function(*inputs)
                torch.cuda.set_sync_debug_mode("error")
                with _Operators() as operators:
                    self.function(*inputs)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise GraphError(
                f"the function waits for the device ({_place(error)}); nothing was captured. Keep the value on the device, or "
                'leave that part outside the graph; for masks of transformers give attention_mask={"full_attention": None}'
            ) from error
        finally:  # also after a fault: whoever catches it goes on with the memory that these runs still use
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._memory.stream)
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


def first_cause(error: BaseException) -> str:
    """Type and first line of what happened first: the end of a broken capture fails once more and says nothing of the cause."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


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
