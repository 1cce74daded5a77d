"""Tensors of one layer wait for the backward in pinned host memory, copied while the GPU computes other layers.

transformers' ``offload=True`` copies on the stream that computes, which waits. Here the copies run on a stream of their own
and the copy engines do them: out as soon as a tensor is made, back one layer before the backward needs it. So a
layer's copies cost no time as long as they take less than a layer's forward; ``costs`` measures both.

    forward of layer i       its tensors start to leave; those of layer i − 1, which have left by now, are freed
    the last layer           its tensors never leave: the backward needs them at once
    backward of layer i      the first one asked for starts the copies of layer i − 1

What is on the device besides: in the forward the tensors of one layer and the first of the next, in the backward those of
two. Only layers that offload count: if they are every second one, "the last" and "i − 1" are among those, and in one layer
alone nothing ever leaves.

Pinned memory is used again without a wait, since the copies of one device follow each other on one stream; torch's own pinned
allocator waits for their end, and a host that runs ahead of the device then takes twice as much. It comes in powers of two
and stays until the last policy that offloads is taken off, so lengths that vary hold some of each power that they need.

Copies beside the computation are also in Megatron-Core (inputs of named submodules, user guide 0.19), TransformerEngine
(cpu_offloading) and TRL (every saved tensor above a size). Here each tensor is named, and a planner weighs it against recompute.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

_side: dict[torch.device, torch.cuda.Stream] = {}
_thread = threading.local()  # .latest: device → weak reference to the last Shipment that this thread's forwards made
users: weakref.WeakSet[object] = weakref.WeakSet()  # the policies that offload; without one, no pinned memory stays
_idle: dict[tuple[torch.device, int], list[Tensor]] = {}  # pinned memory between two uses, by the device it serves and bytes


def pinned_bytes(nbytes: int) -> int:
    """What a tensor takes of the host: the next power of two, as in torch's pinned allocator, so that lengths may vary."""
    return 1 << max(0, nbytes - 1).bit_length()


def release(user: object) -> None:
    """``user`` offloads no longer; after the last one pinned memory that holds no tensor goes back to torch's allocator."""
    users.discard(user)
    if not users:
        _idle.clear()


def _pinned(tensor: Tensor) -> Tensor:
    """Host memory for a tensor that fills its storage, as bytes."""
    nbytes = pinned_bytes(tensor.untyped_storage().nbytes())
    try:
        return _idle[tensor.device, nbytes].pop()
    except (KeyError, IndexError):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)


# --8<-- [start:parcel]
class Parcel:
    """One tensor on its way to the host or back; ``tensor`` is the one on the device, while there is one.

    On a CPU the copies are plain ones, so that everything else can be tested there.
    """

    __slots__ = ("memory", "host", "tensor", "device", "version", "changed", "taken", "arrived", "stream", "__weakref__")

    def __init__(self, tensor: Tensor):
        self.tensor, self.device, self.version = tensor.detach(), tensor.device, tensor._version
        self.changed = self.taken = False
        cuda = tensor.is_cuda
        self.stream = torch.cuda.current_stream(tensor.device) if cuda else None
        self.arrived = torch.cuda.Event() if cuda else None
        self.memory = _pinned(tensor)
        self.host = self.memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        self._copy(self.host, self.tensor)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self.stream is None:
            to.copy_(source)
            return
        side = _side.get(self.device) or _side.setdefault(self.device, torch.cuda.Stream(self.device))
        side.wait_stream(self.stream)  # what made the tensor, and who had the new tensor's memory before
        with torch.cuda.stream(side):
            to.copy_(source, non_blocking=True)
        self.arrived.record(side)

    def leave(self) -> None:
        """Free the tensor on the device, once it has been copied."""
        if self.tensor is not None:
            self.changed = self.tensor._version != self.version
            self._settle()
            self.tensor = None

    def fetch(self) -> None:
        """Start the copy back, unless the tensor is on the device."""
        if self.tensor is None:
            tensor = torch.empty_strided(self.host.size(), self.host.stride(), dtype=self.host.dtype, device=self.device)
            self.stream = torch.cuda.current_stream(self.device) if self.stream is not None else None
            self._copy(tensor, self.host)
            self.tensor, self.version = tensor, tensor._version  # last: a copy that failed leaves nothing that looks fetched

    def take(self, name: str) -> Tensor:
        """The tensor, for the current stream to use; afterwards only the host has it.

        Raises:
            RuntimeError: it was written to while it was copied.
        """
        if self.changed or self.tensor._version != self.version:
            raise RuntimeError(f"offload: {name} was written to in place after it was saved; clone it before, or don't offload it")
        self._settle()
        if self.stream is not None and (now := torch.cuda.current_stream(self.device)) != self.stream:
            # The backward runs on another stream than what fetched: it waits for the copy, and the memory for it.
            now.wait_event(self.arrived)
            self.tensor.record_stream(now)
        tensor, self.tensor, self.taken = self.tensor, None, True
        return tensor

    def _settle(self) -> None:
        # The stream that reuses the memory must not do so before the copy's end.
        if self.stream is not None:
            self.stream.wait_event(self.arrived)

    def __del__(self):
        if getattr(self, "tensor", None) is not None:  # a graph that was dropped before its backward
            self._settle()
        if users and hasattr(self, "memory"):
            _idle.setdefault((self.device, self.memory.numel()), []).append(self.memory)


class Shipment:
    """What one forward of one layer sends to the host.

    Raises:
        RuntimeError: under the capture of a CUDA graph, in which no pinned memory can be allocated.
    """

    __slots__ = ("device", "parcels", "_previous", "__weakref__")

    def __init__(self, device: torch.device):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("offload: no pinned memory can be allocated inside the capture of a CUDA graph; use Keep without offload there")
        self.device = device
        self.parcels: list[weakref.ref[Parcel]] = []
        latest = _thread.__dict__.setdefault("latest", {})
        self._previous = latest.get(device, lambda: None)
        latest[device] = weakref.ref(self)
        for parcel in self._of_previous():
            parcel.leave()

    def _of_previous(self) -> list[Parcel]:
        previous = self._previous()
        return previous.alive() if previous is not None else []

    def alive(self) -> list[Parcel]:
        """The parcels that somebody may still ask for."""
        return [p for r in self.parcels if (p := r()) is not None]

    def fetch(self) -> None:
        """Start what this layer and the one before it need and what is not on its way yet."""
        for parcel in (*self.alive(), *self._of_previous()):
            if not parcel.taken:
                parcel.fetch()

# --8<-- [end:parcel]


class Sent:
    """A recipe, in the sense of ``on_demand``: make the tensor again by copying it back."""

    __slots__ = ("parcel", "shipment")

    def __init__(self, tensor: Tensor, shipment: Shipment):
        self.shipment, self.parcel = shipment, Parcel(tensor)
        shipment.parcels.append(weakref.ref(self.parcel))

    def make(self, wanted) -> Tensor:
        """Fetch for ``wanted``, an ``on_demand.Node``; it keeps the tensor while a note waits for it."""
        self.shipment.fetch()
        self.parcel.fetch()  # nothing, except for a second backward
        tensor = self.parcel.take(wanted.name)
        if wanted.waiting > 0:
            wanted.value = tensor
        return tensor
