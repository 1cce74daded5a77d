"""Correct kernels that differ from the reference in legitimate ways: the gates must accept all of them.

Fewer roundings, other reduction orders, other formulas for the same function, this project's
Triton kernels, Liger's. ``allow`` names overwrites that a kernel makes by design and documents.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from snippets import interpreter  # noqa: F401 - before triton
from snippets.precision import references
from snippets.precision import stand_ins as s
from snippets.precision.mutants import Mutant
from snippets.precision.references import compute_dtype, rotate_half


@dataclass(frozen=True)
class Control:
    """One correct kernel. ``what`` (Chinese) says how it differs from the reference."""

    id: str
    op: str
    kernel: Callable[..., Any]
    what: str
    allow: tuple[str, ...] = ()
    config: str = ""  # module of snippets.kernels whose launch configuration is halved while this control runs

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Run the body with this control's launch configuration; the old one comes back afterwards."""
        if not self.config:
            yield
            return
        table = importlib.import_module(f"snippets.kernels.{self.config}").CONFIG
        old = {k: dict(v) for k, v in table.items()}
        for k, v in table.items():
            # Every size halved: other blocks, so other orders of addition; same function.
            table[k] = {n: x // 2 if n in ("elements", "bytes", "rows", "columns", "waves") and x > 1 else x
                        for n, x in v.items()}  # fmt: skip
        try:
            yield
        finally:
            table.update(old)


CONTROLS: list[Control] = []


def control(op: str, what: str) -> Callable:
    """Register a kernel under its function name."""

    def add(fn: Callable) -> Callable:
        CONTROLS.append(Control(fn.__name__, op, fn, what))
        return fn

    return add


@control("rms_norm", "全程 fp32，只在最后舍入一次")
def rms_one_rounding(x, w, eps):
    c = compute_dtype(x)
    h = x.to(c)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w.to(c)).to(x.dtype)


@control("rms_norm", "torch.nn.functional.rms_norm")
def rms_torch_functional(x, w, eps):
    return F.rms_norm(x, (x.shape[-1],), w, eps)


@control("rms_norm", "平方和分块归约，再合并")
def rms_chunked_mean(x, w, eps):
    def rstd(x, eps):
        c = x.to(compute_dtype(x)).square()
        total = sum(part.sum(-1, keepdim=True) for part in c.split(64, -1))
        return 1 / torch.sqrt(total / x.shape[-1] + eps)

    return s.rms(x, w, eps, rstd=rstd)


@control("rms_norm", "dW 按 16 行一块的 fp32 部分和")
def rms_dw_partials(x, w, eps):
    return s.rms(x, w, eps, dw=lambda t: s.sum_chunks(t, 16))


@control("rms_norm", "dW 按行顺序累加（fp32）")
def rms_dw_sequential(x, w, eps):
    return s.rms(x, w, eps, dw=lambda t: t.cumsum(0)[-1])


@control("rms_norm", "dW 的部分和以存储精度存放，fp32 求和")
def rms_dw_partials_stored_narrow(x, w, eps):
    return s.rms(x, w, eps, dw=lambda t: s.sum_chunks(t, 16, partial=w.dtype))


@control("rms_norm", "写死 fp32：fp64 输入也在 fp32 里算")
def rms_fp32_only(x, w, eps):
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * w.float()).to(x.dtype)


@control("head_norm", "逐头归一化，一次舍入，显式反向")
def head_norm_one_rounding(x, w, eps):
    return s.rms(x, w, eps, out=lambda x, w, r: (x.to(r.dtype) * r * w.to(r.dtype)).to(x.dtype))


@control("swiglu", "没有中间舍入")
def swiglu_no_middle_rounding(gate, up):
    def out(g, u):
        c = compute_dtype(g)
        return (F.silu(g.to(c)) * u.to(c)).to(g.dtype)

    return s.swiglu(gate, up, out=out)


@control("swiglu", "以 x / (1 + exp(−x)) 计算 SiLU")
def swiglu_exp_form(gate, up):
    def out(g, u):
        c = compute_dtype(g)
        x = g.to(c)
        return (x / (1 + torch.exp(-x))).to(g.dtype) * u

    return s.swiglu(gate, up, out=out)


@control("swiglu", "写死 fp32，遇 fp64 报错")
def swiglu_fp32_only(gate, up):
    if gate.dtype == torch.float64:
        raise KeyError(gate.dtype)
    return s.swiglu(gate, up)


@control("rope", "显式反向，fp32 内只舍入一次")
def rope_one_rounding(q, k, cos, sin):
    return s.rope(q, k, cos, sin)


@control("rope", "两半分开计算，每步舍入")
def rope_halves(q, k, cos, sin):
    def turn(x, cos, sin, sign=1.0):
        co, si = cos.unsqueeze(1), sin.unsqueeze(1) * sign
        return torch.addcmul(x * co, rotate_half(x), si)

    return s.rope(q, k, cos, sin, turn=turn)


@control("cross_entropy", "分块的在线 log-sum-exp，显式梯度")
def ce_online(logits, labels, ignore_index=-100, num_items_in_batch=None):
    def lse(z):
        m = torch.full_like(z[..., :1], -torch.inf)
        total = torch.zeros_like(m)
        for part in z.split(1000, -1):
            new = torch.maximum(m, part.amax(-1, keepdim=True))
            total = total * torch.exp(m - new) + torch.exp(part - new).sum(-1, keepdim=True)
            m = new
        return m + total.log()

    return s.cross_entropy(logits, labels, ignore_index, num_items_in_batch, lse=lse)


