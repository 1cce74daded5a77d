"""Decode kernels against plain torch in fp64 and fp32: norms, residuals, gates, cache writes, lengths, parts."""

import pytest
import torch

from snippets.cuda_graph import decode_kernels as k
from tests.kernels.common import DEVICE

HEADS, KV, D = 4, 2, 32


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def normed(x, gain, eps=1e-6):
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "width"), [(1, 1), (5, 64), (33, 100), (7, 5000)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["plain", "residual", "gated"])
def test_linear(dtype, n, width, norm, kind):
    x, gain, residual = rand(1, width, dtype=dtype), rand(width, dtype=dtype), rand(1, n, dtype=dtype)
    w = rand(2 * n if kind == "gated" else n, width, dtype=dtype) * width**-0.5
    out = torch.full((1, n), torch.nan, dtype=dtype, device=DEVICE)
    got = k.linear(x, w, norm=gain if norm else None, residual=residual if kind == "residual" else None, gated=kind == "gated", out=out)
    wide = normed(x.double(), gain.double()) if norm else x.double()
    want = wide @ w.double().T
    if kind == "residual":
        want = want + residual
    if kind == "gated":
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-9 if dtype == torch.float64 else 2e-5, atol=1e-9 if dtype == torch.float64 else 2e-4)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("columns", [16, 64])
def test_linear_with_other_launch_parameters(rows, columns):
    x, w = rand(1, 100), rand(13, 100)
    torch.testing.assert_close(k.linear(x, w, ROWS=rows, COLUMNS=columns), x @ w.T)


def attention(qkv, q_norm, k_norm, cos, sin, lengths, keys, values):
    """The same in plain torch, sequence by sequence; the cache is written."""
    out = []
    for b, length in enumerate(lengths.tolist()):
        q, new, v = qkv[b].view(-1, D).split([HEADS, KV, KV])

        def turn(x, gain, at=length):
            x = normed(x, gain)
            return x * cos[at] + torch.cat((-x[:, D // 2 :], x[:, : D // 2]), -1) * sin[at]

        q, new = turn(q, q_norm), turn(new, k_norm)
        if length < keys.shape[2]:
            keys[b, :, length], values[b, :, length] = new, v
        old_k, old_v = keys[b, :, :length], values[b, :, :length]
        ks = torch.cat((old_k, new[:, None]), 1).repeat_interleave(HEADS // KV, 0)
        vs = torch.cat((old_v, v[:, None]), 1).repeat_interleave(HEADS // KV, 0)
        weights = torch.softmax(torch.einsum("hd,hsd->hs", q, ks) * D**-0.5, -1)
        out.append(torch.einsum("hs,hsd->hd", weights, vs).flatten())
    return torch.stack(out)


def case(lengths, places, dtype=torch.float64):
    batch = len(lengths)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    keys, values = rand(batch, KV, places, D, dtype=dtype), rand(batch, KV, places, D, dtype=dtype)
    for b, length in enumerate(lengths.tolist()):  # what lies beyond must not be read
        keys[b, :, length:], values[b, :, length:] = torch.nan, torch.nan
    angle = rand(places + 8, D, dtype=dtype)
    return [rand(batch, (HEADS + 2 * KV) * D, dtype=dtype), rand(D, dtype=dtype), rand(D, dtype=dtype), angle.cos(), angle.sin(), lengths, keys, values]


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("lengths", [[0], [1], [63], [64], [65], [130, 0, 64], [128, 129, 5, 191]])
def test_attend(lengths, parts):
    given = case(lengths, 200)
    copy = [t.clone() for t in given]
    want = attention(*copy)
    torch.testing.assert_close(k.attend(*given, parts=parts), want)
    assert torch.equal(given[5], copy[5])  # the caller advances the lengths
    torch.testing.assert_close(given[6], copy[6], equal_nan=True)
    torch.testing.assert_close(given[7], copy[7], equal_nan=True)


def test_attend_at_the_end_of_the_cache():
    given = case([15, 16], 16)
    copy = [t.clone() for t in given]
    want = attention(*copy)
    torch.testing.assert_close(k.attend(*given, parts=2), want)
    torch.testing.assert_close(given[6], copy[6], equal_nan=True)


def test_many_tokens_one_after_another():
    given = case([55], 70)
    copy = [t.clone() for t in given]
    for _ in range(14):
        given[0], copy[0] = (qkv := rand(1, (HEADS + 2 * KV) * D)), qkv
        torch.testing.assert_close(k.attend(*given, parts=4), attention(*copy))
        given[5] += 1
        copy[5] += 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.update(x=rand(3, 8)), "3 rows; only one is supported"),
        (lambda a: a.update(weight=rand(5, 9)), "the last sizes must agree"),
        (lambda a: a.update(weight=rand(8, 5).T), "contiguous"),
        (lambda a: a.update(residual=rand(1, 4)), "residual is"),
        (lambda a: a.update(norm=rand(8).float()), "one dtype"),
        (lambda a: a.update(gated=True), "even number of rows"),
    ],
)
def test_linear_refuses(change, says):
    arguments = {"x": rand(1, 8), "weight": rand(5, 8)}
    change(arguments)
    with pytest.raises((TypeError, ValueError), match=says):
        k.linear(**arguments)


@pytest.mark.parametrize(
    ("index", "value", "says"),
    [
        (0, lambda: rand(2, 8 * D), "qkv is"), (5, lambda: torch.zeros(1, dtype=torch.int64), "int32"), (1, lambda: rand(D + 1), "q_norm is"),
        (7, lambda: rand(1, KV, 20, D).transpose(2, 3), "values is"), (3, lambda: rand(24, D, dtype=torch.float32), "one dtype"),
    ],
)  # fmt: skip
def test_attend_refuses(index, value, says):
    given = case([3], 16)
    given[index] = value().to(DEVICE)
    with pytest.raises((TypeError, ValueError), match=says):
        k.attend(*given)
    with pytest.raises(ValueError, match="powers of two"):
        k.attend(*case([3], 16), parts=3)
