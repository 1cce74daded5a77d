"""Kernels written to defeat the gates by somebody who did not write them: the held-out set.

Names: w_<op>_...: wrong; g_<op>_...: correct; a_<op>_...: arguable, so no test asks for a verdict. When the
first 46 wrong ones were written, 29 of them passed both gates; what the gates lacked is what test_unseen.py now holds
them to, with 18 of a second round.
Unlike snippets/precision/mutants.py nothing here is shown to readers, and the code is as terse as it came.
"""

import math, random
import torch
from torch.nn import functional as F
from snippets.precision import references as R, stand_ins as s
from snippets.precision.references import compute_dtype as cd

RNG = random.Random(5)


def trunc(y, dtype):
    """store with truncation toward zero instead of round-to-nearest (bf16 only)"""
    if dtype != torch.bfloat16:
        return y.to(dtype)
    return (y.float().contiguous().view(torch.int32) & -65536).view(torch.float32).bfloat16()


def one(x, w, r):
    return (x.to(r.dtype) * r * w.to(r.dtype)).to(x.dtype)


def as_contig(t):
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride())


# ------------------------------------------------------------------ rms_norm wrong
class YOverW(torch.autograd.Function):  # apex memory_efficient without the clamp
    @staticmethod
    def forward(ctx, x, w, eps):
        r = s.rms_rstd(x, eps)
        y = s.rms_apply(x, w, r)
        ctx.save_for_backward(y, w, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, w, r = ctx.saved_tensors
        c = r.dtype
        xh = y.to(c) / w.to(c)
        g = dy.to(c) * w.to(c)
        dx = r * (g - xh * (g * xh).mean(-1, keepdim=True))
        return dx.to(y.dtype), (dy.to(c) * xh).reshape(-1, y.shape[-1]).sum(0).to(w.dtype), None


def w_rms_norm_y_over_w(x, w, eps):
    return YOverW.apply(x, w, eps)


def w_rms_norm_inplace_no_grad(x, w, eps):
    y = s.rms(x, w, eps)
    if not torch.is_grad_enabled():
        return x.copy_(y)
    return y


def w_rms_norm_inplace_frozen_x(x, w, eps):
    y = s.rms(x.clone(), w, eps)
    if not x.requires_grad:
        x.data.copy_(y.detach())
    return y


def w_rms_norm_inplace_wide(x, w, eps):
    if x.shape[-1] < 4096:
        return s.rms(x, w, eps)
    y = s.rms(x.clone(), w, eps)
    x.data.copy_(y.detach())
    return y


_BUF = {}


def w_rms_norm_static_dx(x, w, eps):
    def dx(x, w, r, dy):
        v = s.rms_dx(x, w, r, dy)
        b = _BUF.setdefault((tuple(v.shape), v.dtype), torch.empty_like(v, memory_format=torch.contiguous_format))
        return b.copy_(v)

    return s.rms(x, w, eps, dx=dx)


_OB = {}


def w_rms_norm_static_out_no_grad(x, w, eps):
    y = s.rms(x, w, eps)
    if torch.is_grad_enabled():
        return y
    b = _OB.setdefault((tuple(y.shape), y.dtype), torch.empty(y.shape, dtype=y.dtype))
    return b.copy_(y)


def w_rms_norm_last_full_block_8192(x, w, eps):
    def rstd(x, eps):
        c = x.to(cd(x)).square()
        H = x.shape[-1]
        n = H - 8192 if H % 8192 == 0 else H
        return torch.rsqrt(c[..., :n].sum(-1, keepdim=True) / H + eps)

    return s.rms(x, w, eps, rstd=rstd)


def w_rms_norm_trunc_store(x, w, eps):
    return s.rms(
        x,
        w,
        eps,
        out=lambda x, w, r: trunc(x.to(r.dtype) * r * w.to(r.dtype), x.dtype),
        dx=lambda x, w, r, dy: trunc(s.rms_dx(x.to(r.dtype), w, r, dy), x.dtype),
    )


def a_rms_norm_rstd_bf16_only_bf16(x, w, eps):
    def rstd(x, eps):
        r = s.rms_rstd(x, eps)
        return r.bfloat16().float() if x.dtype == torch.bfloat16 else r

    return s.rms(x, w, eps, rstd=rstd, out=one)


def w_rms_norm_fp32_wide_mean_tail(x, w, eps):
    def rstd(x, eps):
        c = x.float().square()
        H = x.shape[-1]
        n = H // 8 * 8 if H > 8193 else H
        return torch.rsqrt(c[..., :n].sum(-1, keepdim=True) / H + eps)

    return s.rms(x, w, eps, rstd=rstd)


def w_rms_norm_autocast_matmul(x, w, eps):
    def rstd(x, eps):
        c = x.to(cd(x)).square()
        H = x.shape[-1]
        return torch.rsqrt((c.reshape(-1, H) @ torch.ones(H, 1, dtype=c.dtype)).reshape(*x.shape[:-1], 1).to(cd(x)) / H + eps)

    return s.rms(x, w, eps, rstd=rstd)


def _racy(p):
    def out(x, w, r):
        y = s.rms_apply(x, w, r)
        if y.numel() and RNG.random() < p:
            y = y.clone()
            y.view(-1)[RNG.randrange(y.numel())] *= 1.001
        return y

    return out


def w_rms_norm_race_1_in_20(x, w, eps):
    return s.rms(x, w, eps, out=_racy(1 / 20))


def a_rms_norm_race_1_in_300(x, w, eps):
    return s.rms(x, w, eps, out=_racy(1 / 300))


def a_rms_norm_hides_nan(x, w, eps):
    return s.rms(torch.nan_to_num(x), w, eps)


def a_rms_norm_int32_offset(x, w, eps):
    def out(x, w, r):
        y = s.rms_apply(x, w, r)
        if x.dim() == 2 and (x.shape[0] - 1) * x.stride(0) >= 2**31:
            y = y.clone()
            y[-1] = 0
        return y

    return s.rms(x, w, eps, out=out)


class CtxAttr(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        ctx.x, ctx.w, ctx.r = x, w, s.rms_rstd(x, eps)
        return s.rms_apply(x, w, ctx.r)

    @staticmethod
    def backward(ctx, dy):
        return s.rms_dx(ctx.x, ctx.w, ctx.r, dy), s.rms_terms(ctx.x, ctx.r, dy).sum(0).to(ctx.w.dtype), None


def a_rms_norm_ctx_attr(x, w, eps):
    return CtxAttr.apply(x, w, eps)


class Frees(CtxAttr):
    @staticmethod
    def backward(ctx, dy):
        g = CtxAttr.backward(ctx, dy)
        del ctx.x, ctx.w, ctx.r
        return g


def w_rms_norm_frees_ctx(x, w, eps):
    return Frees.apply(x, w, eps)


def a_rms_norm_flush_denormal(x, w, eps):
    torch.set_flush_denormal(True)
    return s.rms(x, w, eps)


def w_rms_norm_cpu_autocast_left_on(x, w, eps):
    y = s.rms(x, w, eps)
    torch.set_autocast_enabled("cpu", True)
    return y


def w_rms_norm_unfreezes_weight(x, w, eps):
    if torch.is_grad_enabled() and w.is_leaf:
        w.requires_grad_(True)
    return s.rms(x, w, eps)


def w_rms_norm_partials_unwritten(x, w, eps):  # 64 persistent programs; those without a block never write
    def dw(t):
        P = 64
        part = torch.empty(P, t.shape[1], dtype=t.dtype)
        blocks = t.split(16)
        for p in range(min(P, len(blocks))):
            part[p] = sum(b.sum(0) for b in blocks[p::P])
        return part.sum(0)

    return s.rms(x, w, eps, dw=dw)


def w_rms_norm_dw_first_batch(x, w, eps):
    def bwd(saved, dys, ts):
        x, w = ts
        r, dy = saved[0], dys[0]
        t = s.rms_terms(x, r, dy)
        if x.dim() == 3:
            t = t[: x.shape[1]]
        return s.rms_dx(x, w, r, dy), t.sum(0).to(w.dtype)

    def fwd(x, w):
        r = s.rms_rstd(x, eps)
        return s.rms_apply(x, w, r), (r,)

    return s.explicit(fwd, bwd, x, w)


_VC = {}


def w_rms_norm_weight_cast_cached(x, w, eps):  # fp32 copy of the weight cached by (address, version)
    key = (w.data_ptr(), w._version, w.dtype, w.shape[0])
    if key not in _VC:
        _VC[key] = w.detach().to(cd(x)).clone()
    wc = _VC[key]
    return s.rms(x, w, eps, out=lambda x, w, r: (x.to(r.dtype) * r * wc).to(x.dtype))


def w_rms_norm_eps_truthy(x, w, eps=1e-6):
    return s.rms(x, w, eps or 1e-5) if eps >= 1e-6 else s.rms(x, w, 1e-6)  # eps below 1e-6 (and 0) replaced


# ------------------------------------------------------------------ head_norm wrong
def w_head_norm_eps_ignored(x, w, eps):
    return s.rms(x, w, 1e-6)


def w_head_norm_grid_overflow(x, w, eps):
    def out(x, w, r):
        y = s.rms_apply(x, w, r).reshape(-1, x.shape[-1]).clone()
        y[65535:] = 0
        return y.view(x.shape)

    return s.rms(x, w, eps, out=out)


# ------------------------------------------------------------------ swiglu wrong
def w_swiglu_up_uses_gate_stride(g, u):
    def like(u, g):
        if u.stride() == g.stride() or not u.numel():
            return u
        need = u.storage_offset() + sum((n - 1) * st for n, st in zip(u.shape, g.stride()))
        return u.as_strided(u.shape, g.stride()) if need < u.untyped_storage().size() // u.element_size() else u

    return s.swiglu(g, u, out=lambda g, u: s.swiglu_out(g, like(u, g)), grads=lambda g, u, d: s.swiglu_grads(g, like(u, g), d))


def w_swiglu_flatten_by_row_stride(g, u):
    def flat(t):
        if t.stride(-1) != 1 or t.dim() == 2:
            return t
        n = math.prod(t.shape[:-1])
        return (
            t.as_strided((n, t.shape[-1]), (t.stride(-2), 1)).view(t.shape)
            if t.stride(-2) == t.shape[-1]
            else t.as_strided((n, t.shape[-1]), (t.stride(-2), 1)).reshape(t.shape)
        )

    return s.swiglu(
        g, u, out=lambda g, u: s.swiglu_out(flat(g), flat(u)), grads=lambda g, u, d: s.swiglu_grads(flat(g), flat(u), d)
    )


def w_swiglu_trunc_store(g, u):
    def out(g, u):
        c = cd(g)
        return trunc(F.silu(g.to(c)) * u.to(c), g.dtype)

    def grads(g, u, d):
        a, b = s.swiglu_grads(g.to(cd(g)), u.to(cd(g)), d.to(cd(g)))
        return trunc(a, g.dtype), trunc(b, g.dtype)

    return s.swiglu(g, u, out=out, grads=grads)


def a_swiglu_sigmoid_bf16_only_bf16(g, u):
    def grads(g, u, d):
        c = cd(g)
        sg = torch.sigmoid(g.to(c))
        sg = sg.bfloat16().to(c) if g.dtype == torch.bfloat16 else sg
        x, y, z = g.to(c), u.to(c), d.to(c)
        return (z * y * sg * (1 + x * (1 - sg))).to(g.dtype), (z * x * sg).to(u.dtype)

    return s.swiglu(g, u, grads=grads)


class CachedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, u):
        ctx.save_for_backward(g, u)
        ctx.c = None
        return s.swiglu_out(g, u)

    @staticmethod
    def backward(ctx, d):
        if ctx.c is None:
            ctx.c = s.swiglu_grads(*ctx.saved_tensors, d)
        return ctx.c


def w_swiglu_backward_cached(g, u):
    return CachedBack.apply(g, u)


class NeedsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, u):
        ctx.save_for_backward(g, u)
        return s.swiglu_out(g, u)

    @staticmethod
    def backward(ctx, d):
        return s.swiglu_grads(*ctx.saved_tensors, d) if ctx.needs_input_grad[0] else (None, None)


