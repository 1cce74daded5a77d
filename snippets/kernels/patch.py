"""Put the kernels into a Hugging Face Qwen3 model, and take them out again: the A/B switch.

    with patch(model):
        loss = model(ids, labels=ids).loss      # Triton
    loss = model(ids, labels=ids).loss          # transformers, unchanged

Only this one model object changes: its modules get another class, a subclass of transformers' own
with another ``forward``, and no class or module of transformers is touched. Parameters, buffers and
state_dict stay the same objects; copies, replicas and pickles of a patched model are patched too.
"""

from __future__ import annotations

import functools
import types

import torch

from snippets.kernels.cross_entropy import causal_lm_loss
from snippets.kernels.rms_norm import rms_norm
from snippets.kernels.rope import rope
from snippets.kernels.swiglu import swiglu


# --8<-- [start:replacements]
def _rms_norm_forward(self, hidden_states):
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self, x):
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def _rotary(q, k, cos, sin, unsqueeze_dim=1):
    if unsqueeze_dim != 1:
        raise ValueError(f"rope: unsqueeze_dim is {unsqueeze_dim}; only 1, the layout of Qwen3Attention, is supported")
    return rope(q, k, cos, sin)


def _with_rotary(forward: types.FunctionType) -> types.FunctionType:
    """Qwen3Attention.forward with ``apply_rotary_pos_emb`` bound to our kernel.

    The attention takes that function from its module's globals. Replacing it there would change every
    Qwen3 model of the process, the unpatched reference beside this one included. So the same
    code object runs with a copy of those globals in which one name differs; only the
    attention objects of this model get it, and no other line of the attention is restated here.
    """
    if not isinstance(forward, types.FunctionType) or "apply_rotary_pos_emb" not in forward.__code__.co_names:
        raise ValueError(
            "patch: this transformers version's Qwen3Attention.forward doesn't call apply_rotary_pos_emb; "
            "use transformers 5.17, or patch(model, rope=False)"
        )
    scope = {**forward.__globals__, "apply_rotary_pos_emb": _rotary}
    ours = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


@functools.cache
def _fused(name: str) -> type[torch.nn.Module]:
    """The subclass of transformers' class ``name`` that runs the kernel."""
    from transformers.models.qwen3 import modeling_qwen3

    base = getattr(modeling_qwen3, name)
    forward = {"Qwen3RMSNorm": _rms_norm_forward, "Qwen3MLP": _mlp_forward}.get(name) or _with_rotary(base.forward)
    return type(f"Fused{name}", (base,), {"forward": forward, "__module__": __name__})


def __getattr__(name: str):
    # pickle looks classes up by their name in their module
    if name in ("FusedQwen3RMSNorm", "FusedQwen3MLP", "FusedQwen3Attention"):
        return _fused(name.removeprefix("Fused"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
# --8<-- [end:replacements]


# --8<-- [start:patch]
class Patch:
    """The kernels in one model, switched on by the constructor.

    Args:
        model: a ``Qwen3ForCausalLM`` (not wrapped by DDP, FSDP or torch.compile).
        rms_norm: the norms over the hidden size (two per layer and the final one).
        qk_norm: the per-head q_norm and k_norm of the attention; None follows ``rms_norm``.
        swiglu, rope, cross_entropy: as named; cross_entropy is the loss of ``model(..., labels=...)``.

    ``off()`` restores exactly what was there, ``on()`` sets the kernels again; both may be repeated.
    As a context manager it is on inside the (outermost) block and off afterwards.

    Raises:
        TypeError: another kind of model.
        ValueError: the model is patched already, computes something that the kernels don't, or one of
            its modules has a ``forward`` of its own (a wrapper by another library).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        rms_norm: bool = True,
        qk_norm: bool | None = None,
        swiglu: bool = True,
        rope: bool = True,
        cross_entropy: bool = True,
    ):
        from transformers.models.qwen3 import modeling_qwen3 as hf

        if not isinstance(model, hf.Qwen3ForCausalLM):
            raise TypeError(
                f"patch: expected a Qwen3ForCausalLM, got {type(model).__name__}. Of a wrapped model pass the inner "
                "one (model.module for DDP, model._orig_mod for torch.compile), and patch before wrapping"
            )
        if swiglu and model.config.hidden_act not in ("silu", "swish"):  # two names of one function
            raise ValueError(
                f"patch: the model's activation is {model.config.hidden_act!r}, the kernel computes 'silu'; "
                "pass swiglu=False"
            )
        qk_norm = rms_norm if qk_norm is None else qk_norm
        self.model = model
        self._depth = 0  # of nested with blocks
        self._plan: list[tuple[str, torch.nn.Module, type, type]] = []  # name, module, class before, class after
        for name, module in model.named_modules():
            if isinstance(module, hf.Qwen3RMSNorm):
                wanted = qk_norm if name.endswith(("q_norm", "k_norm")) else rms_norm
            else:
                wanted = (swiglu and isinstance(module, hf.Qwen3MLP)) or (rope and isinstance(module, hf.Qwen3Attention))
            kind = type(module).__name__.removeprefix("Fused")
            if wanted and kind not in ("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"):
                raise ValueError(f"patch: {name} is a {kind}, another library's class; build the model before applying that library")
            if wanted:
                self._plan.append((name, module, type(module), _fused(kind)))
        self._loss = cross_entropy
        self.on()

    @property
    def active(self) -> bool:
        """Whether this patch is on."""
        return self.model.__dict__.get("_kernel_patch") is self

    def on(self) -> Patch:
        """Set the kernels; nothing happens if they are set.

        Raises:
            ValueError: another patch is on, or a module has a ``forward`` of its own.
        """
        if self.active:
            return self
        if "_kernel_patch" in self.model.__dict__:
            raise ValueError("patch: this model has another patch that is on; call its off() first")
        self._refuse_wrappers("it would go on calling the method that it wrapped, not the kernel")
        for _, module, _, fused in self._plan:
            module.__class__ = fused
        if self._loss:  # what the loss_function setter sets; an instance attribute that is absent or a caller's own
            self._loss_before = self.model.__dict__.get("_loss_function")
            self.model.__dict__["_loss_function"] = causal_lm_loss
        self.model.__dict__["_kernel_patch"] = self
        return self

    def off(self) -> None:
        """Restore the model; nothing happens if this patch is off.

        Raises:
            ValueError: a module got a ``forward`` of its own meanwhile; it keeps hold of the kernel.
        """
        if not self.active:
            return
        self._refuse_wrappers("it was set after the kernels and goes on calling them")
        for _, module, before, _ in self._plan:
            module.__class__ = before
        if self._loss:
            if self._loss_before is None:
                del self.model.__dict__["_loss_function"]
            else:
                self.model.__dict__["_loss_function"] = self._loss_before
        del self.model.__dict__["_kernel_patch"]

    def _refuse_wrappers(self, why: str) -> None:
        for name, module, _, _ in self._plan:
            if "forward" in module.__dict__:
                raise ValueError(
                    f"patch: {name} has a forward of its own (accelerate's hooks and Liger's instance patch set one); "
                    f"{why}. Remove it first, or leave this kind of operator out"
                )

    def __enter__(self) -> Patch:
        self._depth += 1
        return self.on()

    def __exit__(self, *_exception) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.off()


def patch(model: torch.nn.Module, **which: bool) -> Patch:
    """Put the kernels into ``model`` with one call; the arguments and the returned switch are ``Patch``'s."""
    return Patch(model, **which)
# --8<-- [end:patch]
