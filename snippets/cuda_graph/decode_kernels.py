"""Kernels for decoding one token at a time: every one is a stream over weights or over the cache.

At batch 1 a decoder layer of Qwen3-8B reads 385 MB of weights for 0.4 GFLOP, so a step is as fast as memory is read. Two
things stand in the way: small kernels between the large ones, and the gap at each kernel's start and end, when the memory
idles. So the norm is computed by whoever reads the normed vector, activation and residual by whoever wrote it, and a
kernel loads its first weights before it waits for the one before (``PDL``: programmatic dependent launch, Hopper and newer; in a
CUDA graph it becomes an edge between two nodes).

    linear          y = W f(x) + r for one x: f is the identity or RMSNorm, r a residual; or silu(W_gate f(x)) · W_up f(x)
    attend          RMSNorm and RoPE of q and k, the new k and v into the cache, attention over parts of the cache
    combine         those parts into one output
    embed, pick     the rows of the current tokens; the next tokens from the logits, and the lengths advanced

No kernel takes a length from the host: a CUDA graph would keep it as a constant. The lengths are a tensor.

Roundings to the storage dtype stand where transformers 5.17's Qwen3 has them, except that ``linear`` doesn't round the normed x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from snippets.kernels.common import check_tensors, compute_dtype, on

# Launch parameters of ``linear``, by (gated, the width is above 8192): outputs a program makes, columns it reads at a time, warps.
LINEAR = {
    (False, False): {"ROWS": 1, "COLUMNS": 2048, "num_warps": 4},
    (False, True): {"ROWS": 1, "COLUMNS": 2048, "num_warps": 4},
    (True, False): {"ROWS": 1, "COLUMNS": 2048, "num_warps": 4},
}
TILE = 64  # positions of the cache that a program of ``attend`` takes at a time


# --8<-- [start:linear]
@triton.jit
def _linear(
    x_ptr, w_ptr, norm_ptr, residual_ptr, y_ptr, n,
    WIDTH: tl.constexpr, EPS: tl.constexpr, COMPUTE: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < n
    # Everything is [rows, columns] from the first load on: from one dimension to two, values change threads and warps wait.
    cols = tl.arange(0, COLUMNS)[None, :]
    w_ptr += rows.to(tl.int64)[:, None] * WIDTH
    u_ptr = w_ptr + tl.cast(n, tl.int64) * WIDTH  # gated: rows n .. 2n of the same matrix
    first = real[:, None] & (cols < WIDTH)
    w0 = tl.load(w_ptr + cols, mask=first, other=0.0, eviction_policy="evict_first")
    if GATED:
        u0 = tl.load(u_ptr + cols, mask=first, other=0.0, eviction_policy="evict_first")
    if PDL:  # the weights are nobody's output; x is
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Products are added up in place and reduced once at the end. For the norm's sake nothing waits either: its gain goes onto x,
    # its factor onto the sums.
    sums = tl.zeros([ROWS, COLUMNS], dtype=COMPUTE)
    ups = tl.zeros([ROWS, COLUMNS], dtype=COMPUTE)
    squares = tl.zeros([1, COLUMNS], dtype=COMPUTE)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        inside = start + cols < WIDTH
        mask = real[:, None] & inside
        if start == 0:
            w = w0
        else:
            w = tl.load(w_ptr + start + cols, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + cols, mask=inside, other=0.0).to(COMPUTE)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + cols, mask=inside, other=0.0).to(COMPUTE)
        sums += w.to(COMPUTE) * x
        if GATED:
            if start == 0:
                u = u0
            else:
                u = tl.load(u_ptr + start + cols, mask=mask, other=0.0, eviction_policy="evict_first")
            ups += u.to(COMPUTE) * x

    y, up = tl.sum(sums, axis=1), tl.sum(ups, axis=1)
    if NORM:
        rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / WIDTH + EPS)
        y, up = y * rstd, up * rstd
    out = y_ptr.dtype.element_ty
    y = y.to(out)
    if GATED:
        gate = y.to(COMPUTE)
        y = ((gate * tl.sigmoid(gate)).to(out).to(COMPUTE) * up.to(out).to(COMPUTE)).to(out)
    if RESIDUAL:
        y = (y.to(COMPUTE) + tl.load(residual_ptr + rows, mask=real, other=0.0).to(COMPUTE)).to(out)
    tl.store(y_ptr + rows, y, mask=real)
# --8<-- [end:linear]


# --8<-- [start:attend]
@triton.jit
def _turned(x1, x2, gain1, gain2, cos1, sin1, cos2, sin2, D: tl.constexpr, EPS: tl.constexpr, COMPUTE: tl.constexpr):
    """RMSNorm and RoPE of rows that come as two halves ``[R, D / 2]``, rounded as Qwen3 does."""
    kept = x1.dtype
    a, b = x1.to(COMPUTE), x2.to(COMPUTE)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + EPS)[:, None]
    a = (gain1[None, :] * (a * rstd).to(kept).to(COMPUTE)).to(kept).to(COMPUTE)
    b = (gain2[None, :] * (b * rstd).to(kept).to(COMPUTE)).to(kept).to(COMPUTE)
    t1 = (a * cos1[None, :]).to(kept).to(COMPUTE) - (b * sin1[None, :]).to(kept).to(COMPUTE)
    t2 = (b * cos2[None, :]).to(kept).to(COMPUTE) + (a * sin2[None, :]).to(kept).to(COMPUTE)
    return t1.to(kept), t2.to(kept)


@triton.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, lengths_ptr, keys_ptr, values_ptr, part_ptr, top_ptr, sum_ptr,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    sequence, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HALF: tl.constexpr = D // 2
    half, all_d = tl.arange(0, HALF), tl.arange(0, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    length = tl.load(lengths_ptr + sequence)  # tokens in the cache, which is the new one's position
    # Whole tiles a part. One beyond the cache's end writes nothing; its owner is told by ``lengths`` afterwards.
    per_part = tl.cdiv(tl.cdiv(length + 1, TILE), PARTS) * TILE
    start = part * per_part
    stop = tl.minimum(start + per_part, length + 1)

    heads = tl.arange(0, 16)  # a matrix product has at least 16 rows; GROUP of them are real
    real = heads < GROUP
    row = qkv_ptr + sequence.to(tl.int64) * (HEADS + 2 * KV) * D
    cos1, cos2 = tl.load(cos_ptr + length * D + half).to(COMPUTE), tl.load(cos_ptr + length * D + HALF + half).to(COMPUTE)
    sin1, sin2 = tl.load(sin_ptr + length * D + half).to(COMPUTE), tl.load(sin_ptr + length * D + HALF + half).to(COMPUTE)
    gain1, gain2 = tl.load(q_norm_ptr + half).to(COMPUTE), tl.load(q_norm_ptr + HALF + half).to(COMPUTE)
    queries = row + (kv * GROUP + heads)[:, None] * D + half[None, :]
    q1, q2 = _turned(
        tl.load(queries, mask=real[:, None], other=0.0), tl.load(queries + HALF, mask=real[:, None], other=0.0),
        gain1, gain2, cos1, sin1, cos2, sin2, D, EPS, COMPUTE,
    )  # fmt: skip

    cache = (sequence.to(tl.int64) * KV + kv) * PLACES * D
    gain1, gain2 = tl.load(k_norm_ptr + half).to(COMPUTE), tl.load(k_norm_ptr + HALF + half).to(COMPUTE)
    key = row + (HEADS + kv) * D + tl.arange(0, 1)[:, None] * D + half[None, :]
    k1, k2 = _turned(tl.load(key), tl.load(key + HALF), gain1, gain2, cos1, sin1, cos2, sin2, D, EPS, COMPUTE)
    v = tl.load(row + (HEADS + KV + kv) * D + all_d)[None, :]
    if (length >= start) & (length < stop) & (length < PLACES):
        tl.store(keys_ptr + cache + length * D + half[None, :], k1)
        tl.store(keys_ptr + cache + length * D + HALF + half[None, :], k2)
        tl.store(values_ptr + cache + length * D + all_d[None, :], v)

    top = tl.full([16], float("-inf"), COMPUTE)
    total = tl.zeros([16], COMPUTE)
    mixed = tl.zeros([16, D], COMPUTE)
    for s in range(start, stop, TILE):
        places = s + tl.arange(0, TILE)
        old, new = (places < length)[:, None], (places == length)[:, None]
        held = keys_ptr + cache + places[:, None] * D + half[None, :]
        tile1 = tl.where(new, k1, tl.load(held, mask=old, other=0.0))
        tile2 = tl.where(new, k2, tl.load(held + HALF, mask=old, other=0.0))
        scores = tl.dot(q1, tl.trans(tile1), input_precision="ieee") + tl.dot(q2, tl.trans(tile2), input_precision="ieee")
        scores = tl.where((places <= length)[None, :], scores.to(COMPUTE) * SCALE, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        tile = tl.where(new, v, tl.load(values_ptr + cache + places[:, None] * D + all_d[None, :], mask=old, other=0.0))
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee").to(COMPUTE)
        total = total * shrink + tl.sum(weights, axis=1)
        top = higher

    to = (sequence * HEADS + kv * GROUP + heads) * PARTS + part
    tl.store(top_ptr + to, top, mask=real)  # −inf for a part with nothing in it
    tl.store(sum_ptr + to, total, mask=real)
    tl.store(part_ptr + to[:, None] * D + all_d[None, :], mixed, mask=real[:, None])


@triton.jit
def _combine(part_ptr, top_ptr, sum_ptr, y_ptr, D: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    parts = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    d = tl.arange(0, D)
    top = tl.load(top_ptr + parts)
    scale = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(scale * tl.load(sum_ptr + parts), axis=0)
    mixed = tl.load(part_ptr + parts[:, None] * D + d[None, :])
    y = tl.sum(mixed * scale[:, None], axis=0) / total
    tl.store(y_ptr + tl.program_id(0) * D + d, y.to(y_ptr.dtype.element_ty))
# --8<-- [end:attend]


# --8<-- [start:ends]
@triton.jit
def _embed(tokens_ptr, lengths_ptr, table_ptr, y_ptr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    token = tl.load(tokens_ptr + sequence * COLUMNS + tl.load(lengths_ptr + sequence))
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        row = tl.load(table_ptr + token * WIDTH + cols, mask=cols < WIDTH)
        tl.store(y_ptr + sequence * WIDTH + cols, row, mask=cols < WIDTH)


@triton.jit
def _pick(
    logits_ptr, tokens_ptr, lengths_ptr, given_ptr,
    VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = offsets
    for start in range(0, VOCABULARY, BLOCK):
        ids = start + offsets
        logits = tl.load(logits_ptr + sequence.to(tl.int64) * VOCABULARY + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32)
        where = tl.where(logits > best, ids, where)
        best = tl.maximum(best, logits)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, where, VOCABULARY - 1), axis=0)  # of equal ones the first
    at = tl.load(lengths_ptr + sequence) + 1
    if (at >= tl.load(given_ptr + sequence)) & (at < COLUMNS):
        tl.store(tokens_ptr + sequence * COLUMNS + at, token.to(tl.int64))
    tl.store(lengths_ptr + sequence, tl.minimum(at, COLUMNS - 1))
# --8<-- [end:ends]


def embed(tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Row ``tokens[b, lengths[b]]`` of ``table`` for each sequence, into ``out``.

    Args:
        tokens: ``[B, COLUMNS]``, int64. lengths: ``[B]``, int32, below COLUMNS. table: ``[V, K]``. out: ``[B, K]``. All contiguous.
    """
    with on(out):
        _embed[tokens.shape[0],](tokens, lengths, table, out, tokens.shape[1], table.shape[1], 1024, PDL=pdl, **_launch(pdl))
    return out