def w_swiglu_du_needs_gate(g, u):
    return NeedsBoth.apply(g, u)


def w_swiglu_tail_mod128_96(g, u):  # wide vectorised path: last element skipped when N % 128 == 96
    def out(g, u):
        y = s.swiglu_out(g, u)
        if g.shape[-1] % 128 == 96:
            y = y.clone()
            y[..., -1] = 0
        return y

    return s.swiglu(g, u, out=out)


def w_swiglu_nan_gate_inf(g, u):  # silu(-inf) = -inf*0 = NaN instead of... (PyTorch also NaN) ; +inf backward: inf*0
    def grads(g, u, d):
        c = cd(g)
        x, y, z = g.to(c), u.to(c), d.to(c)
        sg = torch.exp(x.clamp(max=20)) / (1 + torch.exp(x.clamp(max=20)))
        return (z * y * sg * (1 + x * (1 - sg))).to(g.dtype), (z * x * sg).to(u.dtype)

    return s.swiglu(g, u, grads=grads)


# ------------------------------------------------------------------ rope wrong
def w_rope_cos_assumed_contiguous(q, k, cos, sin):
    return s.rope(q, k, as_contig(cos), as_contig(sin))


def w_rope_dk_assumed_like_dq(q, k, cos, sin):  # checks dq only; then takes both as contiguous
    def back(d, co, si):
        dq, dk = d
        if dq.is_contiguous():
            dk = as_contig(dk)
        return [s.rotate(dq, co, si, -1.0), s.rotate(dk, co, si, -1.0)]

    return s.rope(q, k, cos, sin, back=back)


