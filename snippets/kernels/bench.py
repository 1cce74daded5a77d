"""Speed of the four kernels beside eager PyTorch, torch.compile and Liger, at Qwen3-8B's shapes.

All four run in one process on inputs of one distribution, one call each per round in rotating order
with a cold L2 (see snippets/measure.py). Bandwidth counts the bytes that the operation must move,
each once, whatever an implementation really moves; ``ratio`` is that bandwidth over the one of a
device-to-device copy of as many bytes, measured in the same run.

    python -m snippets.kernels.bench            # a CUDA GPU, about four minutes
    python -m snippets.kernels.bench --smoke    # any machine; without a GPU only eager and ours
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from snippets import measure as measure_module
from snippets.kernels import cross_entropy, rms_norm, rope, swiglu

EXPERIMENT = {
    "title": "四个算子的速度：eager、torch.compile、Liger 与本项目",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 4,
    "full": {
        "kernels": ["rms_norm", "q_norm", "k_norm", "swiglu", "rope", "cross_entropy"],
        "rows": [4096, 8192, 16384],
        "rounds": 40,
    },
    "smoke": {
        "kernels": ["rms_norm", "q_norm", "k_norm", "swiglu", "rope", "cross_entropy"],
        "rows": [2],
        "rounds": 5,
    },
    "tables": {
        "speed": {
            "kernel": "",
            "rows": "行",
            "direction": "",
            "impl": "",
            "median_us": "µs",
            "p20_us": "µs",
            "p80_us": "µs",
            "gbps": "GB/s",
            "copy_gbps": "GB/s",
            "ratio": "1",
            "peak_gib": "GiB",
            "note": "",
        },
    },
}

DTYPE = torch.bfloat16
EPS = 1e-6
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12288, 32, 8, 128, 151936
DIRECTIONS = ("forward", "backward", "full")  # full = forward + backward in one timed call
ONE_SET = 1 << 30  # inputs larger than this fill the L2 many times over: one set of them is enough


# ------------------------------------------------------------------- what is compared


@dataclass
class Case:
    """One operation at one shape.

    Attributes:
        inputs: draws a set of arguments.
        leaves: how many of the leading arguments get a gradient.
        gradient: draws a gradient for one output.
        implementations: name → function of the arguments; returns a tensor or a tuple of tensors.
        moved: direction → bytes that must be moved.
        notes: (direction, implementation) → what to know when reading the number.
    """

    inputs: Callable[[], list[Tensor]]
    leaves: int
    gradient: Callable[[Tensor], Tensor]
    implementations: dict[str, Callable[..., Any]]
    moved: dict[str, int]
    notes: dict[tuple[str, str], str]


def hf_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The lines of Qwen3RMSNorm.forward, as a function."""
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + EPS)
    return weight * hidden.to(x.dtype)


def hf_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``act_fn(gate) * up`` of Qwen3MLP.forward."""
    return torch.nn.functional.silu(gate) * up


def hf_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


def hf_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    from transformers.loss.loss_utils import fixed_cross_entropy

    return fixed_cross_entropy(logits.float(), labels)


def liger(kernel: str) -> Callable[..., Any]:
    """Liger's autograd functions with the arguments that apply_liger_kernel_to_qwen3 leads to."""
    from liger_kernel import ops
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return {
        "norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", True, None),
        "swiglu": ops.LigerSiLUMulFunction.apply,
        "rope": liger_rotary_pos_emb,
        "cross_entropy": lambda logits, labels: ops.LigerCrossEntropyFunction.apply(logits, labels, None)[0],
    }[kernel]