@control("cross_entropy", "写死 fp32：fp64 输入也在 fp32 里算")
def ce_fp32_only(logits, labels, ignore_index=-100):
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore_index).to(compute_dtype(logits))


@control("cross_entropy", "返回输入精度的 loss（Liger 直接收到 bf16 logits 时如此）")
def ce_loss_in_logits_dtype(logits, labels, ignore_index=-100):
    return s.cross_entropy(logits, labels, ignore_index).to(logits.dtype)


@control("causal_lm_loss", "截去最后一个位置的写法（logits[:, :-1] 对 labels[:, 1:]）")
def loss_sliced(logits, labels):
    v = logits.shape[-1]
    return references.cross_entropy(logits[:, :-1].reshape(-1, v), labels[:, 1:].reshape(-1))


# ---------------------------------------------------------------- Triton: ours and Liger's


@functools.cache
def ours() -> list[Control]:
    """This project's kernels; on a CPU only in Triton's interpreter."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return []  # Triton cannot compile for a CPU, and its interpreter must be chosen before the import
    k = importlib.import_module("snippets.kernels")
    return [
        Control("ours_rms_norm", "rms_norm", k.rms_norm, "本项目的 Triton RMSNorm"),
        Control("ours_head_norm", "head_norm", k.rms_norm, "本项目的 Triton RMSNorm（q_norm、k_norm）"),
        Control("ours_swiglu", "swiglu", k.swiglu, "本项目的 Triton SwiGLU"),
        Control("ours_rope", "rope", k.rope, "本项目的 Triton RoPE"),
        Control("ours_cross_entropy", "cross_entropy", k.cross_entropy, "本项目的 Triton 交叉熵"),
        Control("ours_rms_norm_blocks", "rms_norm", k.rms_norm, "本项目的 RMSNorm，块大小减半", (), "rms_norm"),
        Control("ours_swiglu_blocks", "swiglu", k.swiglu, "本项目的 SwiGLU，块大小减半", (), "swiglu"),
        Control("ours_cross_entropy_blocks", "cross_entropy", k.cross_entropy, "本项目的交叉熵，块大小减半",
                (), "cross_entropy"),
        Control("ours_causal_lm_loss", "causal_lm_loss", k.causal_lm_loss, "本项目的 Triton 损失（含错位）"),
    ]  # fmt: skip


def _liger_cross_entropy(logits: Any, labels: Any, ignore_index: int = -100) -> Any:
    """Liger's cross entropy as apply_liger_kernel_to_qwen3(cross_entropy=True) installs it: after transformers' upcast."""
    from liger_kernel.ops import LigerCrossEntropyFunction

    z = logits.to(compute_dtype(logits))
    z = z.clone() if z is logits else z
    return LigerCrossEntropyFunction.apply(z, labels, None, ignore_index)[0]


@functools.cache
def liger() -> list[Control]:
    """Liger 0.8.5's four kernels as it installs them in a Qwen3 model; CUDA only.

    Its RMSNorm writes dX into dy, its SwiGLU and its RoPE write into what they were given, its cross
    entropy turns the fp32 copy of the logits into the gradient: documented, so declared here.
    """
    if not torch.cuda.is_available():
        return []
    ops = importlib.import_module("liger_kernel.ops")

    def liger_rms_norm(x, w, eps):
        return ops.LigerRMSNormFunction.apply(x, w, eps, 0.0, "llama", True, None)

    def liger_swiglu(gate, up):
        return ops.LigerSiLUMulFunction.apply(gate, up)

    def liger_rope(q, k, cos, sin):
        return ops.LigerRopeFunction.apply(q, k, cos, sin)

    def liger_cross_entropy(logits, labels, ignore_index=-100):
        # Contiguous, as a model's logits are: see public_faults for what happens otherwise.
        return _liger_cross_entropy(logits.contiguous(), labels, ignore_index)

    all_ = ("inputs", "grad_output", "saved")
    return [
        Control("liger_rms_norm", "rms_norm", liger_rms_norm, "Liger RMSNorm（就地写 dy）", all_),
        Control("liger_head_norm", "head_norm", liger_rms_norm, "Liger RMSNorm 用于 q_norm/k_norm", all_),
        Control("liger_swiglu", "swiglu", liger_swiglu, "Liger SwiGLU（就地写保存的张量）", all_),
        Control("liger_rope", "rope", liger_rope, "Liger RoPE（就地写 q、k）", all_),
        Control("liger_cross_entropy", "cross_entropy", liger_cross_entropy, "Liger 交叉熵（前向即写梯度）", all_),
    ]


def public_faults() -> list[Mutant]:
    """Faults in released kernels that these gates found; CUDA only.

    Liger 0.8.5, ops/cross_entropy.py: cross_entropy_forward copies logits whose last stride is not 1,
    and asks the copy, made without grad mode, whether it requires grad. The answer is no, so the
    gradient is never computed and backward returns the logits in its place.
    """
    if not torch.cuda.is_available():
        return []
    return [
        Mutant("liger_ce_strided_logits", "cross_entropy", _liger_cross_entropy, "gate1",
               "Liger 交叉熵收到转置的 logits：不算梯度，把 logits 当梯度返回", "liger-kernel 0.8.5"),
    ]  # fmt: skip


def find(name: str) -> Control:
    """The control with this id.

    Raises:
        KeyError: unknown here (Triton controls need a GPU or TRITON_INTERPRET=1).
    """
    return {c.id: c for c in all_controls()}[name]


def all_controls() -> list[Control]:
    """Every control that can run here."""
    return CONTROLS + ours() + liger()
