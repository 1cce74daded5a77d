"""Recompute on demand: single tensors of a decoder layer are dropped after the forward and made again.

``torch.utils.checkpoint`` runs a whole region a second time; its selective form watches every operator
through a dispatch mode, in the forward and again in the recompute, and the host pays for both. Here
autograd itself says what it needs. A pack hook (torch.autograd.graph.saved_tensors_hooks) sees each
tensor that some operator saves. If the tensor is one that the policy drops, the graph gets a note
instead: which tensor, which view of it. When the backward opens the note, the tensor is made by
the same kernel from its stored inputs, or from inputs that are made first, in turn. So

* nothing runs that the backward does not ask for: neither ``down_proj`` nor the residual addition after it,
* no random-number state, no second autograd graph and no dispatch mode are involved,
* what is recomputed has the bits of the forward, provided that the kernels are deterministic.

What a layer with this project's kernels saves, and from what each tensor is made (the attention's own
output and log-sum-exp are always stored, for they are the expensive ones):

    ln1   from the layer's input       rope (two tensors)  from q and k, by q_norm, k_norm and rope
    q, k, v  from ln1                  h2    from the layer's input and the attention's output
    ln2   from h2                      gate, up  from ln2             product  from gate and up

The identity of a tensor is its storage; a weak reference to it costs no memory and is never reused
while it is held. Torch's version counters tell whether it was written to since: within the forward it then counts as
another tensor, which is stored; between forward and backward, like a changed weight, it is an error.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from snippets.checkpointing import offload as offloading
from snippets.checkpointing.offload import Sent, Shipment
from snippets.checkpointing.switching import PolicyError, covered_by, switch_class

# What a policy may keep or drop, in the order of the forward.
TENSORS = ("ln1", "q", "k", "v", "rope", "h2", "ln2", "gate", "up", "product")


class Node:
    """One tensor of one layer's forward, either stored (``value``) or with a recipe.

    ``waiting`` counts the notes in the autograd graph that name it; while it is not 0 a value that
    was made again is kept for the next one.
    """

    __slots__ = ("name", "value", "recipe", "shape", "stride", "offset", "version", "waiting", "__weakref__")

    def __init__(self, name: str, made: Tensor, recipe: Recipe | Sent | None):
        self.name, self.recipe = name, recipe
        self.value = made.detach() if recipe is None else None
        self.shape, self.stride, self.offset = made.shape, made.stride(), made.storage_offset()
        self.version, self.waiting = made._version, 0

    def get(self) -> Tensor:
        """The stored tensor, or the one made again.

        Raises:
            RuntimeError: the recipe gave another shape or layout than the forward, or what is stored was written to.
        """
        if self.recipe is not None:
            return self.recipe.make(self) if self.value is None else self.value
        if self.value._version != self.version:
            raise RuntimeError(f"on_demand: {self.name} was written to in place between the forward and the backward; clone it before")
        return self.value


class Recipe:
    """How some tensors of the forward are made: a function and its arguments, as they were then."""

    __slots__ = ("function", "arguments", "outputs", "made", "versions")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], made: Callable[[], None]):
        self.function, self.arguments, self.made = function, arguments, made
        self.outputs: list[weakref.ref[Node]] = []  # weak: each of them holds this recipe
        module = getattr(function, "__self__", None)  # a module's forward reads its weights again
        own = module._parameters.values() if isinstance(module, torch.nn.Module) else ()
        self.versions = [(t, t._version) for t in (*own, *(a for a in arguments if isinstance(a, Tensor))) if t is not None]

    def make(self, wanted: Node) -> Tensor:
        """Run the function; its other outputs stay too where a note waits for them."""
        if any(t._version != version for t, version in self.versions):
            raise RuntimeError(
                f"on_demand: a weight or an input of {wanted.name} was changed between the forward and the backward "
                "(optimizer.step()?), so it cannot be made again"
            )
        with torch.no_grad():
            out = self.function(*(a.open() if isinstance(a, View) else a for a in self.arguments))
        self.made()
        result = wanted
        for reference, tensor in zip(self.outputs, out if isinstance(out, tuple) else (out,), strict=True):
            node = reference()
            if node is None:
                continue
            if (tensor.shape, tensor.stride()) != (node.shape, node.stride):
                raise RuntimeError(
                    f"on_demand: {node.name} was {tuple(node.shape)} with strides {node.stride} in the forward, the "
                    f"recompute gave {tuple(tensor.shape)} with {tensor.stride()}; keep it, or make its kernel's layout fixed"
                )
            if node.waiting > 0:
                node.value = tensor
            if node is wanted:
                result = tensor
        return result


class View:
    """A note: this view of that node's storage. It stands in the autograd graph in place of the tensor."""

    __slots__ = ("node", "size", "stride", "offset")

    def __init__(self, node: Node, of: Tensor):
        self.node, self.size, self.stride, self.offset = node, of.size(), of.stride(), of.storage_offset() - node.offset

    def open(self) -> Tensor:
        """The tensor itself."""
        whole = self.node.get()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


