"""Whole training configurations by name, each put into a model for the length of a block and timed the same way.

A name is ``kernels policy``, and ``under graph`` or ``compiled BUDGET ESTIMATOR`` where it doesn't run eagerly:

    hf none, hf full, hf every2, hf offload      transformers' own API: gradient_checkpointing_enable(...)
    hf attention, hf mlp                         that half of each layer as a block
    hf selective                                 what torchtitan's selective mode stores (commit b5bcd76)
    liger none, liger full, ...                  the same with Liger's kernels and its fused linear cross-entropy
    compiled 0.3 flops                           torch.compile of each layer under an activation_memory_budget, with
                                                 Liger's loss, the best public recipe known
    ours none, ours full, ours keep,             this project's kernels, loss and gradient accumulation; keep stores the
    ours keep q+gate, ours plan 9.1              attention only, or the tensors named; plan asks the planner for that many GiB
    ours keep q offload gate, ours plan 9.1 host the same with tensors in host memory: the one named, or the planner's choice
    hf none under graph, ours plan 9.1 under graph

What a step is: forward and backward of one micro-batch. Gradients exist and are added to, as in all but the first
micro-step of gradient accumulation, so that weights and gradients are the same fixed bytes for everybody and the
activations are what is above them at the peak. No optimizer runs inside.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snippets.checkpointing import policies
from snippets.checkpointing.accumulate import accumulate
from snippets.checkpointing.chunked_loss import loss_and_backward
from snippets.checkpointing.plan import GIB, Costs, plan
from snippets.kernels import patch
from snippets.variants import variant

# Given instead of a mask, this is what transformers makes of "causal, nothing padded": it spares everybody the check.
MASK = {"full_attention": None}
TORCHTITAN = policies.Selective(policies.ATTENTION + policies.MATMUL, skip=(1, 3, 5), early_stop=False, name="selective")


class Unfit(RuntimeError):
    """The recipe cannot run here; the message says why."""


@dataclass(frozen=True)
class Ready:
    """A recipe in place. ``step(ids)`` runs one micro-step and returns the loss."""

    step: Callable[[Tensor], Tensor]
    policies: list[policies.Policy] | None = None
    predicted_bytes: int | None = None
    predicted_us: float | None = None


def family(name: str) -> str:
    """"eager", "graph" or "compile": only recipes of one family are rivals."""
    return "graph" if name.endswith(" under graph") else "compile" if name.startswith("compiled ") else "eager"


@contextlib.contextmanager
def recipe(name: str, model: torch.nn.Module, costs: Costs | None = None) -> Iterator[Ready]:
    """Run the body with the recipe in ``model``; the model is as before afterwards.

    Args:
        model: an unpatched ``Qwen3ForCausalLM`` in train mode.
        costs: needed by "ours plan", for the shape that will be run.

    Raises:
        ValueError: an unknown name.
    """
    name = name.removesuffix(" under graph") if (graph := name.endswith(" under graph")) else name
    with contextlib.ExitStack() as stack:
        match name.split():
            case ["compiled", budget, estimator]:
                stack.enter_context(variant("liger_loss", model))
                stack.enter_context(layers_compiled(model, float(budget), estimator))
                ready = Ready(lambda ids: _backward(model, ids))
            case ["hf" | "liger" as kernels, policy]:
                stack.enter_context(variant(kernels, model))
                stack.enter_context(_public(model, policy))
                ready = Ready(lambda ids: _backward(model, ids))
            case ["ours", policy, *arguments]:
                ready = stack.enter_context(_ours(model, policy, arguments, costs))
            case _:
                raise ValueError(f"no recipe {name!r}; see the table in {__name__}")
        yield _captured(ready) if graph else ready


def _backward(model: torch.nn.Module, ids: Tensor) -> Tensor:
    loss = model(ids, labels=ids, attention_mask=MASK, use_cache=False).loss
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def _public(model: torch.nn.Module, policy: str) -> Iterator[None]:
    if policy == "none":
        yield
    elif policy in ("selective", "attention", "mlp"):
        with policies.apply(model, TORCHTITAN if policy == "selective" else policies.SubBlock(policy)):
            yield
    elif policy in ("full", "offload") or policy.startswith("every"):
        n = int(policy.removeprefix("every")) if policy.startswith("every") else 1
        model.gradient_checkpointing_enable(every_n_layers=n, offload=policy == "offload")
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()  # the former leaves this hook on the embedding
    else:
        raise ValueError(f"no policy {policy!r}: known are none, full, everyN, offload, attention, mlp, selective")


# The search takes seconds, and a comparison comes to each recipe twice.
_planned = functools.lru_cache(plan)


def _keep(arguments: list[str]) -> policies.Keep:
    match arguments:
        case []:
            kept, away = [], []
        case ["offload", away]:
            kept, away = [], away.split("+")
        case [kept]:
            kept, away = kept.split("+"), []
        case [kept, "offload", away]:
            kept, away = kept.split("+"), away.split("+")
        case _:
            raise ValueError(f"ours keep {' '.join(arguments)}: give names joined by +, then offload and names, or nothing")
    return policies.Keep(kept, away)


@contextlib.contextmanager
def _ours(model: torch.nn.Module, policy: str, arguments: list[str], costs: Costs | None) -> Iterator[Ready]:
    layers, predicted = len(policies.layers_of(model)), None
    if policy == "plan":
        match arguments:
            case [budget]:
                host = 0.0
            case [budget, "host"]:
                host = math.inf
            case _:
                budget = ""
        try:
            bytes_ = float(budget) * GIB
        except ValueError:
            raise ValueError(f"ours plan {' '.join(arguments)}: give a budget in GiB, and host behind it or nothing") from None
        if costs is None:
            raise ValueError("ours plan: no costs for this shape were given")
        predicted = _planned(costs, bytes_, host)
        each = predicted.policies
    else:
        kinds = {"none": policies.Nothing, "full": policies.Block, "keep": lambda: _keep(arguments)}
        if arguments and policy != "keep":
            raise ValueError(f"ours {policy} takes nothing behind it, got {' '.join(arguments)!r}")
        if policy not in kinds:
            raise ValueError(f"no policy {policy!r} of ours: known are none, full, keep, plan")
        each = [kinds[policy]()] * layers
    with patch(model), accumulate(model), policies.apply(model, each):
        step = lambda ids: loss_and_backward(model, ids, attention_mask=MASK)  # noqa: E731
        yield Ready(step, each, predicted and predicted.peak_bytes, predicted and predicted.step_us)


@contextlib.contextmanager
def layers_compiled(model: torch.nn.Module, budget: float, estimator: str) -> Iterator[None]:
    """torch.compile of each decoder layer under an ``activation_memory_budget``; nothing compiled remains afterwards."""
    from torch._functorch import config

    layers = policies.layers_of(model)
    torch._dynamo.reset()
    options = {"activation_memory_budget": budget, "activation_memory_budget_runtime_estimator": estimator}
    with config.patch(options):
        for layer in layers:
            layer.compile(dynamic=False)
        try:
            yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            torch._dynamo.reset()


def _captured(ready: Ready) -> Ready:
    """The step as one CUDA graph: the host launches once instead of some thousand times."""
    if not torch.cuda.is_available():
        raise Unfit("a CUDA graph needs a CUDA device")
    held: dict[str, Any] = {}

    def step(ids: Tensor) -> Tensor:
        if "graph" not in held:
            held["ids"] = ids.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles and initialises what must not happen inside a capture
                ready.step(held["ids"])
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    held["loss"] = ready.step(held["ids"])
            except RuntimeError as error:  # what ended the capture, then the one about its end
                first = str(error.__context__ or error).splitlines()[0]
                raise Unfit(f"the step cannot be captured in a CUDA graph: {first}") from error
            held["graph"] = graph
        held["ids"].copy_(ids)
        held["graph"].replay()
        return held["loss"]

    return Ready(step, ready.policies, ready.predicted_bytes, ready.predicted_us)


# ------------------------------------------------------------------------------------ measuring


def fixed_bytes(model: torch.nn.Module) -> int:
    """Weights and gradients, allocating the gradients where they are missing; CUDA only, else 0."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def pinned_memory() -> int:
    """Bytes of the host that torch's pinned allocator holds, in use or not; CUDA only, else 0.

    Not its ``active_bytes``: up to torch 2.11 they don't fall when memory is freed after a copy (pytorch#179380).
    """
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_available() else 0


