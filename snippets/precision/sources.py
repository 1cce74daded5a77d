"""Seven sources of difference between a fused kernel and the code that it replaces.

Each section between the markers is one demonstration: run it, and it yields what it measured
as ``(setting, metric, value, unit)``. None of the magnitudes is typed anywhere; they come from
the device that runs this file. Errors are always against fp64 on the same rounded inputs.

    python -m snippets.precision.sources            # a CUDA GPU, about a minute
    python -m snippets.precision.sources --smoke    # any machine; Triton runs interpreted
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from snippets import interpreter  # noqa: F401  isort:skip - before triton
from snippets import measure as measure_module

import triton
import triton.language as tl

EXPERIMENT = {
    "title": "七种差异来源各有多大",
    "needs": "cuda",
    "memory_gib": 4,
    "minutes": 2,
    "full": {
        "n": 4096,
        "seeds": 64,
        "rows": 4096,
        "width": 4096,
        "runs": 50,
        "matmuls": [[4096, 4096, 4096], [64, 128, 65536]],
        "elements": 1048576,
        "lrs": [1e-3, 1e-4, 1e-5, 1e-6],
        "drift_lr": 1e-5,
        "drift_steps": 1000,
    },
    "smoke": {
        "n": 256,
        "seeds": 8,
        "rows": 64,
        "width": 128,
        "runs": 3,
        "matmuls": [[64, 64, 64], [8, 8, 512]],
        "elements": 8192,
        "lrs": [1e-3, 1e-5],
        "drift_lr": 1e-4,
        "drift_steps": 60,
    },
    "tables": {
        "sources": {"source": "", "setting": "", "metric": "", "value": "1", "unit": "", "seen_by": ""},
        "matmul": {"shape": "", "setting": "", "rms_rel": "1", "max_rel": "1", "changed": "1"},
        "drift": {"step": "步", "storage": "", "loss": "1"},
    },
}

Measured = Iterator[tuple[str, str, float, str]]


# --8<-- [start:reduction_order]
def reduction_order(n: int, seeds: int, device: torch.device) -> Measured:
    """Add the same n numbers up in three orders; n is a power of two."""

    def one_by_one(x):
        total = torch.zeros_like(x[:, 0])
        for column in x.unbind(1):
            total = total + column
        return total

    def in_pairs(x):
        while x.shape[1] > 1:
            x = x[:, ::2] + x[:, 1::2]
        return x[:, 0]

    orders = {"逐个累加": one_by_one, "两两归并": in_pairs, "torch.sum": lambda x: x.sum(1)}
    noise = torch.randn(seeds, n, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        for data, x in {"randn": noise.to(dtype), "|randn|": noise.abs().to(dtype)}.items():
            truth, scale = x.double().sum(1), x.double().abs().sum(1)
            for name, add_up in orders.items():
                error = (add_up(x).double() - truth).abs() / scale
                yield f"{name}，{short(dtype)}，{data}，n={n}", "误差 / Σ|x|（中位数）", error.median(), "1"
# --8<-- [end:reduction_order]


# --8<-- [start:atomics]
@triton.jit
def weight_grad(dy, out, partial, WIDTH: tl.constexpr, ROWS: tl.constexpr, ATOMIC: tl.constexpr):
    """Column sums of dy: each program adds up ROWS rows, then shares them in one of two ways."""
    program, column = tl.program_id(0), tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for row in range(ROWS):
        total += tl.load(dy + (program * ROWS + row) * WIDTH + column)
    if ATOMIC:
        tl.atomic_add(out + column, total)  # whoever arrives first is added first
    else:
        tl.store(partial + program * WIDTH + column, total)  # everyone has a place of its own


def atomics(rows: int, width: int, runs: int, device: torch.device) -> Measured:
    """Repeat one dW many times and count how many different answers come back."""
    dy, programs = torch.randn(rows, width, device=device), rows // 4
    for name, atomic in {"tl.atomic_add": True, "分块部分和": False}.items():
        results = []
        for _ in range(runs):
            out, partial = torch.zeros(width, device=device), torch.zeros(programs, width, device=device)
            weight_grad[(programs,)](dy, out, partial, width, 4, atomic)
            results.append(out if atomic else partial.sum(0))
        bits = torch.stack(results).sort(0).values
        patterns = 1 + (bits.diff(dim=0) != 0).sum(0)
        spread = (bits[-1] - bits[0]) / dy.abs().sum(0)
        varies = bits[-1].bfloat16() != bits[0].bfloat16()
        setting = f"{name}，{programs} 个 program，{runs} 次"
        yield setting, "每个元素的不同结果数（最多）", patterns.max(), "种"
        yield setting, "每个元素的不同结果数（平均）", patterns.double().mean(), "种"
        yield setting, "极差 / Σ|dy|（最大）", spread.max(), "1"
        yield setting, "转成 bf16 后仍会变的元素", varies.double().mean(), "占比"
# --8<-- [end:atomics]


# --8<-- [start:cast_order]
def cast_order(rows: int, width: int, device: torch.device) -> Measured:
    """RMSNorm in bf16: round before the weight (Hugging Face) or once, at the end."""
    x = torch.randn(rows, width, device=device).bfloat16()
    w = (1 + 0.1 * torch.randn(width, device=device)).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    round_twice = w * normed.bfloat16()  # Qwen3RMSNorm
    round_once = (w.float() * normed).bfloat16()  # an all-fp32 kernel

    x, w = x.double(), w.double()
    truth = w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    ulps = (round_twice.view(torch.int16).int() - round_once.view(torch.int16).int()).abs()
    yield f"先转后乘 对 先乘后转，H={width}", "结果不同的元素", (ulps > 0).double().mean(), "占比"
    yield f"先转后乘 对 先乘后转，H={width}", "相差最多", ulps.max(), "ulp"
    for name, y in {"先转后乘（HF）": round_twice, "先乘后转（融合）": round_once}.items():
        yield f"{name}，H={width}", "rms 误差 / rms 真值", rms(y.double() - truth) / rms(truth), "1"
# --8<-- [end:cast_order]


# --8<-- [start:eps_position]
def eps_position(width: int, device: torch.device, eps: float = 1e-6) -> Measured:
    """The same eps inside or outside the square root, on rows of shrinking size."""
    direction = torch.randn(64, width, device=device, dtype=torch.float64)
    direction /= direction.pow(2).mean(-1, keepdim=True).sqrt()
    for size in (1.0, 1e-1, 1e-2, 1e-3, 1e-4):
        x = size * direction
        mean_square = x.pow(2).mean(-1, keepdim=True)
        inside = x / (mean_square + eps).sqrt()
        outside = x / (mean_square.sqrt() + eps)
        changed = (inside.bfloat16() != outside.bfloat16()).double().mean()
        yield f"行 rms = {size:g}，eps = {eps:g}", "相对差（fp64）", rms(outside - inside) / rms(inside), "1"
        yield f"行 rms = {size:g}，eps = {eps:g}", "转成 bf16 后不同的元素", changed, "占比"
# --8<-- [end:eps_position]


# --8<-- [start:rng]
@triton.jit
def keep_mask(mask, n, p, seed, BLOCK: tl.constexpr):
    """Dropout's keep mask from Triton's Philox: element i uses counter i."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask + i, (tl.rand(seed, i) > p).to(tl.int8), mask=i < n)


