"""Broken kernels, each wrong in one realistic way, and the gate that should reject each.

Where a mutant repeats a public bug, ``source`` names it. All are PyTorch stand-ins, so they run
on any device. ``expected`` is the first gate that is built to see this kind of fault; another
gate may see it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from snippets.precision import references
from snippets.precision import stand_ins as s
from snippets.precision.references import compute_dtype


@dataclass(frozen=True)
class Mutant:
    """One broken kernel. ``what`` (Chinese) is the one-line fault; ``source`` a public bug, or ""."""

    id: str
    op: str
    kernel: Callable[..., Any]
    expected: str
    what: str
    source: str = ""


MUTANTS: list[Mutant] = []


def mutant(op: str, expected: str, what: str, source: str = "") -> Callable:
    """Register a kernel under its function name."""

    def add(fn: Callable) -> Callable:
        MUTANTS.append(Mutant(fn.__name__, op, fn, expected, what, source))
        return fn

    return add


# ------------------------------------------------------------------------------- RMSNorm


@mutant("rms_norm", "gate1", "eps 加在根号外")
def rms_eps_outside(x, w, eps):
    def rstd(x, eps):
        return 1 / (x.to(compute_dtype(x)).square().mean(-1, keepdim=True).sqrt() + eps)

    def dx(x, w, r, dy):  # consistent with its own forward, so gradcheck agrees with it
        g, xh = dy.to(r.dtype) * w.to(r.dtype), x.to(r.dtype) * r
        root = 1 / r - eps
        return (r * (g - xh * (g * xh).mean(-1, keepdim=True) / (r * root).clamp_min(1e-30))).to(x.dtype)

    return s.rms(x, w, eps, rstd=rstd, dx=dx)


@mutant("rms_norm", "gate1", "忽略 eps 参数，写死 1e-6")
def rms_eps_ignored(x, w, eps):
    return s.rms(x, w, 1e-6)


@mutant("rms_norm", "gate1", "均值除以补齐后的块宽，而非真实宽度")
def rms_padded_mean(x, w, eps):
    def rstd(x, eps):
        c = x.to(compute_dtype(x))
        width = 1 << (x.shape[-1] - 1).bit_length()
        return torch.rsqrt(c.square().sum(-1, keepdim=True) / width + eps)

    return s.rms(x, w, eps, rstd=rstd)


@mutant("rms_norm", "gate2", "平方和不升精度，在 bf16 里算")
def rms_square_in_storage_dtype(x, w, eps):
    return s.rms(x, w, eps, rstd=lambda x, e: torch.rsqrt(x.square().mean(-1, keepdim=True) + e).to(compute_dtype(x)))


@mutant("rms_norm", "gate2", "rstd 缓冲区是 bf16（fp64 构建除外）", "Liger casting_mode none 的同类")
def rms_rstd_bf16(x, w, eps):
    def rstd(x, eps):
        r = s.rms_rstd(x, eps)
        return r if x.dtype == torch.float64 else r.bfloat16().to(r.dtype)

    return s.rms(x, w, eps, rstd=rstd)


@mutant("rms_norm", "gate2", "dW 在 bf16 里逐块累加", "Liger #950")
def rms_dw_bf16_accumulation(x, w, eps):
    return s.rms(x, w, eps, dw=lambda t: s.sum_chunks(t, 16, total=w.dtype if w.dtype == torch.bfloat16 else None))


@mutant("rms_norm", "gate1", "dW 漏掉不足一块的尾行")
def rms_dw_drops_tail(x, w, eps):
    return s.rms(x, w, eps, dw=lambda t: t[: t.shape[0] // 16 * 16].sum(0))


@mutant("rms_norm", "gate1", "dW 每块覆盖写，而非累加")
def rms_dw_overwritten(x, w, eps):
    return s.rms(x, w, eps, dw=lambda t: t[(t.shape[0] - 1) // 16 * 16 :].sum(0))


@mutant("rms_norm", "gate1", "行掩码差一：最后一行没有输出")
def rms_last_row_missing(x, w, eps):
    def out(x, w, r):
        y = s.rms_apply(x, w, r).reshape(-1, x.shape[-1]).clone()
        y[-1] = 0
        return y.view(x.shape)

    return s.rms(x, w, eps, out=out)


@mutant("rms_norm", "gate1", "输出列尾未写（torch.empty 的残留）", "wafer.ai 的残留内存一例")
def rms_tail_uninitialised(x, w, eps):
    def out(x, w, r):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = max(x.shape[-1] // 4 * 4, 1)
        y[..., :n] = s.rms_apply(x, w, r)[..., :n]
        return y

    return s.rms(x, w, eps, out=out)


@mutant("rms_norm", "gate1", "行数超过 65535 时网格溢出", "apex #411")
def rms_grid_overflow(x, w, eps):
    def out(x, w, r):
        y = s.rms_apply(x, w, r).reshape(-1, x.shape[-1]).clone()
        y[65535:] = 0
        return y.view(x.shape)

    return s.rms(x, w, eps, out=out)


@mutant("rms_norm", "gate1", "dX 缺第二项（归一化对 x 的依赖）")
def rms_dx_missing_term(x, w, eps):
    return s.rms(x, w, eps, dx=lambda x, w, r, dy: (dy.to(r.dtype) * w.to(r.dtype) * r).to(x.dtype))


@mutant("rms_norm", "gate1", "rstd 存在模块级缓存，被下一次前向覆盖")
def rms_stale_rstd(x, w, eps):
    def fwd(x, w):
        _LAST["rstd"] = s.rms_rstd(x, eps)
        return s.rms_apply(x, w, _LAST["rstd"]), ()

    def bwd(_, dys, ts):
        r = _LAST["rstd"]
        return s.rms_dx(*ts, r, dys[0]), s.rms_terms(ts[0], r, dys[0]).sum(0).to(ts[1].dtype)

    return s.explicit(fwd, bwd, x, w)


_LAST: dict[str, Tensor] = {}


@mutant("rms_norm", "gate1", "结果按地址与形状缓存，换数据不重算")
def rms_cached_by_address(x, w, eps):
    key = (x.data_ptr(), tuple(x.shape), x.dtype)
    if _BY_ADDRESS.get("key") != key:
        _BY_ADDRESS.update(key=key, rstd=s.rms_rstd(x.detach(), eps))
    return s.rms(x, w, eps, rstd=lambda x, e: _BY_ADDRESS["rstd"])


_BY_ADDRESS: dict[str, Any] = {}


@mutant("rms_norm", "gate1", "反向假定 dy 连续", "FA #355, fla #871")
def rms_dy_assumed_contiguous(x, w, eps):
    def flat(dy):
        return dy.as_strided(dy.shape, torch.empty(dy.shape, device="meta").stride())

    def bwd(saved, dys, ts):
        dy = flat(dys[0])
        return s.rms_dx(*ts, saved[0], dy), s.rms_terms(ts[0], saved[0], dy).sum(0).to(ts[1].dtype)

    def fwd(x, w):
        r = s.rms_rstd(x, eps)
        return s.rms_apply(x, w, r), (r,)

    return s.explicit(fwd, bwd, x, w)


@mutant("rms_norm", "gate1", "dX 写进 dy 的存储，残差支路读到坏值", "Liger #1305 的同类")
def rms_writes_into_dy(x, w, eps):
    def dx(x, w, r, dy):
        return dy.copy_(s.rms_dx(x, w, r, dy)) if dy.is_contiguous() else s.rms_dx(x, w, r, dy)

    def fwd(x, w):
        r = s.rms_rstd(x, eps)
        return s.rms_apply(x, w, r), (r,)

    def bwd(saved, dys, ts):
        dw = s.rms_terms(ts[0], saved[0], dys[0]).sum(0).to(ts[1].dtype)
        return dx(*ts, saved[0], dys[0]), dw

    return s.explicit(fwd, bwd, x, w)


@mutant("rms_norm", "gate1", "权重的梯度没有返回")
def rms_no_weight_grad(x, w, eps):
    return s.rms(x, w.detach(), eps)


@mutant("head_norm", "gate1", "q_norm/k_norm 把整个 (heads×dim) 当一行归一化")
def head_norm_over_all_heads(x, w, eps):
    r = s.rms_rstd(x.flatten(-2), eps).unsqueeze(-1)
    return references.rms_norm(x, w, eps) * 0 + w * (x.to(r.dtype) * r).to(x.dtype)


# -------------------------------------------------------------------------------- SwiGLU


@mutant("swiglu", "gate1", "SiLU 导数缺 (1−σ) 项")
def swiglu_wrong_derivative(gate, up):
    def grads(g, u, d):
        sg = torch.sigmoid(g)
        return d * u * sg, d * F.silu(g)

    return s.swiglu(gate, up, grads=grads)


@mutant("swiglu", "gate1", "反向里 gate 与 up 的梯度对调")
def swiglu_swapped_grads(gate, up):
    return s.swiglu(gate, up, grads=lambda g, u, d: s.swiglu_grads(g, u, d)[::-1])


@mutant("swiglu", "gate1", "用 tanh 近似的 GELU 代替 SiLU")
def swiglu_gelu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


@mutant("swiglu", "gate1", "梯度就地写进保存的张量，第二次反向出错", "Liger SwiGLU 的做法，未声明时")
def swiglu_overwrites_saved(gate, up):
    def grads(g, u, d):
        dg, du = s.swiglu_grads(g, u, d)
        with torch.no_grad():
            g.data.copy_(dg)
            u.data.copy_(du)
        return dg, du

    return s.swiglu(gate, up, grads=grads)


@mutant("swiglu", "gate2", "σ 以 bf16 保存供反向使用（fp64 构建除外）")
def swiglu_sigmoid_bf16(gate, up):
    def grads(g, u, d):
        c = compute_dtype(g)
        sg = torch.sigmoid(g.to(c))
        sg = sg if g.dtype == torch.float64 else sg.bfloat16().to(c)
        x, y, z = g.to(c), u.to(c), d.to(c)
        return (z * y * sg * (1 + x * (1 - sg))).to(g.dtype), (z * x * sg).to(u.dtype)

    return s.swiglu(gate, up, grads=grads)


@mutant("swiglu", "gate2", "快速 exp 在 |x| 大时溢出：e^x/(1+e^x)")
def swiglu_overflowing_sigmoid(gate, up):
    def out(g, u):
        c = compute_dtype(g)
        e = torch.exp(g.to(c))
        return (g.to(c) * e / (1 + e)).to(g.dtype) * u

    return s.swiglu(gate, up, out=out)


# ---------------------------------------------------------------------------------- RoPE


@mutant("rope", "gate1", "反向沿用前向的转角符号")
def rope_backward_sign(q, k, cos, sin):
    return s.rope(q, k, cos, sin, back=lambda dys, co, si: [s.rotate(d, co, si) for d in dys])


@mutant("rope", "gate1", "按相邻两维交错旋转，而非前后两半")
def rope_interleaved(q, k, cos, sin):
    def turn(x, cos, sin, sign=1.0):
        half = x.shape[-1] // 2
        co, si = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1) * sign
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * co - b * si, b * co + a * si), -1).flatten(-2)

    return s.rope(q, k, cos, sin, turn=turn)


@mutant("rope", "gate1", "忽略 cos/sin 的 batch 下标，总用第 0 行", "Liger #477")
def rope_ignores_batch(q, k, cos, sin):
    return s.rope(q, k, cos[:1], sin[:1])


@mutant("rope", "gate1", "k 的梯度没有转回去")
def rope_dk_not_rotated(q, k, cos, sin):
    return s.rope(q, k, cos, sin, back=lambda dys, co, si: [s.rotate(dys[0], co, si, -1.0), dys[1]])


@mutant("rope", "gate2", "cos/sin 先舍入到 bf16（fp64 构建除外）")
def rope_tables_bf16(q, k, cos, sin):
    if q.dtype != torch.float64:
        cos, sin = (t.bfloat16().to(t.dtype) for t in (cos, sin))
    return s.rope(q, k, cos, sin)


# ------------------------------------------------------------------------- cross entropy


@mutant("cross_entropy", "gate1", "分母是全部 token，而非有效 token")
def ce_mean_over_all(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch,
                           count=lambda keep, n: keep.numel() if n is None else n)  # fmt: skip


@mutant("cross_entropy", "gate1", "被忽略的行仍有梯度")
def ce_ignored_rows_keep_grad(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, grad_keep=torch.ones_like)


@mutant("cross_entropy", "gate2", "log-sum-exp 不减最大值")
def ce_no_max(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch,
                           lse=lambda z: torch.exp(z).sum(-1, keepdim=True).log())  # fmt: skip


def _lse_scaled_first(z):
    """exp(x) = exp2(x log2 e), multiplied before the maximum is subtracted: a tile of finfo.min becomes -inf - -inf."""
    tiles = [t * 1.4426950408889634 for t in z.tensor_split(8, -1) if t.shape[-1]]
    tops = [t.amax(-1, keepdim=True) for t in tiles]
    top = torch.cat(tops, -1).amax(-1, keepdim=True)
    total = sum((t - m).exp2().sum(-1, keepdim=True) * (m - top).exp2() for t, m in zip(tiles, tops, strict=True))
    return (top + total.log2()) / 1.4426950408889634


@mutant("cross_entropy", "gate2", "在线 softmax 先乘 log2(e) 再减最大值，掩码行成 NaN")
def ce_scaled_before_subtracting(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, lse=_lse_scaled_first)


@mutant("cross_entropy", "gate1", "反向不乘上游梯度（假定为 1）")
def ce_ignores_grad_output(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, scale=torch.ones_like)


@mutant("cross_entropy", "gate1", "梯度没有除以有效 token 数")
def ce_grad_not_divided(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, grad_count=lambda keep, n: 1)


@mutant("cross_entropy", "gate1", "接受 ignore_index 却写死 -100", "Liger #974 的同类")
def ce_fixed_ignore_index(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, -100, num_items_in_batch)


@mutant("cross_entropy", "gate1", "num_items_in_batch 被忽略（梯度累积时等于均值的均值）", "HF #34191")
def ce_ignores_num_items(logits, labels, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(logits, labels, ignore_index, None)


@mutant("cross_entropy", "gate1", "词表尾块的梯度漏掉")
def ce_vocab_tail_no_grad(logits, labels, ignore_index=-100, num_items_in_batch=None):
    def finish(d):
        d[..., d.shape[-1] // 128 * 128 if d.shape[-1] > 128 else d.shape[-1] :] = 0
        return d

    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, finish=finish)


@mutant("cross_entropy", "gate2", "lse 以 bf16 保存供反向使用（fp64 构建除外）")
def ce_lse_bf16(logits, labels, ignore_index=-100, num_items_in_batch=None):
    def lse(z):
        v = s.lse(z)
        return v if z.dtype == torch.float64 else v.bfloat16()

    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, lse=lse)


@mutant("causal_lm_loss", "gate1", "标签没有错位：位置 t 预测它自己")
def loss_without_shift(logits, labels):
    return references.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


@mutant("causal_lm_loss", "gate1", "标签多错一位：位置 t 预测 t+2")
def loss_shifted_twice(logits, labels):
    y = F.pad(labels, (0, 2), value=-100)[..., 2:]
    return references.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
