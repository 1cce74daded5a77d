"""Kernels that selective checkpointing can see: the forwards as operators of torch.

torch's selective activation checkpointing decides operator by operator. A Triton launch inside an
``autograd.Function`` is none: all that is seen of it is the ``aten.empty`` of its result, and the kernel runs
again whatever the policy says. Registered with ``torch.library.custom_op`` (soulitzer's advice in pytorch issue
153334) the same kernel is one operator, which a policy stores or recomputes by name:

    patch(model), visible(model)
    policies.apply(model, Selective(ATTENTION + MATMUL + SWIGLU))      # SWIGLU stored, the other kernels run again

Only the forwards: a backward is never recomputed. It launches as before, so the operators are for eager
PyTorch; torch.compile traces their forwards and stops with an error at their backwards.

    python -m snippets.checkpointing.visible            # a CUDA GPU: Qwen3-8B layers in bf16
    python -m snippets.checkpointing.visible --smoke    # CPU: a tiny model in fp32, Triton interpreted
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.determinism import algorithms
from snippets.checkpointing.policies import (
    ATTENTION, MATMUL, Applied, ByRule, Nothing, Policy, PolicyError, Selective, apply,
)  # fmt: skip
from snippets.kernels.patch import _rotary, patch
from snippets.kernels.rms_norm import RMSNormFunction, rms_norm
from snippets.kernels.rope import RoPEFunction, _like, _unit, rope
from snippets.kernels.swiglu import SwiGLUFunction, swiglu

EXPERIMENT = {
    "title": "让选择性重算看见 Triton kernel",
    "needs": "cuda",
    "memory_gib": 20,
    "minutes": 1,
    "full": {"size": "8b", "layers": 4, "batch": 1, "sequence": 4096, "rounds": 20},
    "smoke": {"size": "tiny", "layers": 1, "batch": 1, "sequence": 8, "rounds": 5},
    "tables": {
        "runs": {
            "setting": "", "rms_norm": "1", "rope": "1", "swiglu": "1", "stored_bytes": "B",
            "median_us": "µs", "p20_us": "µs", "p80_us": "µs", "gradients": "1", "different": "1",
        },
    },
}  # fmt: skip


# --8<-- [start:visible]
def register(kernel: Callable[..., Any], result: Callable[..., Any], remember: Callable[..., None], backward: Callable[..., Any]):
    """Make torch.ops.qwen3_kernels.NAME of a kernel; returns what a policy names: its only overload, in a tuple."""
    # result: allocates what the kernel returns; remember: puts into ctx what backward reads there.
    op = torch.library.custom_op(f"qwen3_kernels::{kernel.__name__}", kernel, mutates_args=())
    op.register_fake(result)
    op.register_autograd(backward, setup_context=remember)
    return (getattr(torch.ops.qwen3_kernels, kernel.__name__).default,)


def _norm_result(x, weight, eps=1e-6):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def _remember_norm(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rope_result(q, k, cos, sin):
    table = torch.promote_types(cos.dtype, sin.dtype)
    return tuple(_like(_unit(t.to(torch.promote_types(t.dtype, table)))) for t in (q, k))


def _remember_rope(ctx, inputs, output):
    (q, k, cos, sin), (q_out, k_out) = inputs, output
    if q_out.dtype != k_out.dtype:
        raise TypeError(f"rope as an operator: q becomes {q_out.dtype}, k {k_out.dtype}; convert one of them before")
    ctx.save_for_backward(_unit(cos), _unit(sin))
    ctx.strides = q_out.stride(), k_out.stride()
    ctx.mark_non_differentiable(*(out for x, out in ((q, q_out), (k, k_out)) if not x.requires_grad))


def _swiglu_result(gate, up):
    return gate.new_empty(gate.shape)


def _remember_swiglu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


# The backwards are the kernels' own; they find in ctx what their Functions put there.
RMS_NORM = register(rms_norm, _norm_result, _remember_norm, RMSNormFunction.backward)
ROPE = register(rope, _rope_result, _remember_rope, RoPEFunction.backward)
SWIGLU = register(swiglu, _swiglu_result, _remember_swiglu, SwiGLUFunction.backward)
VISIBLE = RMS_NORM + ROPE + SWIGLU
# --8<-- [end:visible]


# --8<-- [start:switch]
# What the forward of each patched class calls: by which name, which function it finds, which it is to find.
CALLS = {
    "FusedQwen3RMSNorm": ("rms_norm", rms_norm, *RMS_NORM),
    "FusedQwen3Attention": ("apply_rotary_pos_emb", _rotary, *ROPE),
    "FusedQwen3MLP": ("swiglu", swiglu, *SWIGLU),
}


def visible(model: torch.nn.Module) -> Applied:
    """Let the kernels of a patched model run as the operators ``VISIBLE``; every result keeps its bits.

    Args:
        model: one on which ``snippets.kernels.patch`` is on, all or some of its kernels.

    Returns:
        The switch. ``off()`` comes before the patch's own and after that of whatever was applied on top.

    Raises:
        PolicyError: no kernel is on, or something else wraps one already (a ``forward`` of its own, ``Keep``,
            ``visible`` itself); then nothing is changed.
    """
    modules = [(name, m) for name, m in model.named_modules() if type(m).__name__ in CALLS]
    if not modules:
        raise PolicyError(
            f"visible: no module of this {type(model).__name__} runs a kernel; call snippets.kernels.patch(model) first"
        )
    for name, module in modules:
        if "forward" in module.__dict__:
            raise PolicyError(f"visible: {name} has a forward of its own (a wrapper of another library); remove that first")
    classes = {base: _calling_operator(base) for base in dict.fromkeys(type(m) for _, m in modules)}
    before = [(name, module, type(module)) for name, module in modules]
    for _, module, base in before:
        module.__class__ = classes[base]
    applied = Applied([])

    def undo() -> None:
        for name, module, base in before:
            if isinstance(module, classes[base]) and type(module) is not classes[base]:
                applied._undo.append(undo)  # so that off() can be called again
                raise PolicyError(f"visible: {name} was switched to something else since; call that switch's off() first")
        for _, module, base in before:
            if type(module) is classes[base]:  # else the patch was taken out meanwhile, and this with it
                module.__class__ = base

    applied._undo.append(undo)
    return applied


def _calling_operator(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """``base`` with the operator under the function's name: same code, a copy of its globals, as in ``kernels.patch``."""
    name, function, overload = CALLS[base.__name__]
    forward = base.forward
    # Under another binding the model would still be right and the kernels invisible, or another switch's work undone.
    if name not in forward.__code__.co_names or forward.__globals__.get(name) is not function:
        raise PolicyError(
            f"visible: {base.__name__}.forward doesn't call the kernel as snippets.kernels.patch left it; call visible() once, "
            "and before anything that wraps the kernels"
        )
    scope = {**forward.__globals__, name: overload}
    ours = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return type(base.__name__, (base,), {"forward": ours, "__module__": base.__module__})