def rng(n: int, device: torch.device, p: float = 0.1, seed: int = 42) -> Measured:
    """One seed, two generators: the rates agree, the masks don't."""
    ours = torch.empty(n, dtype=torch.int8, device=device)
    keep_mask[(triton.cdiv(n, 1024),)](ours, n, p, seed, 1024)
    torch.manual_seed(seed)
    theirs = F.dropout(torch.ones(n, device=device), p) != 0

    setting, agree = f"p={p}，seed={seed}，{n} 个元素", (ours.bool() == theirs).double().mean()
    yield setting, "保留率：tl.rand", ours.double().mean(), "占比"
    yield setting, "保留率：torch dropout", theirs.double().mean(), "占比"
    yield setting, "两个掩码一致的元素", agree, "占比"
    yield setting, "互相独立时应有的一致率 p²+(1-p)²", p**2 + (1 - p) ** 2, "占比"
# --8<-- [end:rng]


# --8<-- [start:causal_alignment]
def causal_alignment(device: torch.device) -> Measured:
    """q shorter than k: is the triangle anchored at the top left or at the bottom right?"""
    from torch.nn.attention.bias import causal_lower_right

    for queries, keys in ((2, 5), (5, 5)):
        q = torch.randn(1, 4, queries, 64, device=device)
        k, v = torch.randn(2, 1, 4, keys, 64, device=device)
        top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        bottom_right = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(queries, keys))
        # What decoding needs: the last query sees every key, the one before it all but the last.
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible)
        for name, y in {"is_causal=True（左上）": top_left, "causal_lower_right（右下）": bottom_right}.items():
            yield f"{name}，q={queries}，k={keys}", "与逐 token 解码的最大差", (y - truth).abs().max(), "1"
# --8<-- [end:causal_alignment]


# --8<-- [start:master_weights]
def master_weights(lrs: list[float], width: int, device: torch.device) -> Measured:
    """One AdamW step on bf16 weights: how many of them move at all?"""
    for lr in lrs:
        for name, start in {
            "权重 N(0, 0.02²)": 0.02 * torch.randn(width, width, device=device),
            "norm 增益 1.0": torch.ones(width, device=device),
        }.items():
            weight = torch.nn.Parameter(start.bfloat16())
            before = weight.detach().clone()
            weight.grad = torch.randn_like(weight)
            torch.optim.AdamW([weight], lr=lr, weight_decay=0.0).step()
            yield f"{name}，lr={lr:g}", "一步之后没动的 bf16 权重", (weight == before).double().mean(), "占比"