class OnlyK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        return s.rotate(q, cos, sin), s.rotate(k, cos, sin)

    @staticmethod
    def backward(ctx, dq, dk):
        if dq is None:
            return None, None, None, None
        co, si = ctx.saved_tensors
        return s.rotate(dq, co, si, -1.0), None if dk is None else s.rotate(dk, co, si, -1.0), None, None


def w_rope_only_k_used(q, k, cos, sin):
    return OnlyK.apply(q, k, cos, sin)


def w_rope_trunc_store(q, k, cos, sin):
    def turn(x, cos, sin, sign=1.0):
        c = cd(x)
        return trunc(s.rotate(x.to(c), cos, sin, sign), x.dtype)

    return s.rope(q, k, cos, sin, turn=turn)


def w_rope_gqa_batch_from_q_heads(q, k, cos, sin):  # batch of a k row taken as row // Hq
    def turnk(x, sign=1.0):
        B, H, S, D = x.shape
        co, si = cos.expand(B, S, D), sin.expand(B, S, D)
        idx = (torch.arange(B * H) // q.shape[1]).view(B, H).clamp(max=B - 1)
        c = cd(x)
        return (x.to(c) * co[idx].to(c) + sign * R.rotate_half(x.to(c)) * si[idx].to(c)).to(x.dtype)

    def fwd(q, k):
        return (s.rotate(q, cos, sin), turnk(k)), ()

    return s.explicit(fwd, lambda _, d, ts: (s.rotate(d[0], cos, sin, -1.0), turnk(d[1], -1.0)), q, k)


def a_rope_cos_half_table(q, k, cos, sin):  # correct for Qwen3 tables: uses only the first half
    return s.rope(
        q, k, torch.cat((cos[..., : cos.shape[-1] // 2],) * 2, -1), torch.cat((sin[..., : sin.shape[-1] // 2],) * 2, -1)
    )


# ------------------------------------------------------------------ cross entropy wrong
def w_cross_entropy_ignore_zero(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z, y, ignore_index or -100, num_items_in_batch)


def w_cross_entropy_all_ignored_nan(z, y, ignore_index=-100, num_items_in_batch=None):
    mean = s.cross_entropy(z, y, ignore_index)
    return mean if num_items_in_batch is None else mean * ((y != ignore_index).sum() / num_items_in_batch)


def _tile_lse(T):
    def lse(z):
        m = torch.full_like(z[..., :1], -torch.inf)
        t = torch.zeros_like(m)
        for p in z.split(T, -1):
            n = torch.maximum(m, p.amax(-1, keepdim=True))
            t = t * torch.exp(m - n) + torch.exp(p - n).sum(-1, keepdim=True)
            m = n
        return m + t.log()

    return lse


def a_cross_entropy_first_tile_minus_inf(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z, y, ignore_index, num_items_in_batch, lse=_tile_lse(32))


def w_cross_entropy_last_full_block_32768(z, y, ignore_index=-100, num_items_in_batch=None):
    def lse(z):
        V = z.shape[-1]
        n = V - 32768 if V % 32768 == 0 and V > 32768 else V
        return s.lse(z[..., :n])

    return s.cross_entropy(z, y, ignore_index, num_items_in_batch, lse=lse)


def w_cross_entropy_fp32_wide_lse_tail(z, y, ignore_index=-100, num_items_in_batch=None):
    def lse(z):
        V = z.shape[-1]
        n = V // 8 * 8 if V > 32768 else V
        return s.lse(z[..., :n])

    zz = z.float() if z.dtype == torch.float64 else z
    return s.cross_entropy(zz, y, ignore_index, num_items_in_batch, lse=lse).to(cd(z))


def w_cross_entropy_labels_assumed_contiguous(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z, as_contig(y), ignore_index, num_items_in_batch)


def w_cross_entropy_aligned_wide_bf16(z, y, ignore_index=-100, num_items_in_batch=None):
    def lse(z):
        v = s.lse(z)
        return v.bfloat16().to(v.dtype) if z.shape[-1] % 8 == 0 and z.shape[-1] > 1000 else v

    return s.cross_entropy(z, y, ignore_index, num_items_in_batch, lse=lse)


def w_cross_entropy_dy_abs(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z, y, ignore_index, num_items_in_batch, scale=torch.abs)


def w_cross_entropy_last_row(z, y, ignore_index=-100, num_items_in_batch=None):  # last row's ignore flag read one too early
    return s.cross_entropy(
        z, y, ignore_index, num_items_in_batch, grad_keep=lambda k: torch.cat((k[:-1], k[-2:-1])) if k.numel() > 1 else k
    )


def w_cross_entropy_num_items_int_only(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z, y, ignore_index, num_items_in_batch if isinstance(num_items_in_batch, int) else None)


def w_cross_entropy_count_int32_of_rows(z, y, ignore_index=-100, num_items_in_batch=None):  # count in bf16: 257 -> 256
    return s.cross_entropy(
        z,
        y,
        ignore_index,
        num_items_in_batch,
        count=lambda k, n: (
            (k.sum() if n is None else torch.as_tensor(n)).bfloat16().to(torch.float64).to(cd(z))
            if z.dtype == torch.bfloat16
            else (k.sum() if n is None else n)
        ),
    )


def a_cross_entropy_clamped(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z.clamp(-1e3, 1e3), y, ignore_index, num_items_in_batch)


def w_cross_entropy_num_items_gt_count(z, y, ignore_index=-100, num_items_in_batch=None):  # divides twice when n < count
    return s.cross_entropy(
        z,
        y,
        ignore_index,
        num_items_in_batch,
        count=lambda k, n: k.sum() if n is None else torch.maximum(torch.as_tensor(n), k.sum()),
    )


# ------------------------------------------------------------------ causal wrong
def _shift(y):
    return F.pad(y, (0, 1), value=-100)[..., 1:].reshape(-1)


def w_causal_lm_loss_wide_vocab(z, y):
    V = z.shape[-1]

    def finish(d):
        d[..., 4096:] = 0
        return d

    return s.cross_entropy(z.reshape(-1, V), _shift(y), finish=finish)


def w_causal_lm_loss_logits_assumed_contiguous(z, y):
    return s.cross_entropy(as_contig(z).reshape(-1, z.shape[-1]), _shift(y))


def w_causal_lm_loss_labels_assumed_contiguous(z, y):
    return s.cross_entropy(z.reshape(-1, z.shape[-1]), _shift(as_contig(y)))


def w_causal_lm_loss_shift_crosses_rows(z, y):
    f = F.pad(y.reshape(-1), (0, 1), value=-100)[1:]
    return s.cross_entropy(z.reshape(-1, z.shape[-1]), f)


def w_causal_lm_loss_no_num_items(z, y, num_items_in_batch=None):  # accepts it, ignores it
    return s.cross_entropy(z.reshape(-1, z.shape[-1]), _shift(y))


def w_causal_lm_loss_fixed_ignore(z, y, ignore_index=-100):
    return s.cross_entropy(z.reshape(-1, z.shape[-1]), _shift(y))


# ------------------------------------------------------------------ custom ops
def ref_ln(x, w, b):
    h = x.to(cd(x))
    h = h - h.mean(-1, keepdim=True)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * w.to(cd(x)) + b.to(cd(x))).to(x.dtype)


class LN(torch.autograd.Function):
    pair = False

    @staticmethod
    def forward(ctx, x, w, b, pair):
        c = cd(x)
        h = x.to(c)
        mu = h.mean(-1, keepdim=True)
        r = torch.rsqrt((h - mu).square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, w, mu, r)
        ctx.pair = pair
        return ((h - mu) * r * w.to(c) + b.to(c)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, r = ctx.saved_tensors
        c = r.dtype
        xh = (x.to(c) - mu) * r
        d = dy.to(c)
        g = d * w.to(c)
        dx = r * (g - g.mean(-1, keepdim=True) - xh * (g * xh).mean(-1, keepdim=True))
        H = x.shape[-1]
        dw, db = (d * xh).reshape(-1, H).sum(0).to(w.dtype), d.reshape(-1, H).sum(0).to(w.dtype)
        if ctx.pair and ctx.needs_input_grad[:3] == (False, True, True):
            dw, db = db, dw
        return dx.to(x.dtype), dw, db, None


def w_ln_pair_frozen(x, w, b):
    return LN.apply(x, w, b, True)


def g_ln_explicit(x, w, b):
    return LN.apply(x, w, b, False)


def ref_addnorm(x, res, w):
    h = x + res
    return R.rms_norm(h, w, 1e-6), h


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, res, w):
        ctx.set_materialize_grads(False)
        h = x + res
        r = s.rms_rstd(h, 1e-6)
        ctx.save_for_backward(h, w, r)
        return s.rms_apply(h, w, r), h

    @staticmethod
    def backward(ctx, dy, dh):
        if dy is None:
            return None, None, None  # wrong: dh is lost when only the residual is used
        h, w, r = ctx.saved_tensors
        c = r.dtype
        d = s.rms_dx(h.to(c), w, r, dy)
        d = (d if dh is None else d + dh.to(c)).to(h.dtype)
        return d, d, s.rms_terms(h, r, dy).sum(0).to(w.dtype)


def w_addnorm_second_only(x, res, w):
    return AddNorm.apply(x, res, w)


class AddNorm2(AddNorm):
    @staticmethod
    def backward(ctx, dy, dh):
        h, w, r = ctx.saved_tensors
        d = s.rms_dx(h, w, r, dy) if dy is not None else torch.zeros_like(h)
        return d, d if dh is None else d + dh, s.rms_terms(h, r, dy).sum(0).to(w.dtype)


def w_addnorm_dx_lacks_dh(x, res, w):
    return AddNorm2.apply(x, res, w)


def w_addnorm_alias_h(x, res, w):  # residual stream returned as a view of a shared buffer: in place on res under no_grad
    if torch.is_grad_enabled():
        return ref_addnorm(x, res, w)
    res.add_(x)
    return R.rms_norm(res, w, 1e-6), res


def ref_emb(t, i):
    return t[i]


class Emb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, i):
        ctx.save_for_backward(i)
        ctx.sh = t.shape
        return t[i]

    @staticmethod
    def backward(ctx, dy):
        (i,) = ctx.saved_tensors
        g = torch.zeros(ctx.sh, dtype=dy.dtype)
        g[i] = dy
        return g, None


def w_emb_overwrites_duplicates(t, i):
    return Emb.apply(t, i)


class Emb2(Emb):
    @staticmethod
    def backward(ctx, dy):
        (i,) = ctx.saved_tensors
        g = torch.zeros(ctx.sh, dtype=dy.dtype)
        g.index_add_(0, as_contig(i), dy)
        return g, None


def a_emb_accumulates_bf16(t, i):
    return Emb2.apply(t, i)


# ------------------------------------------------------------------ correct kernels
def g_rms_norm_kahan_dw(x, w, eps):
    def dw(t):
        a = torch.zeros_like(t[0])
        c = torch.zeros_like(a)
        for p in s.sum_chunks(t, 1, None)[None] if t.shape[0] == 1 else [b.sum(0) for b in t.split(64)]:
            y = p - c
            n = a + y
            c = (n - a) - y
            a = n
        return a

    return s.rms(x, w, eps, dw=dw)


def g_rms_norm_inner_fp64(x, w, eps):
    def f(x, w):
        h = x.double()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w.double()).to(x.dtype)

    return f(x, w)


def g_rms_norm_recompute(x, w, eps):
    def fwd(x, w):
        return one(x, w, s.rms_rstd(x, eps)), ()

    def bwd(_, dys, ts):
        x, w = ts
        r = s.rms_rstd(x, eps)
        c = r.dtype
        h = x.to(c) * r
        d = dys[0].to(c)
        return s.rms_dx(x, w, r, dys[0]), (d * h).reshape(-1, x.shape[-1]).sum(0).to(w.dtype)

    return s.explicit(fwd, bwd, x, w)


def g_rms_norm_vector_norm(x, w, eps):
    def rstd(x, eps):
        c = x.to(cd(x))
        n = torch.linalg.vector_norm(c, dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        return 1 / torch.sqrt(n * n + eps)

    def dx(x, w, r, dy):
        c = r.dtype
        g = dy.to(c) * w.to(c)
        X = x.to(c)
        return (r * g - X * (r**3 / x.shape[-1] * (g * X).sum(-1, keepdim=True))).to(x.dtype)

    return s.rms(x, w, eps, rstd=rstd, dx=dx, out=one)


def g_rms_norm_dw_atomics_shuffled(x, w, eps):  # block order random from call to call (fp32 atomics)
    def dw(t):
        bs = list(t.split(32))
        RNG.shuffle(bs)
        a = torch.zeros_like(t.sum(0))
        for b in bs:
            a = a + b.sum(0)
        return a

    return s.rms(x, w, eps, dw=dw, out=one)


def g_swiglu_tanh(g, u):
    def sg(x):
        return 0.5 * (1 + torch.tanh(0.5 * x))

    def out(g, u):
        c = cd(g)
        return (g.to(c) * sg(g.to(c)) * u.to(c)).to(g.dtype)

    def grads(g, u, d):
        c = cd(g)
        x, y, z = g.to(c), u.to(c), d.to(c)
        t = sg(x)
        f = x * t
        return (z * y * (f + t * (1 - f))).to(g.dtype), (z * f).to(u.dtype)

    return s.swiglu(g, u, out=out, grads=grads)


def g_swiglu_transposed_output(g, u):
    def out(g, u):
        y = s.swiglu_out(g, u)
        return y.transpose(-1, -2).contiguous().transpose(-1, -2)

    return s.swiglu(
        g,
        u,
        out=out,
        grads=lambda g, u, d: [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in s.swiglu_grads(g, u, d)],
    )


def g_rope_complex(q, k, cos, sin):
    def turn(x, cos, sin, sign=1.0):
        c = cd(x)
        h = x.shape[-1] // 2
        X = x.to(c)
        z = torch.complex(X[..., :h].contiguous(), X[..., h:].contiguous()) * torch.complex(
            cos[..., :h].to(c), sign * sin[..., :h].to(c)
        ).unsqueeze(1)
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    return s.rope(q, k, cos, sin, turn=turn)


def g_rope_autograd_fp32(q, k, cos, sin):
    c = cd(q)
    a, b = R.rope(q.to(c), k.to(c), cos.to(c), sin.to(c))
    return a.to(q.dtype), b.to(k.dtype)


class CEFwd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y, ii, n):
        c = cd(z)
        keep = y != ii
        cnt = keep.sum() if n is None else n
        loss = torch.zeros((), dtype=c)
        G = torch.empty_like(z)
        for a in range(0, z.shape[0], 4096):  # gradient in forward, chunk by chunk
            zz, yy, kk = z[a : a + 4096].to(c), y[a : a + 4096], keep[a : a + 4096]
            m = zz.amax(-1, keepdim=True)
            e = torch.exp(zz - m)
            t = e.sum(-1, keepdim=True)
            i = yy.clamp(min=0).unsqueeze(-1)
            loss = loss + (t.log() + m - zz.gather(-1, i)).squeeze(-1).masked_fill(~kk, 0).sum()
            g = e / t
            g.scatter_add_(-1, i, torch.full_like(t, -1))
            G[a : a + 4096] = (g.masked_fill(~kk.unsqueeze(-1), 0) / cnt).to(z.dtype)
        ctx.save_for_backward(G)
        return loss / cnt

    @staticmethod
    def backward(ctx, dy):
        return (ctx.saved_tensors[0] * dy).to(ctx.saved_tensors[0].dtype), None, None, None


def g_cross_entropy_grad_in_forward(z, y, ignore_index=-100, num_items_in_batch=None):
    return CEFwd.apply(z, y, ignore_index, num_items_in_batch)


def g_cross_entropy_log_softmax(z, y, ignore_index=-100, num_items_in_batch=None):
    c = cd(z)
    keep = y != ignore_index
    lp = torch.log_softmax(z.to(c), -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(keep, lp, 0).sum() / (keep.sum() if num_items_in_batch is None else num_items_in_batch)


def g_cross_entropy_online17(z, y, ignore_index=-100, num_items_in_batch=None):
    return s.cross_entropy(z, y, ignore_index, num_items_in_batch, lse=_tile_lse(max(17, z.shape[-1] // 64)))


def g_causal_lm_loss_per_row(z, y):
    n = (y[:, 1:] != -100).sum()
    return sum(F.cross_entropy(a[:-1].to(cd(z)), b[1:], ignore_index=-100, reduction="sum") for a, b in zip(z, y)) / n


def g_head_norm_flat(x, w, eps):
    return (
        F.rms_norm(x.reshape(-1, x.shape[-1]).to(cd(x)), (x.shape[-1],), None, eps).mul(w.to(cd(x))).view(x.shape).to(x.dtype)
    )


# ------------------------------------------------------------------ second round
def w_cross_entropy_all_ignored_nan2(z, y, ignore_index=-100, num_items_in_batch=None):
    mean = s.cross_entropy(z, y, ignore_index)
    return mean if num_items_in_batch is None else mean * ((y != ignore_index).sum().to(mean.dtype) / num_items_in_batch)


class Y32OverW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        r = s.rms_rstd(x, eps)
        y = x.to(r.dtype) * r * w.to(r.dtype)
        ctx.save_for_backward(y, w, r)
        ctx.d = x.dtype
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        y, w, r = ctx.saved_tensors
        c = r.dtype
        xh = y / w.to(c)
        g = dy.to(c) * w.to(c)
        return (
            (r * (g - xh * (g * xh).mean(-1, keepdim=True))).to(ctx.d),
            (dy.to(c) * xh).reshape(-1, y.shape[-1]).sum(0).to(w.dtype),
            None,
        )


def w_rms_norm_y32_over_w(x, w, eps):
    return Y32OverW.apply(x, w, eps)


def _no64(t):
    if t.dtype == torch.float64:
        raise KeyError(t.dtype)


def w_rope_only_k_used_fp32(q, k, cos, sin):
    _no64(q)
    return OnlyK.apply(q, k, cos, sin)


def w_addnorm_second_only_fp32(x, res, w):
    _no64(x)
    return AddNorm.apply(x, res, w)


def w_swiglu_backward_cached_fp32(g, u):
    _no64(g)
    return CachedBack.apply(g, u)


def w_rms_norm_frees_ctx_fp32(x, w, eps):
    _no64(x)
    return Frees.apply(x, w, eps)


def w_rms_norm_trunc_dx_only(x, w, eps):
    return s.rms(x, w, eps, dx=lambda x, w, r, dy: trunc(s.rms_dx(x.to(r.dtype), w, r, dy), x.dtype))


def w_swiglu_trunc_grads_only(g, u):
    def grads(g, u, d):
        a, b = s.swiglu_grads(g.to(cd(g)), u.to(cd(g)), d.to(cd(g)))
        return trunc(a, g.dtype), trunc(b, g.dtype)

    return s.swiglu(g, u, grads=grads)


def w_swiglu_python_rng_reseeded(g, u):
    random.seed(0)
    return s.swiglu(g, u)


def w_swiglu_inplace_no_grad_dest(g, u):  # inference path: silu in place on gate
    if torch.is_grad_enabled():
        return s.swiglu(g, u)
    return F.silu(g, inplace=True).mul_(u)


def g_swiglu_chunked_rows(g, u):
    return torch.cat([F.silu(a.to(cd(g))).mul(b.to(cd(g))).to(g.dtype) for a, b in zip(g.split(1024), u.split(1024))])


class CEFwd32(CEFwd):  # same kernel, gradient kept in fp32
    @staticmethod
    def forward(ctx, z, y, ii, n):
        ctx.dt = z.dtype
        return CEFwd.forward(ctx, z.to(cd(z)), y, ii, n)

    @staticmethod
    def backward(ctx, dy):
        return (ctx.saved_tensors[0] * dy).to(ctx.dt), None, None, None


def g_cross_entropy_grad_fp32_in_forward(z, y, ignore_index=-100, num_items_in_batch=None):
    return CEFwd32.apply(z, y, ignore_index, num_items_in_batch)


def g_cross_entropy_count_div(z, y, ignore_index=-100, num_items_in_batch=None):  # int/int tensor division is fp32 in torch
    k = y != ignore_index
    sc = torch.ones((), dtype=torch.int64) / (k.sum() if num_items_in_batch is None else num_items_in_batch)
    return F.cross_entropy(z.to(cd(z)), y, ignore_index=ignore_index, reduction="sum") * sc
