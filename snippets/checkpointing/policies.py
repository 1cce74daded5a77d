"""What to store and what to compute again: every granularity as a policy object of one interface.

    with Block(every=2).apply(model):          # every second decoder layer as a whole
        loss = model(ids, labels=ids).loss
        loss.backward()

``apply`` returns an ``Applied``, whose ``off()`` restores the model exactly; it is a context manager too.
Nothing of transformers is patched: whole blocks use the two attributes that
``gradient_checkpointing_enable`` sets on each layer (transformers 5.17, modeling_layers.py), parts of
a layer get a subclass of their own class, single tensors are dropped by autograd's pack hooks.

Every region is non-reentrant, stops as soon as the backward has what it needs (early stop), and keeps no
random-number state unless asked, because Qwen3 has no dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as torch_checkpoint

from snippets.checkpointing.on_demand import TENSORS, LayerHooks
from snippets.checkpointing.switching import PolicyError, covered_by, switch_class


class Applied:
    """A policy in one model. ``off()`` may be called more than once, also after it has raised."""

    def __init__(self, undo: Sequence[Callable[[], None]]):
        self._undo = list(undo)

    def off(self) -> None:
        """Restore the model.

        Raises:
            PolicyError: something was put on top since; take that out and call again. Nothing is lost by the failed call.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_exception) -> None:
        self.off()


class Policy(Protocol):
    """One way of choosing what a decoder layer stores."""

    @property
    def name(self) -> str:
        """Short name for tables."""

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """Put the policy into one decoder layer; returns what takes it out again."""


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a Qwen3 model, none of them covered by another checkpoint.

    Raises:
        PolicyError: not such a model, or checkpointed already.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise PolicyError(f"{type(model).__name__} has no model.layers; pass the Qwen3ForCausalLM itself, not a wrapper")
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        raise PolicyError("the model is checkpointed already; call gradient_checkpointing_disable() or off() first")
    return list(layers)


def apply(model: torch.nn.Module, policies: Policy | Sequence[Policy]) -> Applied:
    """Put a policy into every decoder layer, or one policy each.

    Args:
        model: a ``Qwen3ForCausalLM``.
        policies: one for all layers, or as many as there are layers.

    Raises:
        PolicyError: the number doesn't fit, or a policy refuses the model; then nothing is applied.
    """
    layers = layers_of(model)
    each = list(policies) if isinstance(policies, Sequence) else [policies] * len(layers)
    if len(each) != len(layers):
        raise PolicyError(f"{len(each)} policies for {len(layers)} decoder layers; give one for all or one for each")
    applied = Applied([])
    try:
        for layer, policy in zip(layers, each, strict=True):
            applied._undo.append(policy.attach(layer))
    except BaseException:
        applied.off()
        raise
    return applied


def every(k: int, policy: Policy, count: int) -> list[Policy]:
    """``policy`` in every k-th of ``count`` layers, from the first on, as transformers' every_n_layers does."""
    if k < 1:
        raise PolicyError(f"every {k}: give 1 (every layer) or more")
    return [policy if i % k == 0 else Nothing() for i in range(count)]


# --------------------------------------------------------------------------- granularities


# --8<-- [start:block]
@dataclass(frozen=True)
class Nothing:
    """Store everything."""

    name: str = "none"

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """Leave the layer as it is."""
        return lambda: None


@dataclass(frozen=True)
class Block:
    """Store a layer's input and run the whole layer again, up to the last tensor that its backward needs."""

    preserve_rng_state: bool = False
    early_stop: bool = True
    name: str = "block"

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """Switch on transformers' own mechanism in this layer alone."""
        return _switch_on(layer, self._checkpoint)

    def _checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return torch_checkpoint.checkpoint(
            function, *arguments, use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state, early_stop=self.early_stop,
        )  # fmt: skip