def drift(lr: float, steps: int, device: torch.device) -> Iterator[dict]:
    """Fit one linear layer; compute always in bf16, only the stored weights differ."""
    torch.manual_seed(0)
    start, goal = 0.02 * torch.randn(2, 256, 256, device=device)
    for name, storage in {"bf16 权重": torch.bfloat16, "fp32 主权重": torch.float32}.items():
        torch.manual_seed(1)  # both see the same batches
        weight = torch.nn.Parameter(start.to(storage))
        optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0)
        for step in range(steps + 1):
            x = torch.randn(512, 256, device=device).bfloat16()
            loss = F.mse_loss((x @ weight.bfloat16()).float(), x.float() @ goal)
            if step % max(steps // 50, 1) == 0 or step == steps:
                yield {"step": step, "storage": name, "loss": loss.item()}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
# --8<-- [end:master_weights]


# --8<-- [start:matmul_modes]
def matmul_modes(shapes: list[list[int]], device: torch.device) -> Iterator[dict]:
    """Two switches of cuBLAS that change the numbers of every matmul; error against fp64."""
    switch = torch.backends.cuda.matmul
    saved = switch.allow_tf32, switch.allow_bf16_reduced_precision_reduction
    try:
        for m, n, k in shapes:
            a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
            noise = torch.randn(m, k, device=device) * 2**-9  # bits that TF32 has no room for
            for name, dtype, flag in (
                ("fp32，TF32 ", torch.float32, "allow_tf32"),
                ("bf16，低精度归约", torch.bfloat16, "allow_bf16_reduced_precision_reduction"),
            ):
                left = a.float() + noise if dtype == torch.float32 else a
                truth, seen = left.double() @ b.double(), []
                for on in (False, True):
                    setattr(switch, flag, on)
                    seen.append(left.to(dtype) @ b.to(dtype))
                    error = seen[-1].double() - truth
                    yield {
                        "shape": f"{m}×{n}×{k}",
                        "setting": f"{name}{'开' if on else '关'}",
                        "rms_rel": (rms(error) / rms(truth)).item(),
                        "max_rel": (error.abs().max() / truth.abs().max()).item(),
                        "changed": (seen[-1] != seen[0]).double().mean().item(),
                    }
    finally:
        switch.allow_tf32, switch.allow_bf16_reduced_precision_reduction = saved
# --8<-- [end:matmul_modes]


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square of all elements."""
    return x.double().pow(2).mean().sqrt()


def short(dtype: torch.dtype) -> str:
    """Name of a floating dtype as the article writes it."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]


SEEN_BY = {
    "归约顺序": "Gate 2（误差比）",
    "原子加": "两次运行逐位比较；Gate 2 只看得见量级",
    "dtype 转换顺序": "Gate 2（误差比）",
    "ε 位置": "Gate 1（fp64 前向对照；gradcheck 看不见）",
    "随机数": "不在四类算子内；传入同一掩码，或只比保留率",
    "因果掩码对齐": "不在四类算子内；自定义算子的 Gate 1，形状须含 q ≠ k",
    "主权重": "三关都看不见：两侧优化器相同；须对照 fp32 主权重",
}


def measure(
    *,
    n: int,
    seeds: int,
    rows: int,
    width: int,
    runs: int,
    matmuls: list[list[int]],
    elements: int,
    lrs: list[float],
    drift_lr: float,
    drift_steps: int,
) -> measure_module.Tables:
    """Run the seven demonstrations, the matmul switches and the drift.

    Args:
        n: length of the summed vectors, a power of two.
        seeds: vectors per order of addition.
        rows, width: shape of the RMSNorm input and of dy; width a power of two, rows a multiple of 4.
        runs: repetitions of the weight gradient.
        matmuls: ``[m, n, k]`` per product; a long k with small m, n makes cuBLAS split k.
        elements: elements of the dropout mask.
        lrs: learning rates of the one AdamW step.
        drift_lr, drift_steps: learning rate and length of the drift curve.
    """
    device = measure_module.device()
    demonstrations = {
        "归约顺序": reduction_order(n, seeds, device),
        "原子加": atomics(rows, width, runs, device),
        "dtype 转换顺序": cast_order(rows, width, device),
        "ε 位置": eps_position(width, device),
        "随机数": rng(elements, device),
        "因果掩码对齐": causal_alignment(device),
        "主权重": master_weights(lrs, width, device),
    }
    sources = []
    for done, (source, demonstration) in enumerate(demonstrations.items()):
        measure_module.progress(source, done, len(demonstrations))
        torch.manual_seed(0)
        sources += [
            {"source": source, "setting": setting, "metric": metric, "value": float(value), "unit": unit,
             "seen_by": SEEN_BY[source]}
            for setting, metric, value, unit in demonstration
        ]  # fmt: skip
    torch.manual_seed(0)
    return {
        "sources": sources,
        "matmul": list(matmul_modes(matmuls, device)),
        "drift": list(drift(drift_lr, drift_steps, device)),
    }


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
