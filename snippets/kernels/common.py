"""What the four kernels share: checks, row views, compute dtype, launch context.

Every launch costs the host some microseconds, and a training step makes hundreds of them, so the
helpers below do no more than look at metadata. None of them touches device memory or waits for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

MAX_WIDTH = 32768  # one row has to fit the registers of one program

# bf16 and fp16 are upcast on load and computed in fp32, as PyTorch does. fp64 stays fp64, so that
# gradcheck, whose finite differences need about 12 digits, can judge these very kernels.
SUPPORTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype a kernel computes in for inputs of ``dtype`` (a ``tl.constexpr`` argument)."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same for tensors: what partial sums, losses and log-sum-exps are stored in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensors(op: str, **tensors: torch.Tensor) -> None:
    """Refuse what the kernels cannot take, before a pointer reaches the device.

    Raises:
        TypeError: not a tensor, or a dtype other than bf16, fp16, fp32, fp64.
        ValueError: tensors on different devices, or on a device without Triton.
    """
    first = None
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(t).__name__}, not a tensor")
        if t.dtype not in SUPPORTED:
            raise TypeError(
                f"{op}: {name} has dtype {t.dtype}; supported are bfloat16, float16, float32 and float64. "
                f"Convert it first, for example {name}.float()"
            )
        if first is None:
            first = (name, t.device)
            if not (t.device.type == "cpu" if triton.knobs.runtime.interpret else t.is_cuda):
                raise ValueError(
                    f"{op}: {name} is on {t.device}; Triton kernels need a CUDA tensor. Move it with "
                    f"{name}.cuda(), or set TRITON_INTERPRET=1 before triton is imported to run on the CPU"
                )
        elif t.device != first[1]:
            raise ValueError(
                f"{op}: {name} is on {t.device} but {first[0]} is on {first[1]}; move them to one device"
            )


def check_width(op: str, what: str, width: int) -> None:
    """Raise ValueError unless 1 <= width <= MAX_WIDTH."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(
            f"{op}: {what} is {width}; supported are 1 to {MAX_WIDTH}, because one program holds a whole row "
            "in registers. Use the PyTorch operator for wider rows"
        )


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """``[..., W]`` as ``[N, W]`` with unit stride inside a row; copies only when no view can do it."""
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for ``Function.backward``: refuse create_graph=True, under which grad mode is on.

    ``once_differentiable`` does not: where the incoming gradient itself needs no gradient it returns
    the result as a constant, and a gradient penalty vanishes without a word.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(ctx).__name__.removesuffix('Backward')}: no second derivative; call backward or "
                "torch.autograd.grad without create_graph=True, or use the PyTorch operator"
            )
        return backward(ctx, *grads)

    return checked


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use, in bytes (Hopper's 227 KiB on the CPU)."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device, the unit in which persistent grids are sized (4 on the CPU)."""
    if device.type != "cuda":
        return 4  # more than one, so that the interpreter exercises the second stage of reductions
    return torch.cuda.get_device_properties(device).multi_processor_count


def on(t: torch.Tensor):
    """Context in which a launch goes to ``t``'s device: Triton takes the current one otherwise."""
    if not t.is_cuda or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)