def _switch_on(layer: torch.nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    if by := covered_by((layer, layer.self_attn, layer.mlp)):
        raise PolicyError(f"this layer is under {by} already; call its off() first")
    before = {k: layer.__dict__[k] for k in ("gradient_checkpointing", "_gradient_checkpointing_func") if k in layer.__dict__}
    layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, function

    def undo() -> None:
        for key in ("gradient_checkpointing", "_gradient_checkpointing_func"):
            layer.__dict__.pop(key, None)
        layer.__dict__.update(before)

    return undo
# --8<-- [end:block]


# --8<-- [start:sub_block]
@dataclass(frozen=True)
class SubBlock:
    """Run one half of a layer again: ``"attention"`` (self_attn) or ``"mlp"``; its input is stored by its norm.

    The norm before it stays outside, so that half's input, the norm's output, is what the region stores.
    """

    part: str
    preserve_rng_state: bool = False

    def __post_init__(self):
        if self.part not in ("attention", "mlp"):
            raise PolicyError(f"SubBlock({self.part!r}): give 'attention' or 'mlp'")

    @property
    def name(self) -> str:
        """Short name for tables."""
        return self.part

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """Give the half a subclass whose call goes through ``checkpoint``."""
        module = layer.self_attn if self.part == "attention" else layer.mlp
        if by := covered_by((layer, module)):
            raise PolicyError(f"SubBlock: this layer is under {by} already; call its off() first")
        preserve = self.preserve_rng_state

        def call(self, *arguments, **keywords):
            run = functools.partial(super(ours, self).__call__, **keywords)
            if not self.training:
                return run(*arguments)
            return torch_checkpoint.checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=preserve)

        ours, undo = switch_class(module, f"SubBlock({self.part!r})", {"__call__": call})
        return undo
# --8<-- [end:sub_block]


# --8<-- [start:selective]
ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
MATMUL = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm"))


_TWICE = (
    "{op} runs here and no rule saves it, so the attention would be computed twice. Save it, or write recompute_attention=True"
)


@dataclass(frozen=True)
class Selective:
    """torch's selective activation checkpointing over whole layers: store the outputs of chosen operators.

    Args:
        save: ``OpOverload``s whose outputs are stored, such as ``ATTENTION + MATMUL``.
        skip: of the matmuls among them, which are recomputed all the same: their place in the order of a
            layer's calls (q, k, v, o, gate, up, down are 0 to 6).
        recompute_attention: say so if the attention is meant to run twice.
        early_stop: False runs each layer to its end, down_proj included, as torchtitan does.

    The policy is called in the forward only (torch 2.13) or in forward and recompute (2.11, 2.12);
    the calls are counted per phase, so that both give the same choice.

    Raises:
        PolicyError: an operator packet instead of an overload (it never matches, so everything would be
            recomputed without a word), or nothing to save.
    """

    save: tuple[Any, ...]
    skip: tuple[int, ...] = ()
    recompute_attention: bool = False
    early_stop: bool = True
    name: str = "selective"

    def __post_init__(self):
        for op in self.save:
            if isinstance(op, torch._ops.OpOverloadPacket):
                raise PolicyError(f"{op} is a packet of overloads and never matches; write {op}.{op.overloads()[0]}")
            if not isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
                raise PolicyError(f"{op!r} is no operator; write for example torch.ops.aten.mm.default")
        if not self.save:
            raise PolicyError("Selective with nothing to save recomputes everything; use Block()")

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """Switch on transformers' own mechanism in this layer, with a context for selection."""
        return _switch_on(layer, self._checkpoint)

    def _checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return torch_checkpoint.checkpoint(
            function, *arguments, use_reentrant=False, preserve_rng_state=False, early_stop=self.early_stop,
            context_fn=functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, self._chooser()),
        )  # fmt: skip

    def _chooser(self) -> Callable[..., Any]:
        save, matmuls = frozenset(self.save), {False: -1, True: -1}
        must_save, must_recompute = (
            torch_checkpoint.CheckpointPolicy.MUST_SAVE, torch_checkpoint.CheckpointPolicy.MUST_RECOMPUTE,
        )  # fmt: skip

        def choose(context, op, *_arguments, **_keywords):
            if op in MATMUL:
                matmuls[context.is_recompute] += 1
                if matmuls[context.is_recompute] in self.skip:
                    return must_recompute
            if op in save:
                return must_save
            if not self.recompute_attention and is_attention(op):
                raise PolicyError(_TWICE.format(op=op))
            return must_recompute

        return choose