def pick(logits: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, given: torch.Tensor, *, pdl: bool = False) -> None:
    """Greedy choice and advance: ``tokens[b, lengths[b] + 1]`` becomes the most likely token unless it is given, lengths grow by 1.

    Args:
        logits: ``[B, V]``. tokens: ``[B, COLUMNS]``, int64. lengths: ``[B]``, int32; they stop at COLUMNS − 1.
        given: ``[B]``, int32: how many tokens of each sequence are prescribed. All contiguous.
    """
    block = min(16384, triton.next_power_of_2(logits.shape[1]))
    with on(logits):
        _pick[tokens.shape[0],](logits, tokens, lengths, given, logits.shape[1], tokens.shape[1], block, PDL=pdl, num_warps=16, **_launch(pdl))


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, norm: torch.Tensor | None = None, eps: float = 1e-6,
    residual: torch.Tensor | None = None, gated: bool = False, out: torch.Tensor | None = None, pdl: bool = False, **launch: int,
) -> torch.Tensor:  # fmt: skip
    """``W f(x) + residual`` for one row x, where f is RMSNorm with gain ``norm``, or the identity without.

    Args:
        x: ``[1, K]``, contiguous.
        weight: ``[N, K]``, contiguous; ``[2 N, K]``, gate above up, where ``gated``.
        residual: ``[1, N]``.
        gated: return ``silu(W_gate f(x)) * (W_up f(x))``.
        out: ``[1, N]`` to write to.
        pdl: start before the kernel before has ended, on Hopper and newer. All launches of a chain must say so, or the
            one that doesn't waits as usual.
        launch: other values than those of ``LINEAR``.

    Returns:
        ``[1, N]`` in x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes or strides that the kernel cannot take.
    """
    check_tensors("linear", x=x, weight=weight, **{k: t for k, t in (("norm", norm), ("residual", residual), ("out", out)) if t is not None})
    batch, width = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    if batch != 1:
        raise ValueError(f"linear: x has {batch} rows; only one is supported. torch.nn.functional.linear takes any number")
    if weight.shape != (n * (2 if gated else 1), width):
        raise ValueError(f"linear: weight is {tuple(weight.shape)}, x is {tuple(x.shape)}; the last sizes must agree, and gated needs an even number of rows")
    y = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    for name, t, shape in (("x", x, (1, width)), ("weight", weight, tuple(weight.shape)), ("norm", norm, (width,)), ("residual", residual, (1, n)), ("out", y, (1, n))):
        if t is not None and (t.shape != shape or not t.is_contiguous()):
            raise ValueError(f"linear: {name} is {tuple(t.shape)} with strides {t.stride()}; it must be {shape} and contiguous")
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"linear: {name} is {t.dtype}, x is {x.dtype}; give both in one dtype")
    config = LINEAR[gated, width > 8192] | launch
    if triton.knobs.runtime.interpret and "ROWS" not in launch:
        config["ROWS"] = 64  # the interpreter runs one program after another
    config["COLUMNS"] = min(config["COLUMNS"], triton.next_power_of_2(width))
    with on(x):
        _linear[triton.cdiv(n, config["ROWS"]),](
            x, weight, norm, residual, y, n, width, eps, compute_dtype(x.dtype),
            norm is not None, residual is not None, gated, PDL=pdl, **config, **_launch(pdl),
        )  # fmt: skip
    return y