def compete(kernel: str, eager: Callable[..., Any], ours: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The competitors of one kernel. On a CPU, Liger's kernels don't run and compiling would tell nothing."""
    if not torch.cuda.is_available():
        return {"eager": eager, "ours": ours}
    return {
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
        "liger": liger(kernel),
        "ours": ours,
    }


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=measure_module.device())


def norm_case(rows: int, width: int) -> Case:
    size, weight = rows * width * DTYPE.itemsize, width * DTYPE.itemsize
    forward, backward = 2 * size + weight, 3 * size + 2 * weight
    return Case(
        inputs=lambda: [random(rows, width), 1 + 0.1 * random(width)],
        leaves=2,
        gradient=torch.randn_like,
        implementations=compete("norm", hf_rms_norm, lambda x, w: rms_norm(x, w, EPS)),
        moved={"forward": forward, "backward": backward, "full": forward + backward},
        notes={},
    )


def swiglu_case(rows: int) -> Case:
    size = rows * INTERMEDIATE * DTYPE.itemsize
    return Case(
        inputs=lambda: [random(rows, INTERMEDIATE), random(rows, INTERMEDIATE)],
        leaves=2,
        gradient=torch.randn_like,
        implementations=compete("swiglu", hf_swiglu, swiglu),
        moved={"forward": 3 * size, "backward": 5 * size, "full": 8 * size},
        notes={},
    )


def rope_case(rows: int) -> Case:
    def inputs() -> list[Tensor]:
        frequency = 1e6 ** -(torch.arange(0, HEAD_DIM, 2, device=measure_module.device()) / HEAD_DIM)
        angle = torch.arange(rows, device=frequency.device)[:, None] * frequency
        angle = torch.cat((angle, angle), -1)[None]
        # The transposed views that Qwen3Attention makes of its projections.
        q, k = (random(1, rows, heads, HEAD_DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS))
        return [q, k, angle.cos().to(DTYPE), angle.sin().to(DTYPE)]

    one_way = (2 * rows * (HEADS + KV_HEADS) * HEAD_DIM + 2 * rows * HEAD_DIM) * DTYPE.itemsize
    return Case(
        inputs=inputs,
        leaves=2,
        gradient=torch.randn_like,
        implementations=compete("rope", hf_rope, rope),
        moved={"forward": one_way, "backward": one_way, "full": 2 * one_way},
        notes={("forward", "liger"): "原地改写输入", ("full", "liger"): "原地改写输入"},
    )


def cross_entropy_case(rows: int) -> Case:
    def inputs() -> list[Tensor]:
        return [random(rows, VOCABULARY), torch.randint(0, VOCABULARY, (rows,), device=measure_module.device())]

    size = rows * VOCABULARY * DTYPE.itemsize
    return Case(
        inputs=inputs,
        leaves=1,
        gradient=torch.ones_like,  # as loss.backward() passes it
        implementations=compete("cross_entropy", hf_cross_entropy, cross_entropy),
        moved={"forward": size, "backward": 2 * size, "full": 3 * size},
        notes={
            ("forward", "liger"): "前向里已算完梯度并与主机同步",
            ("backward", "liger"): "梯度已在前向算完，不可单独比较",
            ("full", "liger"): "原地改写 logits",
        },
    )


CASES: dict[str, Callable[[int], Case]] = {
    "rms_norm": lambda rows: norm_case(rows, HIDDEN),
    "q_norm": lambda rows: norm_case(rows * HEADS, HEAD_DIM),
    "k_norm": lambda rows: norm_case(rows * KV_HEADS, HEAD_DIM),
    "swiglu": swiglu_case,
    "rope": rope_case,
    "cross_entropy": cross_entropy_case,
}


# --------------------------------------------------------------------------- running


@dataclass
class Prepared:
    """An implementation with its input sets, ready to be called with a round number."""

    function: Callable[..., Any]
    sets: list[list[Tensor]]
    leaves: int
    gradients: list[list[Tensor]]

    def forward(self, i: int) -> tuple[Tensor, ...]:
        out = self.function(*self.sets[i % len(self.sets)])
        return out if isinstance(out, tuple) else (out,)

    def grads(self, outputs: tuple[Tensor, ...], i: int, keep: bool) -> tuple[Tensor, ...]:
        at = i % len(self.sets)
        return torch.autograd.grad(outputs, self.sets[at][: self.leaves], self.gradients[at], retain_graph=keep)

    def full(self, i: int) -> tuple[Tensor, ...]:
        return self.grads(self.forward(i), i, keep=False)

    def direction(self, name: str) -> Callable[[int], Any]:
        """The timed function. For the backward the graphs are built here, once per input set."""
        if name != "backward":
            return getattr(self, name)
        graphs = [self.forward(i) for i in range(len(self.sets))]
        return lambda i: self.grads(graphs[i % len(graphs)], i, keep=True)


def clone(tensors: list[Tensor], leaves: int) -> list[Tensor]:
    """Copies in the same memory order, the leading ones as leaves."""
    return [t.detach().clone().requires_grad_(i < leaves) for i, t in enumerate(tensors)]


def prepare(case: Case) -> dict[str, Prepared]:
    """Input sets for every implementation; Liger writes into its inputs and gradients, so it gets its own."""
    sets = [clone(case.inputs(), case.leaves)]
    if sum(t.nbytes for t in sets[0]) < ONE_SET:
        sets.append(clone(case.inputs(), case.leaves))
    with torch.no_grad():  # the shapes of the outputs
        first = case.implementations["eager"](*sets[0])
    shapes = first if isinstance(first, tuple) else (first,)
    gradients = [[case.gradient(o) for o in shapes] for _ in sets]
    prepared = {}
    for name, function in case.implementations.items():
        if name == "liger":
            own = [clone(s, case.leaves) for s in sets]
            prepared[name] = Prepared(function, own, case.leaves, [clone(g, 0) for g in gradients])
        else:
            prepared[name] = Prepared(function, sets, case.leaves, gradients)
    return prepared


def check_agreement(kernel: str, prepared: dict[str, Prepared]) -> None:
    """Compute the same thing before being timed: gradients within 2 % rms of eager's.

    Raises:
        MeasureError: an implementation computes something else; its speed would mean nothing.
    """
    expected = prepared["eager"].full(0)
    for name, one in prepared.items():
        if name == "eager":
            continue
        for i, (got, want) in enumerate(zip(one.full(0), expected, strict=True)):
            scale = want.norm(dtype=torch.float32).item()
            error = (got - want).norm(dtype=torch.float32).item()
            if not error <= 0.02 * scale:
                raise measure_module.MeasureError(
                    f"{kernel}: gradient {i} of {name} differs from eager's by {error / scale:.1%} rms"
                )


def measure(*, kernels: list[str], rows: list[int], rounds: int) -> measure_module.Tables:
    """Time every kernel × rows × direction × implementation.

    Args:
        kernels: names in ``CASES``.
        rows: tokens; the per-head norms have 32 and 8 times as many rows.
        rounds: timed calls per number.

    Returns:
        ``speed``; times in µs, ``gbps`` from the least bytes to move (1e9 bytes a second).
    """
    table: list[measure_module.Row] = []
    copies: dict[int, float] = {}
    jobs = [(kernel, n) for kernel in kernels for n in rows]
    # The backward is timed by running the same graph again; donated buffers would forbid that.
    with torch._functorch.config.patch(donated_buffer=False):
        for done, (kernel, n) in enumerate(jobs):
            measure_module.progress(f"{kernel}, {n} rows", done, len(jobs))
            table += measure_case(kernel, n, rounds, copies)
            # Else the next shape would count as a recompilation of the same code.
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    return {"speed": table}


def measure_case(kernel: str, rows: int, rounds: int, copies: dict[int, float]) -> list[measure_module.Row]:
    case = CASES[kernel](rows)
    prepared = prepare(case)
    check_agreement(kernel, prepared)
    table = []
    for direction in DIRECTIONS:
        moved = case.moved[direction]
        if moved not in copies:
            copies[moved] = measure_module.copy_bandwidth(moved, rounds=rounds)
        calls = {name: one.direction(direction) for name, one in prepared.items()}
        times = measure_module.side_by_side(calls, rounds=rounds)
        for name, time in times.items():
            comparable = not (kernel == "cross_entropy" and direction == "backward" and name == "liger")
            gbps = moved / time["median_us"] / 1e3 if comparable else None
            table.append(
                {
                    "kernel": kernel,
                    "rows": rows,
                    "direction": direction,
                    "impl": name,
                    **time,
                    "gbps": gbps,
                    "copy_gbps": copies[moved],
                    "ratio": gbps / copies[moved] if comparable else None,
                    "peak_gib": measure_module.peak_memory(lambda call=calls[name]: call(0)),
                    "note": case.notes.get((direction, name), ""),
                }
            )
        del calls
    return table


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