@dataclass(frozen=True)
class ByRule:
    """A selection rule of your own over whole layers, with what goes wrong silently made an error.

    Args:
        rule: ``rule(context, op, *args, **kwargs) -> CheckpointPolicy``, as torch's
            ``create_selective_checkpoint_contexts`` takes it. It is called in the forward, and in torch 2.11 and
            2.12 again in the recompute; a rule that counts must count per ``context.is_recompute``.

    While it runs, PolicyError is raised where the rule offloads to the CPU (outside torch.compile those
    policies recompute, without a word) and where it recomputes an attention.
    """

    rule: Callable[..., torch_checkpoint.CheckpointPolicy]
    recompute_attention: bool = False
    name: str = "rule"

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """As ``Selective``."""
        return _switch_on(layer, self._checkpoint)

    def _checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return torch_checkpoint.checkpoint(
            function, *arguments, use_reentrant=False, preserve_rng_state=False,
            context_fn=functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, self._checked),
        )  # fmt: skip

    def _checked(self, context: Any, op: Any, *arguments: Any, **keywords: Any) -> torch_checkpoint.CheckpointPolicy:
        policy = self.rule(context, op, *arguments, **keywords)
        if "OFFLOAD" in policy.name:
            raise PolicyError(f"the rule says {policy.name} for {op}; outside torch.compile that recomputes. Use save_on_cpu")
        if "RECOMPUTE" in policy.name and is_attention(op) and not self.recompute_attention:
            raise PolicyError(_TWICE.format(op=op))
        return policy


def is_attention(op: Any) -> bool:
    """Whether an operator is an attention forward, from any package, by its name."""
    name = str(op).lower()
    return ("attention" in name or "flash_attn" in name) and not ("backward" in name or "bwd" in name)
# --8<-- [end:selective]


# --8<-- [start:keep]
@dataclass(frozen=True)
class Keep:
    """Store these tensors of a layer and make the others again on demand; needs this project's kernels.

    Args:
        tensors: some of ``on_demand.TENSORS``. The attention's output is always stored.
        offload: others of them, which wait in pinned host memory and are copied beside the computation (see ``offload``).
    """

    tensors: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __init__(self, tensors: Iterable[str] = (), offload: Iterable[str] = ()):
        if isinstance(tensors, str) or isinstance(offload, str):
            raise PolicyError('Keep: give the names of tensors as a tuple, ("gate",), not as one string')
        for field, given in (("tensors", set(tensors)), ("offload", set(offload))):
            if unknown := sorted(given - set(TENSORS)):
                raise PolicyError(f"Keep: unknown tensors {', '.join(t or '(no name)' for t in unknown)}; known: {', '.join(TENSORS)}")
            object.__setattr__(self, field, tuple(t for t in TENSORS if t in given))
        if both := set(self.tensors) & set(self.offload):
            raise PolicyError(f"Keep: {', '.join(sorted(both))} cannot be both kept and offloaded; name it once")

    @property
    def name(self) -> str:
        """Short name for tables."""
        kept = "keep " + ("+".join(self.tensors) or "attention only")
        return f"{kept} offload {'+'.join(self.offload)}" if self.offload else kept

    def attach(self, layer: torch.nn.Module) -> Callable[[], None]:
        """Hook the layer; see ``on_demand``."""
        return LayerHooks(layer, self.tensors, self.offload).off
# --8<-- [end:keep]


# ------------------------------------------------------------------------------- inspection


def audit(model: torch.nn.Module) -> None:
    """Refuse a model whose checkpointing is not what its caller asked for.

    transformers replaces its default ``{"use_reentrant": False}`` by whatever dictionary is given, so
    ``gradient_checkpointing_enable({"preserve_rng_state": False})`` silently runs the reentrant
    variant: no early stop, no selection, a full recompute.

    Raises:
        PolicyError: a layer falls back to the reentrant checkpoint; the message says what to pass.
    """
    for name, module in model.named_modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if not getattr(module, "gradient_checkpointing", False) or not isinstance(function, functools.partial):
            continue
        if function.keywords.get("use_reentrant") is not False:
            raise PolicyError(
                f"{name} uses the reentrant checkpoint: its keyword arguments are {function.keywords}. Add "
                '"use_reentrant": False to gradient_checkpointing_kwargs'
            )
