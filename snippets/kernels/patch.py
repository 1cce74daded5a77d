"""Put the kernels into a Hugging Face Qwen3 model, and take them out again: the A/B switch.

    with patch(model):
        loss = model(ids, labels=ids).loss      # Triton
    loss = model(ids, labels=ids).loss          # transformers, unchanged

Only this one model object changes: what is set are attributes of its modules, never of classes or
of transformers' own modules. Parameters, buffers and state_dict stay the same objects.
"""

from __future__ import annotations

import types
from typing import Any

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
    As a context manager it is on inside the block and off afterwards.

    Raises:
        TypeError: another kind of model.
        ValueError: the model is patched already, or computes something that the kernels don't.
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
        if swiglu and model.config.hidden_act != "silu":
            raise ValueError(
                f"patch: the model's activation is {model.config.hidden_act!r}, the kernel computes 'silu'; "
                "pass swiglu=False"
            )
        qk_norm = rms_norm if qk_norm is None else qk_norm
        self.model = model
        self._saved: list[tuple[Any, str, Any]] = []
        self._plan: list[tuple[Any, str, Any]] = []  # (object, attribute, replacement)
        for name, module in model.named_modules():
            if isinstance(module, hf.Qwen3RMSNorm):
                if qk_norm if name.endswith(("q_norm", "k_norm")) else rms_norm:
                    self._plan.append((module, "forward", types.MethodType(_rms_norm_forward, module)))
            elif isinstance(module, hf.Qwen3MLP) and swiglu:
                self._plan.append((module, "forward", types.MethodType(_mlp_forward, module)))
            elif isinstance(module, hf.Qwen3Attention) and rope:
                self._plan.append((module, "forward", types.MethodType(_with_rotary(type(module).forward), module)))
        if cross_entropy:
            self._plan.append((model, "_loss_function", causal_lm_loss))  # what the loss_function setter sets
        self.on()

    @property
    def active(self) -> bool:
        """Whether this patch is on."""
        return self.model.__dict__.get("_kernel_patch") is self

    def on(self) -> Patch:
        """Set the kernels; nothing happens if they are set."""
        if self.active:
            return self
        if "_kernel_patch" in self.model.__dict__:
            raise ValueError("patch: this model has another patch that is on; call its off() first")
        # Instance attributes shadow the class's method. What an instance had before (hooks of other
        # libraries sit there too) is kept for off(); _ABSENT says that it had nothing.
        self._saved = [(obj, attribute, obj.__dict__.get(attribute, _ABSENT)) for obj, attribute, _ in self._plan]
        for obj, attribute, value in self._plan:
            obj.__dict__[attribute] = value
        self.model.__dict__["_kernel_patch"] = self
        return self

    def off(self) -> None:
        """Restore the model; nothing happens if this patch is off."""
        if not self.active:
            return
        for obj, attribute, value in self._saved:
            if value is _ABSENT:
                del obj.__dict__[attribute]
            else:
                obj.__dict__[attribute] = value
        del self.model.__dict__["_kernel_patch"]

    def __enter__(self) -> Patch:
        return self.on()

    def __exit__(self, *_exception) -> None:
        self.off()


_ABSENT = object()


def patch(model: torch.nn.Module, **which: bool) -> Patch:
    """Put the kernels into ``model`` with one call; the arguments and the returned switch are ``Patch``'s."""
    return Patch(model, **which)
# --8<-- [end:patch]
