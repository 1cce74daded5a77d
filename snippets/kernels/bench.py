"""The four kernels at Qwen3-8B shapes, side by side: eager PyTorch, torch.compile, Liger, ours.

Every time is set against the time that a plain device-to-device copy takes to move the fewest bytes
the operation has to move (each input read once, each output written once; saved tensors that
the backward reads count as its inputs). ``share`` is that bandwidth over the measured copy bandwidth at the
same byte count in the same run: 1 means "as fast as a copy". L2-resident reads can push it above 1.

Directions: "forward" under autograd, "backward" alone, and "full" (both), because Liger's cross
entropy does the work of its backward in the forward.

    python -m snippets.kernels.bench            # an H200 takes about four minutes
    python -m snippets.kernels.bench --smoke    # any machine; Triton runs interpreted
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from snippets.measure import Tables, cli, copy_bandwidth, device, peak_memory, progress, side_by_side

EXPERIMENT = {
    "title": "四个算子的速度：eager、torch.compile、Liger 与本项目",
    "needs": "cuda",
    "memory_gib": 60,
    "minutes": 5,
    "full": {
        "rows": [4096, 8192, 16384],
        "hidden": 4096,
        "intermediate": 12288,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 151936,
        "rounds": 30,
        "impls": ["eager", "compile", "liger", "ours"],
    },
    "smoke": {
        "rows": [4],
        "hidden": 16,
        "intermediate": 24,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "vocab": 40,
        "rounds": 5,
        "impls": ["eager", "ours"],
    },
    "tables": {
        "speed": {
            "op": "",
            "rows": "行",
            "direction": "",
            "impl": "",
            "median_us": "µs",
            "p20_us": "µs",
            "p80_us": "µs",
            "gbps": "GB/s",
            "copy_gbps": "GB/s",
            "share": "1",
            "peak_gib": "GiB",
            "fastest": "",
        },
    },
}

EPS = 1e-6


# ------------------------------------------------------------------ the code that is replaced


def eager_rms_norm(x, w):
    """Qwen3RMSNorm.forward of transformers 5.17."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return w * h.to(x.dtype)


def eager_swiglu(gate, up):
    """The middle of Qwen3MLP.forward."""
    return torch.nn.functional.silu(gate) * up


def _rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager_rope(q, k, cos, sin):
    """apply_rotary_pos_emb of transformers 5.17."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def eager_cross_entropy(logits, labels):
    """ForCausalLMLoss of transformers 5.17, after the shift."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100)


# -------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Op:
    """One operation at one size.

    Attributes:
        inputs: seed → tensors in the order of the functions' arguments.
        trained: how many of them, from the first, get a gradient.
        fewest: direction → fewest bytes that have to move.
        impls: name → function.
    """

    name: str
    inputs: Callable[[int], list[torch.Tensor]]
    trained: int
    fewest: dict[str, int]
    impls: dict[str, Callable[..., Any]]


def _fewest(forward: int, backward: int) -> dict[str, int]:
    return {"forward": forward, "backward": backward, "full": forward + backward}