# --8<-- [end:switch]


# ------------------------------------------------------------------------------------ measuring

FUNCTIONS = {"rms_norm": RMSNormFunction, "rope": RoPEFunction, "swiglu": SwiGLUFunction}


@contextlib.contextmanager
def executions() -> Iterator[dict[str, int]]:
    """How often each kernel's forward runs inside the block, whether it is called as an operator or not.

    Both ways end in ``forward`` of the kernel's Function, which launches; a result taken from a store does not.
    """
    counts = dict.fromkeys(FUNCTIONS, 0)

    def counting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments):
            counts[name] += 1
            return forward(*arguments)

        return counted

    with contextlib.ExitStack() as stack:
        for name, function in FUNCTIONS.items():
            stack.enter_context(mock.patch.object(function, "forward", staticmethod(counting(name, function.forward))))
        yield counts


def everything(context: Any, op: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """A rule for ``ByRule``: save whatever is seen."""
    # Triton's CPU interpreter launches by copying storages, with operators that a GPU run doesn't have. They have to run.
    aten = torch.ops.aten
    if op.overloadpacket in (aten.new_empty, aten.set_, aten.copy_) or keywords.get("dtype") is torch.uint8:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


# Setting: whether the kernels are visible, and the policy of every layer.
SETTINGS: dict[str, tuple[bool, Policy]] = {
    "no checkpointing": (False, Nothing()),
    "invisible": (False, Selective(ATTENTION + MATMUL)),
    "invisible, everything saved": (False, ByRule(everything)),
    "visible, recomputed": (True, Selective(ATTENTION + MATMUL)),
    "visible, saved": (True, Selective(ATTENTION + MATMUL + VISIBLE)),
}


@contextlib.contextmanager
def setting(model: torch.nn.Module, name: str) -> Iterator[None]:
    """One of ``SETTINGS`` in a patched model."""
    seen, policy = SETTINGS[name]
    with visible(model) if seen else contextlib.nullcontext(), apply(model, policy):
        yield


def measure(*, size: str, layers: int, batch: int, sequence: int, rounds: int) -> measure_module.Tables:
    """Forward and backward of decoder layers and final norm under each of ``SETTINGS``.

    The embedding and lm_head stay out: they are the same for all and would take most of the time of so few layers.

    Args:
        size: "8b" (Qwen3-8B's layers, bf16) or "tiny" (fp32, for a CPU).
        layers, batch, sequence: as named.
        rounds: timed calls per setting.

    Returns:
        ``runs``: how often each kernel's forward ran in one forward and backward, counted where it launches; the bytes
        that the forward left allocated, its output included (None without CUDA); the time of both; of how many
        ``gradients`` (parameters and input) some bit differs from those without checkpointing. That row
        compares two runs of one setting, which shows that everything else is deterministic.

    Raises:
        ValueError: unknown size.
    """
    if size not in ("8b", "tiny"):
        raise ValueError(f"size={size!r}: '8b' or 'tiny'")
    device = measure_module.device()
    model = qwen3.build(layers, device=device) if size == "8b" else qwen3.tiny(layers, device=device)
    weights = dict(model.model.layers.named_parameters(prefix="layers")) | dict(model.model.norm.named_parameters(prefix="norm"))
    x = torch.randn(batch, sequence, model.config.hidden_size, dtype=model.dtype, device=device)
    dy, leaves = torch.randn_like(x), {"input": x.requires_grad_(), **weights}

    def clear() -> None:
        for leaf in leaves.values():
            leaf.grad = None

    def forward() -> Tensor:
        return model.model(inputs_embeds=x, use_cache=False).last_hidden_state

    def step() -> None:
        forward().backward(dy)

    def gradients() -> dict[str, Tensor]:
        clear()
        with algorithms("strict"):
            step()
        return {name: leaf.grad for name, leaf in leaves.items()}

    with patch(model), contextlib.ExitStack() as active:
        expected, rows = gradients(), {}
        for i, name in enumerate(SETTINGS):
            measure_module.progress(name, i, len(SETTINGS))
            with setting(model, name):
                different = sum(not torch.equal(g, expected[n]) for n, g in gradients().items())
                clear()
                with executions() as counts:
                    step()
                clear()
                stored = _allocated(forward, dy)
            rows[name] = {
                "setting": name, **counts, "stored_bytes": stored, "gradients": len(leaves), "different": different,
            }  # fmt: skip
        del expected

        def switch(name: str) -> None:
            clear()
            active.close()
            active.enter_context(setting(model, name))

        times = measure_module.side_by_side(
            {name: lambda _: step() for name in SETTINGS},
            prepare={name: lambda _, name=name: switch(name) for name in SETTINGS}, rounds=rounds, warmup=2 if device.type == "cuda" else 0,
        )  # fmt: skip
    return {"runs": [row | times[name] for name, row in rows.items()]}


def _allocated(forward: Callable[[], Tensor], dy: Tensor) -> int | None:
    """Bytes that a forward leaves allocated for its backward, which runs afterwards."""
    if dy.device.type != "cuda":
        return None
    gc.collect()
    before = torch.cuda.memory_allocated()
    out = forward()
    stored = torch.cuda.memory_allocated() - before
    out.backward(dy)
    return stored


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