def clean() -> None:
    """Give back what a recipe left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # torch 2.11 has no public name for it


def visit(
    name: str, model: torch.nn.Module, batches: list[Tensor], steps: int, costs: Costs | None = None
) -> Mapping[str, Any]:
    """Apply a recipe, warm up, measure the peak of one step and the time of ``steps`` more, take it out again.

    Returns:
        ``samples_us`` (list), ``peak_bytes`` above weights and gradients and ``host_bytes`` of pinned memory after the last
        step (None without CUDA), ``loss`` of the first batch, ``policies``, ``predicted_us`` and ``predicted_bytes``; or
        ``{"failed": why}`` where memory didn't suffice or the step cannot be captured.
    """
    clean()
    fixed, pinned = fixed_bytes(model), pinned_memory()
    try:
        with recipe(name, model, costs) as ready:
            cuda = torch.cuda.is_available()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            loss = ready.step(batches[0]).float().item()  # compiles; a graph is captured here, which is when it allocates
            if family(name) != "graph":
                clean()
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                ready.step(batches[0])
            peak = torch.cuda.max_memory_allocated() - fixed if cuda else None
            samples = samples_us(ready.step, batches, steps)
            host = pinned_memory() - pinned if cuda else None
        # Not the recipe itself: its step may hold a CUDA graph with a memory pool of its own.
        return {"samples_us": samples, "peak_bytes": peak, "host_bytes": host, "loss": loss, "policies": ready.policies,
                "predicted_us": ready.predicted_us, "predicted_bytes": ready.predicted_bytes}  # fmt: skip
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    except Unfit as error:
        return {"failed": str(error)}
    finally:
        clean()


def samples_us(step: Callable[[Tensor], Any], batches: list[Tensor], steps: int) -> list[float]:
    """Times of ``steps`` steps that follow each other without a wait, as in training.

    So the host works ahead of the device where it can, and where it cannot, that shows in the time. One more step comes
    first: in it a host that works ahead takes the pinned memory of a second step, where the recipe needs it.
    """
    step(batches[-1])
    if not torch.cuda.is_available():
        marks = [time.perf_counter()]
        for i in range(steps):
            step(batches[i % len(batches)])
            marks.append(time.perf_counter())
        return [(b - a) * 1e6 for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for i in range(steps):
        step(batches[i % len(batches)])
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