def operations(rows: int, s: dict[str, int], dtype: torch.dtype, dev: torch.device) -> list[Op]:
    """The five operations at one row count; bytes in terms of ``dtype``."""
    from snippets import kernels

    size = dtype.itemsize

    def randn(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
        g = torch.Generator(dev).manual_seed(seed)
        return (torch.randn(*shape, generator=g, device=dev, dtype=torch.float32) * scale).to(dtype)

    def chunked(seed: int, n: int, width: int) -> torch.Tensor:
        """Large normal tensor without an fp32 copy of it."""
        g = torch.Generator(dev).manual_seed(seed)
        out = torch.empty(n, width, dtype=dtype, device=dev)
        for part in out.split(1024):
            part.copy_(torch.randn(part.shape, generator=g, device=dev))
        return out

    liger: dict[str, Callable[..., Any]] = {}
    if dev.type == "cuda":
        from liger_kernel import ops

        liger = {
            # in_place as apply_liger_kernel_to_qwen3 leaves it: dX overwrites dY
            "rms_norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", True, None),
            "swiglu": lambda g, u: ops.LigerSiLUMulFunction.apply(g, u),
            "rope": lambda q, k, c, sn: ops.LigerRopeFunction.apply(q, k, c, sn),
            "cross_entropy": lambda z, t: ops.LigerCrossEntropyFunction.apply(z, t, None, -100)[0],
        }

    def impls(kind: str, eager: Callable[..., Any], ours: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        found = {"eager": eager, "compile": torch.compile(eager, dynamic=False), "ours": ours}
        return found | ({"liger": liger[kind]} if kind in liger else {})

    def norm(name: str, n: int, width: int) -> Op:
        x = n * width * size
        return Op(
            name,
            lambda seed: [randn(seed, n, width), 1 + randn(seed + 1, width, scale=0.1)],
            2,
            _fewest(2 * x + width * size, 3 * x + 2 * width * size),
            impls("rms_norm", eager_rms_norm, lambda x, w: kernels.rms_norm(x, w, EPS)),
        )

    def rope_inputs(seed: int) -> list[torch.Tensor]:
        d, h, kv = s["head_dim"], s["heads"], s["kv_heads"]
        angle = torch.arange(rows, device=dev)[:, None] / 1e6 ** (torch.arange(0, d, 2, device=dev) / d)
        table = torch.cat((angle, angle), -1)[None]
        # HF's views: projected as [B, S, H, D], then transposed
        q = randn(seed, 1, rows, h, d).transpose(1, 2)
        k = randn(seed + 1, 1, rows, kv, d).transpose(1, 2)
        return [q, k, table.cos().to(dtype), table.sin().to(dtype)]

    def labels(seed: int) -> torch.Tensor:
        g = torch.Generator(dev).manual_seed(seed)
        t = torch.randint(0, s["vocab"], (rows,), generator=g, device=dev)
        t[:: max(rows // 7, 1)] = -100
        return t

    qk = rows * (s["heads"] + s["kv_heads"]) * s["head_dim"] * size
    tables = 2 * rows * s["head_dim"] * size
    act = rows * s["intermediate"] * size
    logits = rows * s["vocab"] * size
    return [
        norm("rms_norm", rows, s["hidden"]),
        norm("q_norm", rows * s["heads"], s["head_dim"]),
        norm("k_norm", rows * s["kv_heads"], s["head_dim"]),
        Op(
            "swiglu",
            lambda seed: [randn(seed, rows, s["intermediate"]), randn(seed + 1, rows, s["intermediate"])],
            2,
            _fewest(3 * act, 5 * act),
            impls("swiglu", eager_swiglu, kernels.swiglu),
        ),
        Op(
            "rope",
            rope_inputs,
            2,
            _fewest(2 * qk + tables, 2 * qk + tables),
            impls("rope", eager_rope, kernels.rope),
        ),
        Op(
            "cross_entropy",
            lambda seed: [chunked(seed, rows, s["vocab"]), labels(seed)],
            1,
            _fewest(logits, 2 * logits),
            impls("cross_entropy", eager_cross_entropy, lambda z, t: kernels.cross_entropy(z, t)),
        ),
    ]


# ------------------------------------------------------------------------------- measurement


def _outputs(y: Any) -> tuple[torch.Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


class Case:
    """One implementation of one operation, with input sets that rotate so that L2 never serves them."""

    def __init__(self, fn: Callable[..., Any], op: Op, sets: list[list[torch.Tensor]]) -> None:
        self.fn, self.op = fn, op
        # Leaves that own their memory are copied: an implementation that writes into its inputs
        # (Liger's RoPE and cross entropy) must not change what the others see.
        self.sets = [
            [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(i < op.trained) for i, t in enumerate(ts)]
            for ts in sets
        ]
        self.grads = [[torch.randn_like(o) for o in _outputs(self.run(i))] for i in range(len(sets))]
        self.saved: dict[int, tuple[torch.Tensor, ...]] = {}

    def run(self, i: int) -> Any:
        ts = self.sets[i % len(self.sets)]
        # A view: a leaf that needs a gradient cannot be written into, a model's activation can.
        return self.fn(*(t.view_as(t) if k < self.op.trained else t for k, t in enumerate(ts)))

    def forward(self, i: int) -> None:
        self.run(i)

    def prepare(self, i: int) -> None:
        self.saved[i] = _outputs(self.run(i))

    def backward(self, i: int) -> None:
        outs = self.saved.pop(i)
        torch.autograd.grad(outs, self.sets[i % len(self.sets)][: self.op.trained], self.grads[i % len(self.sets)])

    def full(self, i: int) -> None:
        self.prepare(i)
        self.backward(i)


def measure(
    *, rows: list[int], hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    rounds: int, impls: list[str],
) -> Tables:  # fmt: skip
    """Time every implementation of every operation.

    Args:
        rows: tokens per call. The other sizes are the model's.
        rounds: timed calls per implementation and direction.
        impls: of "eager", "compile", "liger" (CUDA only), "ours".
    """
    dev = device()
    dtype = torch.bfloat16 if dev.type == "cuda" else torch.float32  # the interpreter cannot do bf16
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads,
             "head_dim": head_dim, "vocab": vocab}  # fmt: skip
    speed: list[dict[str, Any]] = []
    for n in rows:
        for op in operations(n, sizes, dtype, dev):
            progress(f"{op.name}，{n} 行")
            torch._dynamo.reset()
            # At least two sets; a large one is several times the L2 by itself.
            sets = [op.inputs(1000 * j) for j in range(2)]
            cases = {name: Case(op.impls[name], op, sets) for name in impls if name in op.impls}
            del sets
            copies: dict[int, float] = {}
            for direction in ("forward", "backward", "full"):
                fewest = op.fewest[direction]
                copies[fewest] = copies.get(fewest) or copy_bandwidth(fewest, rounds=rounds)
                if direction == "backward":
                    times = side_by_side(
                        {k: c.backward for k, c in cases.items()},
                        prepare={k: c.prepare for k, c in cases.items()},
                        rounds=rounds,
                    )
                else:
                    times = side_by_side({k: getattr(c, direction) for k, c in cases.items()}, rounds=rounds)
                best = min(times, key=lambda k: times[k]["median_us"])
                for name, case in cases.items():
                    gbps = fewest / times[name]["median_us"] / 1e3
                    peak = peak_memory(lambda c=case: c.full(0)) if direction == "full" else None
                    speed.append({
                        "op": op.name, "rows": n, "direction": direction, "impl": name, **times[name], "gbps": gbps,
                        "copy_gbps": copies[fewest], "share": gbps / copies[fewest], "peak_gib": peak,
                        "fastest": name == best,
                    })  # fmt: skip
            del cases
            gc.collect()
            if dev.type == "cuda":
                torch.cuda.empty_cache()
    return {"speed": speed}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # no GPU, nothing to compile for
    cli(EXPERIMENT, measure)