def attend(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, *, eps: float = 1e-6, parts: int = 8, out: torch.Tensor | None = None, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One token's attention for each sequence, its k and v written to the cache on the way.

    Args:
        qkv: ``[B, (HEADS + 2 KV) D]``: q of all heads, then k, then v, as the projections leave them.
        q_norm, k_norm: ``[D]``, gains of the norms.
        cos, sin: ``[positions, D]``, of each position up to the largest length; the kernel cannot check that.
        lengths: ``[B]``, int32, on the device: tokens in the cache, and the position of this one. The caller advances them.
        keys, values: ``[B, KV, PLACES, D]``, the cache; written at ``lengths``. A sequence whose length is PLACES or more
            attends to what is there and to its new token, and stores nothing.
        parts: programs that share one sequence's cache; a power of two.
        out: ``[B, HEADS D]`` to write to.

    Returns:
        ``[B, HEADS D]`` in qkv's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes or strides that the kernels cannot take.
    """
    check_tensors("attend", qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin, keys=keys, values=values)
    batch, kv, places, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv
    if heads <= 0 or heads % kv or heads // kv > 16 or qkv.shape != (batch, (heads + 2 * kv) * d):
        raise ValueError(f"attend: qkv is {tuple(qkv.shape)}, the cache {tuple(keys.shape)}; qkv must be [B, (HEADS + 2 KV) D] with at most 16 heads per KV head")
    if d < 32 or d & (d - 1) or parts < 1 or parts & (parts - 1):
        raise ValueError(f"attend: head size {d} and parts {parts} must be powers of two, the size at least 32")
    y = torch.empty(batch, heads * d, dtype=qkv.dtype, device=qkv.device) if out is None else out
    expected = {"qkv": (qkv, tuple(qkv.shape)), "q_norm": (q_norm, (d,)), "k_norm": (k_norm, (d,)), "values": (values, tuple(keys.shape)),
                "keys": (keys, tuple(keys.shape)), "cos": (cos, (cos.shape[0], d)), "sin": (sin, tuple(cos.shape)), "out": (y, (batch, heads * d))}  # fmt: skip
    for name, (t, shape) in expected.items():
        if t.shape != shape or not t.is_contiguous():
            raise ValueError(f"attend: {name} is {tuple(t.shape)} with strides {t.stride()}; it must be {shape} and contiguous")
        if t.dtype != qkv.dtype:
            raise TypeError(f"attend: {name} is {t.dtype}, qkv is {qkv.dtype}; give all in one dtype")
    if lengths.shape != (batch,) or lengths.dtype != torch.int32 or lengths.device != qkv.device:
        raise ValueError(f"attend: lengths must be {batch} int32 numbers on {qkv.device}, got {tuple(lengths.shape)} {lengths.dtype} on {lengths.device}")
    compute = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    mixed = torch.empty(batch, heads, parts, d, dtype=compute, device=qkv.device)
    top, total = (torch.empty(batch, heads, parts, dtype=compute, device=qkv.device) for _ in range(2))
    with on(qkv):
        _attend[batch, kv, parts](
            qkv, q_norm, k_norm, cos, sin, lengths, keys, values, mixed, top, total,
            heads, kv, d, heads // kv, places, d**-0.5, eps, compute_dtype(qkv.dtype), parts, TILE, PDL=pdl, num_warps=4, **_launch(pdl),
        )  # fmt: skip
        _combine[batch * heads,](mixed, top, total, y, d, parts, PDL=pdl, num_warps=4, **_launch(pdl))
    return y


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}