# --8<-- [start:frame]
class Frame:
    """One forward of one layer: its nodes by storage. It is dropped at the layer's end; the notes hold what they need."""

    def __init__(self, keep: frozenset[str], offload: frozenset[str], count: dict[str, int]):
        self.keep, self.offload, self.count = keep, offload, count
        self.shipment: Shipment | None = None  # what goes to the host
        self.nodes: dict[StorageWeakRef, Node] = {}
        self.entered: Tensor | None = None  # the two sides of the residual addition, until it is seen
        self.attended: Tensor | None = None

    def store(self, name: str, tensor: Tensor) -> None:
        """A tensor that exists anyway and that recipes may start from."""
        self.nodes[StorageWeakRef(tensor.untyped_storage())] = Node(name, tensor, None)

    def record(self, name: str, made: Sequence[Tensor], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Note that ``function(*arguments)`` made these tensors."""
        if name in self.keep:
            for tensor in made:
                self.store(name, tensor)
            return
        # A bound method of the frame would hold all its nodes; the dictionary holds none.
        recipe = Recipe(function, [self._argument(a) for a in arguments], functools.partial(_increment, self.count, name))
        away = name in self.offload and any(t.requires_grad for t in made)  # a frozen layer's are never asked for
        for tensor in made:
            storage = tensor.untyped_storage()
            if tensor.storage_offset() or storage.nbytes() != tensor.numel() * tensor.element_size():
                raise RuntimeError(f"on_demand: {name} is part of a larger buffer and cannot be dropped by itself; keep it")
            if away:
                self.shipment = self.shipment or Shipment(tensor.device)
            node = Node(name, tensor, Sent(tensor, self.shipment) if away else recipe)
            recipe.outputs.append(weakref.ref(node))
            self.nodes[StorageWeakRef(storage)] = node

    def _argument(self, a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        node = self._find(a)
        return a.detach() if node is None else View(node, a)

    def _find(self, tensor: Tensor) -> Node | None:
        node = self.nodes.get(StorageWeakRef(tensor.untyped_storage()))
        return node if node is not None and node.version == tensor._version else None

    def pack(self, tensor: Tensor) -> Tensor | View:
        """What the autograd graph stores in place of ``tensor``."""
        node = self._find(tensor)
        if node is None or node.recipe is None:
            # An operator's own output would hold the operator, which holds it: a cycle that no collector sees, so a
            # graph that is dropped without a backward would stay for good.
            return tensor if tensor.is_leaf else tensor.detach()
        node.waiting += 1
        return View(node, tensor)


def unpack(packed: Tensor | View) -> Tensor:
    """What the backward gets for it."""
    if not isinstance(packed, View):
        return packed
    tensor, node = packed.open(), packed.node
    node.waiting -= 1
    if node.waiting <= 0:  # with retain_graph=True it may be asked for again: then it is made again
        node.value = None
    return tensor
# --8<-- [end:frame]


def _increment(count: dict[str, int], name: str) -> None:
    count[name] = count.get(name, 0) + 1


class LayerHooks:
    """Recompute on demand in one ``Qwen3DecoderLayer`` whose modules run this project's kernels.

    Args:
        layer: the decoder layer.
        keep: which of ``TENSORS`` are stored on the device.
        offload: which of them wait in pinned host memory (see ``offload``). The others are dropped.

    ``recomputed`` counts, by name, how often something was made again.

    Raises:
        PolicyError: an unknown name, a layer without the kernels (its operators save tensors of their
            own that nobody outside can make again), or one that another checkpoint covers already.
    """

    def __init__(self, layer: torch.nn.Module, keep: Iterable[str], offload: Iterable[str] = ()):
        if isinstance(keep, str) or isinstance(offload, str):
            raise PolicyError("on_demand: give the names of tensors as a tuple, not as one string")
        keep, offload = frozenset(keep), frozenset(offload)
        if unknown := sorted((keep | offload) - set(TENSORS)):
            raise PolicyError(f"on_demand: unknown tensors {', '.join(unknown)}; known: {', '.join(TENSORS)}")
        if both := sorted(keep & offload):
            raise PolicyError(f"on_demand: {', '.join(both)} cannot be both kept and offloaded; name it once")
        attention, mlp = layer.self_attn, layer.mlp
        if by := covered_by((layer, attention, mlp)):
            raise PolicyError(f"on_demand: this layer is under {by} already; call its off() first")
        parts = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm, attention, mlp)
        if plain := [type(p).__name__ for p in parts if not type(p).__name__.startswith("Fused")]:
            raise PolicyError(
                f"on_demand: {plain[0]} is not one of this project's kernels; call snippets.kernels.patch(model) first"
            )
        if getattr(layer, "gradient_checkpointing", False):
            raise PolicyError("on_demand: this layer is checkpointed as a block; call model.gradient_checkpointing_disable()")
        self.layer, self.keep, self.offload = layer, keep, offload
        self.recomputed: dict[str, int] = {}
        self._frames: list[Frame] = []  # more than one only if a layer's forward calls the layer
        self._undo: list[Callable[[], None]] = []
        if offload:
            offloading.users.add(self)
        try:
            self._switch(layer, attention, mlp)
        except BaseException:
            self.off()
            raise

    def off(self) -> None:
        """Restore the layer.

        Raises:
            PolicyError: one of its modules was switched to something else since; then call again after that one's off().
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        offloading.release(self)

    def _switch(self, layer: torch.nn.Module, attention: torch.nn.Module, mlp: torch.nn.Module) -> None:
        # prepend: other hooks may replace what they see, so these come first on an output and on what enters a norm. What
        # a hook puts in a tensor's place is no node, and is stored.
        handles = [
            layer.input_layernorm.register_forward_pre_hook(self._before_ln1, prepend=True),
            layer.post_attention_layernorm.register_forward_pre_hook(self._before_ln2, prepend=True),
        ]
        made = {"ln1": layer.input_layernorm, "q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj,
                "qn": attention.q_norm, "kn": attention.k_norm, "o": attention.o_proj,
                "ln2": layer.post_attention_layernorm, "gate": mlp.gate_proj, "up": mlp.up_proj}  # fmt: skip
        handles += [m.register_forward_hook(functools.partial(self._after, name), prepend=True) for name, m in made.items()]
        self._undo += [h.remove for h in handles]
        for module, called, name in ((attention, "apply_rotary_pos_emb", "rope"), (mlp, "swiglu", "product")):
            self._undo.append(self._announcing(module, called, name))

        def call(module, *arguments, **keywords):
            with self._frame(module, arguments, keywords):
                return super(ours, module).__call__(*arguments, **keywords)

        # No hooks for this: torch skips even always_call=True hooks on KeyboardInterrupt, and pack would stay on.
        ours, undo = switch_class(layer, "Keep", {"__call__": call})
        self._undo.append(undo)

    def _announcing(self, module: torch.nn.Module, called: str, name: str) -> Callable[[], None]:
        """Wrap one function that the module's forward calls, rotary or swiglu: these two are no modules.

        As in ``kernels.patch``: the same code object with a copy of its globals in which one name differs. The call notes
        what it returns after all hooks, for the residual addition.
        """
        forward = type(module).forward
        function = forward.__globals__[called]
        frames = self._frames

        def announced(*arguments):
            out = function(*arguments)
            if frames:
                frames[-1].record(name, out if isinstance(out, tuple) else (out,), function, arguments)
            return out

        def call(self, *arguments, **keywords):
            out = super(ours, self).__call__(*arguments, **keywords)
            if frames and isinstance(out, tuple):
                frames[-1].attended = out[0]
            return out

        scope = {**forward.__globals__, called: announced}
        method = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
        method.__kwdefaults__ = forward.__kwdefaults__
        ours, undo = switch_class(module, "Keep", {"forward": method, "__call__": call})
        return undo

    @contextlib.contextmanager
    def _frame(self, layer: torch.nn.Module, arguments: Sequence[Any], keywords: dict[str, Any]) -> Iterator[None]:
        if not (layer.training and torch.is_grad_enabled()):
            yield
            return
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        if torch.is_autocast_enabled(hidden.device.type):
            raise RuntimeError("on_demand: autocast is off again when the backward recomputes; train in pure bf16 or fp32")
        frame = Frame(self.keep, self.offload, self.recomputed)
        self._frames.append(frame)
        try:
            with torch.autograd.graph.saved_tensors_hooks(frame.pack, unpack):
                yield
        finally:
            self._frames.pop()

    # ---------------------------------------------------------------- hooks, in the order of a forward

    def _after(self, name, module, args, out):
        if self._frames:
            self._frames[-1].record(name, (out,), module.forward, args)

    def _before_ln1(self, _module, args):
        if self._frames:  # the layer's input, which is also its first residual
            self._frames[-1].entered = args[0]
            self._frames[-1].store("h", args[0])

    def _before_ln2(self, _module, args):
        if self._frames:  # the layer's own addition, seen where its result goes
            frame = self._frames[-1]
            frame.record("h2", args[:1], torch.add, (frame.entered, frame.attended))
            frame.entered = frame.attended = None
