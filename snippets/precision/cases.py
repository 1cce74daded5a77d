"""What the gates feed to a kernel: operators, shapes, data families, memory layouts, gradients.

A kernel that is wrong only for some inputs is found only by those inputs. So a gate runs a list
of ``Setup``s, each a point of (dimensions × data family × dy family × layout × options), chosen
per operator; no gradient is ever constant. All values are drawn in fp64 from a seeded generator
and rounded to the dtype under test, so the truth is computed on exactly the numbers that the
kernel saw. Every floating input is a window in a larger buffer filled with NaN: reading beside
it shows, and writing beside it is detected.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from snippets.precision import references

GUARD = 256  # elements of NaN on either side of every input; a multiple of any vector width


class UsageError(ValueError):
    """The request cannot be carried out: bad signature text, unknown operator, unusable reference."""


@dataclass(frozen=True)
class Arg:
    """One tensor argument.

    role: "data", "weight" (around 1, never all ones), "cos"/"sin" (RoPE tables), "label" (indices
    below the size named by ``high``), "const" (floating, receives no gradient).
    """

    name: str
    dims: tuple[str | int, ...]
    role: str = "data"
    high: str | int | None = None

    @property
    def grad(self) -> bool:
        return self.role in ("data", "weight")


@dataclass(frozen=True)
class Setup:
    """One point of the input space. ``dims`` maps symbols to a size, or to a tuple of sizes (leading dims).

    A layout "sliced@1" is for the second data input (or the second output's dy) only; the others are contiguous.
    """

    dims: dict[str, int | tuple[int, ...]]
    family: str = "randn"
    dy: str = "randn"
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    tables: str = "contiguous"  # layout of what is no data: labels, RoPE tables, constants
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        parts = ["×".join(f"{k}={v}" for k, v in self.dims.items()), self.family]
        if self.dy != "randn":
            parts.append(f"dy={self.dy}")
        if self.layout != "contiguous":
            parts.append(f"输入 {self.layout}")
        if self.dy_layout != "contiguous":
            parts.append(f"dy {self.dy_layout}")
        if self.tables != "contiguous":
            parts.append(f"标签或表 {self.tables}")
        parts += [f"{k}={v}" for k, v in self.options.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class Op:
    """An operator: its arguments, its PyTorch reference, and the setups each gate tries.

    ``plan(gate, level)`` gives the setups; level is "tiny" (Triton's interpreter), "cpu" or "cuda".
    """

    name: str
    args: tuple[Arg, ...]
    reference: Callable[..., Any]
    plan: Callable[[int, str], list[Setup]]
    small: dict[str, Any] = field(default_factory=dict)  # dims for gradcheck
    options: dict[str, Any] = field(default_factory=dict)  # options beside the tensors, with their defaults
    # Natural noise that no perturbation of the inputs shows: (fp64 tensors, fp64 dys, options) → result name
    # → noise per unit roundoff, in the shape of that result.
    slack: Callable[..., dict[str, Tensor]] | None = None


# ------------------------------------------------------------------------------- values


def _randn(shape, gen: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64, device=gen.device)


def _rand(shape, gen: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=gen, dtype=torch.float64, device=gen.device)


def values(family: str, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """fp64 data of one family, shape as given.

    randn; tiny3/tiny4 (row rms 1e-3/1e-4: eps matters); outlier (a few channels × 100); large
    (× 40); positive (one-sided, sums grow); negative
    (all below -100: a maximum that starts at 0 is wrong); zero_rows (every third row exactly zero); mixed (row
    scales from 1e-4 to 1e2); masked (classes 1 to V/2 at the least finite bf16 value, as masks are written);
    masked_inf (every second class at -inf; no tile wholly so, where an online softmax as Liger's gives NaN); tail (the last
    three of a row 12 larger: what a loop leaves out at the end).

    Raises:
        UsageError: unknown family.
    """
    x = _randn(shape, gen)
    rows = shape[:-1] + (1,) if shape else ()
    n = math.prod(rows)
    match family:
        case "randn":
            return x
        case "tiny3":
            return x * 1e-3
        case "tiny4":
            return x * 1e-4
        case "large":
            return x * 40
        case "positive":
            return x.abs() + 0.25
        case "negative":
            return -40 * x.abs() - 100
        case "outlier":
            if shape:
                x[..., :: max(shape[-1] // 3, 1)] *= 100
            return x
        case "masked":
            if shape:
                x[..., 1 : shape[-1] // 2] = torch.finfo(torch.bfloat16).min
            return x
        case "masked_inf":
            if shape:
                x[..., :-1][..., 1::2] = -math.inf
            return x
        case "tail":
            if shape:
                x[..., -3:] += 12
            return x
        case "zero_rows":
            keep = torch.arange(n, device=x.device).remainder(3).ne(1).reshape(rows)
            return x * keep
        case "mixed":
            scale = torch.logspace(-4, 2, max(n, 1), dtype=torch.float64, device=x.device)
            return x * scale[torch.randperm(max(n, 1), generator=gen, device=gen.device)].reshape(rows)
    raise UsageError(f"unknown data family {family!r}")


def labels(family: str, shape: tuple[int, ...], high: int, gen: torch.Generator, ignore: int | None) -> Tensor:
    """int64 indices below ``high``: first and last class always occur.

    With an ``ignore`` value: 14 % of them ignored; family "many_ignored": 90 %; "none_ignored": none;
    "all_ignored": all. Family "masked": none of the masked classes; "masked_inf": the last class.
    """
    y = torch.randint(high, shape, generator=gen, device=gen.device)
    flat = y.view(-1)
    if family == "masked_inf":
        flat.fill_(high - 1)
        return y
    if family == "all_ignored" and ignore is not None:
        flat.fill_(ignore)
        return y
    if family == "masked":
        flat[(flat >= 1) & (flat < high // 2)] = high - 1
    if ignore is not None and family != "none_ignored":
        share = 0.9 if family == "many_ignored" else 0.14
        flat[_rand(flat.shape, gen) < share] = ignore
    if flat.numel() >= 4:
        # Not the very first and last positions: the shifted loss drops one of them.
        flat[1], flat[-2] = 0, high - 1
        if ignore is not None and family != "none_ignored":
            flat[0] = ignore
    elif flat.numel():
        flat[-1] = high - 1
    return y


# ------------------------------------------------------------------------------- memory


def _int_view(t: Tensor) -> Tensor:
    """The bits of a contiguous tensor as integers, so that NaN equals NaN."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


@dataclass
class Placed:
    """A tensor inside its guarded buffer, with what the buffer held when it was filled."""

    tensor: Tensor
    buffer: Tensor
    before: Tensor

    def changed(self) -> bool:
        """Whether any bit of the buffer, guards and gaps included, differs from what was filled in."""
        return not torch.equal(_int_view(self.buffer), _int_view(self.before))

    def refill(self, value: Tensor) -> None:
        """New values at the same address."""
        self.tensor.copy_(value)
        self.before = self.buffer.clone()


def place(value: Tensor, layout: str) -> Placed:
    """Copy ``value`` into a NaN-guarded buffer with the given memory layout.

    contiguous; transposed (last two dims swapped in memory); swapped (dims 1 and 2 of a 4-D tensor
    swapped, as after ``view(B, S, H, D).transpose(1, 2)``); sliced (a window of wider rows, gaps
    NaN); expanded (stride 0 in the first dim: value must repeat there); expanded_cols (stride 0 in
    the last); gap (a window of dim 1, so that rows of one batch are dense and batches are not); every second
    element for 1-D "sliced". A layout that makes no sense for the shape falls back to contiguous.
    """
    shape = list(value.shape)
    fill = float("nan") if value.is_floating_point() else 0
    perm = list(range(len(shape)))
    if layout == "transposed" and len(shape) >= 2:
        perm[-1], perm[-2] = perm[-2], perm[-1]
    elif layout == "swapped" and len(shape) == 4:
        perm[1], perm[2] = 2, 1
    physical = [shape[p] for p in perm]
    extra = 0
    if layout == "sliced" and len(shape) == 1:
        physical[0] *= 2
    elif layout == "gap" and len(shape) >= 3:
        physical[1] += 3
    elif layout == "sliced" and len(shape) >= 2:
        extra = 24
        physical[-1] += extra
    elif layout == "expanded" and len(shape) >= 2:
        physical[0] = 1
    elif layout == "expanded_cols" and len(shape) >= 2:
        physical[-1] = 1
    n = math.prod(physical)
    buffer = torch.full((n + 2 * GUARD,), fill, dtype=value.dtype, device=value.device)
    t = buffer[GUARD : GUARD + n].view(physical)
    if extra:
        t = t[..., 8 : 8 + shape[-1]]
    elif layout == "sliced" and len(shape) == 1:
        t = t[::2]
    elif layout == "gap" and len(shape) >= 3:
        t = t[:, 1 : 1 + shape[1]]
    t = t.permute(perm)  # a swap of two dims is its own inverse
    if layout == "expanded" and len(shape) >= 2:
        t.copy_(value[:1])
        t = t.expand(shape)
    elif layout == "expanded_cols" and len(shape) >= 2:
        t.copy_(value[..., :1])
        t = t.expand(shape)
    else:
        t.copy_(value)
    return Placed(t, buffer, buffer.clone())


# -------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """One setup made concrete: inputs, upstream gradients, the truth and what noise is natural."""

    op: Op
    setup: Setup
    dtype: torch.dtype
    inputs: list[Placed]
    dys: list[Placed]
    call_options: dict[str, Any]
    altered: bool = False  # values no longer those that ``build`` draws, so nothing remembered applies

    @property
    def tensors(self) -> list[Tensor]:
        return [p.tensor for p in self.inputs]

    @property
    def reduced(self) -> int:
        """The longest dimension: an upper estimate of the length of any reduction."""
        return max([1, *(s for p in self.inputs for s in p.tensor.shape)])


def _shape(arg: Arg, dims: dict) -> tuple[int, ...]:
    out: list[int] = []
    for d in arg.dims:
        size = dims[d] if isinstance(d, str) else d
        out += size if isinstance(size, tuple) else [size]
    return tuple(out)


def draw(op: Op, setup: Setup, device: torch.device, gen: torch.Generator) -> list[Tensor]:
    """fp64 (or int64) values of all inputs, contiguous, on ``device``."""
    out, ignore = [], None
    if any(a.role == "label" for a in op.args):
        ignore = setup.options.get("ignore_index", op.options.get("ignore_index"))
    rope_tables: tuple[Tensor, Tensor] | None = None
    label_family = setup.family if setup.family.endswith("_ignored") or setup.family.startswith("masked") else "randn"
    data_family = "randn" if setup.family.endswith("_ignored") else setup.family
    for arg in op.args:
        shape = _shape(arg, setup.dims)
        if arg.role == "data":
            out.append(values(data_family, shape, gen))
        elif arg.role == "const":
            out.append(_randn(shape, gen))
        elif arg.role == "weight":
            w = 1 + 0.5 * _randn(shape, gen)
            if setup.family == "zero_rows":
                w.view(-1)[1::4] = 0  # a pruned channel; a backward that divides by the weight shows
            out.append(w)
        elif arg.role in ("cos", "sin"):
            if rope_tables is None:
                b, s, d = shape
                # Increasing positions from a different random start per row, as left padding gives.
                start = torch.randint(1, 32768, (b, 1), generator=gen, device=gen.device)
                rope_tables = references.rope_tables(start + torch.arange(s, device=gen.device), d)
            out.append(rope_tables[arg.role == "sin"])
        else:
            high = setup.dims[arg.high] if isinstance(arg.high, str) else arg.high
            out.append(labels(label_family, shape, int(high), gen, ignore))
    return [v.to(device) for v in out]


def _dy(family: str, layout: str, out: Tensor, inputs: list[Tensor], gen: torch.Generator) -> Tensor:
    if out.dim() == 0:
        # A backward that assumes an incoming 1, or only its sign or only its size, is exposed by anything else.
        return (0.2 + 1.8 * _rand((), gen)) * (1 - 2 * torch.randint(2, (), generator=gen, device=gen.device))
    g = _randn(out.shape, gen)
    if family == "correlated":
        like = [x for x in inputs if x.shape == out.shape and x.is_floating_point()]
        if like:
            x = like[0].double()
            g = 0.1 * g + x / x.square().mean().sqrt().clamp_min(1e-30)
    elif family == "positive":
        g = g.abs() + 0.1
    if layout == "expanded":
        g = g[:1].expand(out.shape)
    elif layout == "expanded_cols":
        g = g[..., :1].expand(out.shape)
    return g


def _layout(text: str, i: int) -> str:
    """The layout of the i-th tensor: "sliced" is for all of them, "sliced@1" for number 1 only."""
    name, _, index = text.partition("@")
    return name if not index or int(index) == i else "contiguous"


def resolve(options: dict[str, Any], inputs: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Options as the kernel gets them: the text "tensor:N" stands for a 0-d int64 tensor on the device."""
    return {
        k: torch.tensor(int(v[7:]), device=device) if isinstance(v, str) and v.startswith("tensor:") else v
        for k, v in options.items()
    }


def build(op: Op, setup: Setup, dtype: torch.dtype, device: torch.device) -> Case:
    """Make a setup concrete. Equal arguments give equal values on the same device type."""
    gen = torch.Generator(device=device).manual_seed(1000 + setup.seed)
    raw = draw(op, setup, device, gen)
    cast = [v.to(dtype) if v.is_floating_point() else v for v in raw]
    data = [a for a in op.args if a.role == "data"]
    layouts = [
        _layout(setup.layout, data.index(a)) if a.role == "data" else "contiguous" if a.role == "weight" else setup.tables
        for a in op.args
    ]
    inputs = [place(v, lay) for v, lay in zip(cast, layouts, strict=True)]
    options = resolve({**op.options, **setup.options}, cast, device)
    with torch.no_grad():
        outs = as_tuple(op.reference(*[p.tensor for p in inputs], **options))
    dys = [
        # Rounded to the dtype under test even where the reference widens its output (a loss), so that
        # a kernel that returns the narrower dtype gets the same number.
        place(_dy(setup.dy, lay, o, [p.tensor for p in inputs], gen).to(dtype).to(o.dtype), lay)
        for o, lay in zip(outs, (_layout(setup.dy_layout, i) for i in range(len(outs))), strict=True)
    ]
    return Case(op, setup, dtype, inputs, dys, options)


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    """A tensor or a sequence of tensors as a tuple.

    Raises:
        TypeError: anything else.
    """
    outs = (out,) if isinstance(out, Tensor) else tuple(out) if isinstance(out, tuple | list) else None
    if outs is None or not outs or not all(isinstance(o, Tensor) for o in outs):
        raise TypeError(f"must return a tensor or a tuple of tensors, got {type(out).__name__}")
    return outs


# --------------------------------------------------------------------- the four operators

# Widths that leave a block of 128 (or 64, 32) with other remainders than the round sizes do.
TAILS = (31, 63, 96, 127, 160, 191, 224, 351)


def _plan_rms(gate: int, level: str) -> list[Setup]:
    if level == "tiny":
        shapes = [(1, 7), (5, 33), (19, 64), (2, 4099)]
        mid: tuple[Any, int] = (9, 33)
    elif gate == 1:
        shapes = [(1, 7), (3, 1), (37, 129), (300, 64), (5, 1000), (3, 4096), (2, 8193), (2, 20001), (65537, 4)]
        shapes += [(2, 8192), (2, 16384)] + [(3, w) for w in TAILS]
        mid = (37, 129)
    else:
        shapes = [(1, 7), (37, 129), (2050, 256), (3, 8193), (64, 4096), (2, 20001), (65537, 4), (2, 8192), (2, 16384)]
        shapes += [(3, w) for w in TAILS]
        if level == "cuda":
            shapes += [(4096, 4096), (33000, 128)]
        mid = (2050, 256)
    out = [Setup({"R": r, "H": h}, seed=i) for i, (r, h) in enumerate(shapes)]
    m = {"R": mid[0], "H": mid[1]}
    out += [Setup(m, family=f, seed=20 + i) for i, f in enumerate(
        ("tiny3", "tiny4", "outlier", "large", "positive", "zero_rows", "mixed"))]  # fmt: skip
    out += [Setup(m, dy=d, seed=30) for d in ("correlated", "positive")]
    out += [Setup(m, family="positive", dy="positive", seed=31)]
    out += [Setup(m, layout=lay, seed=40) for lay in ("transposed", "sliced")]
    out += [Setup(m, dy_layout=lay, seed=41) for lay in ("expanded", "expanded_cols", "transposed", "sliced")]
    three = {"R": (3, 5), "H": mid[1]}
    out += [Setup(three, seed=42), Setup(three, layout="sliced", dy_layout="transposed", seed=44), Setup({"R": (2, 3, 4), "H": 128 if level != "tiny" else 16},
                  layout="swapped", dy_layout="swapped", seed=43)]  # fmt: skip
    out += [Setup({"R": (3, 5), "H": mid[1]}, layout="gap", dy_layout="gap", seed=45)]
    return out + _eps(m)


def _eps(m: dict[str, Any]) -> list[Setup]:
    return [Setup(m, family=f, options={"eps": e}, seed=50) for f, e in (("tiny3", 1e-5), ("randn", 1e-2), ("tiny4", 1e-8), ("tiny4", 0.0))]


def _plan_head_norm(gate: int, level: str) -> list[Setup]:
    big = {"tiny": (1, 3, 2, 16), "cpu": (2, 150, 8, 128), "cuda": (2, 2050, 8, 128)}[level]
    if gate == 1 and level != "tiny":
        big = (2, 19, 4, 128)
    shapes = [big, (1, 1, 1, 7), (2, 5, 3, 16 if level == "tiny" else 100)]
    out = [Setup({"B": b, "S": s, "N": n, "D": d}, seed=i) for i, (b, s, n, d) in enumerate(shapes)]
    m = dict(zip("BSND", big, strict=True))
    out += [Setup(m, family=f, seed=10) for f in ("tiny3", "tiny4", "outlier", "positive", "zero_rows", "mixed")]
    out += [Setup(m, dy=d, seed=11) for d in ("correlated", "positive")]
    out += [Setup(m, layout=a, dy_layout=b, seed=12) for a, b in (
        ("swapped", "swapped"), ("sliced", "contiguous"), ("contiguous", "expanded"), ("transposed", "sliced"))]  # fmt: skip
    out += [Setup(m, layout="gap", dy_layout="gap", seed=14)]
    if level != "tiny":
        out.append(Setup({"B": 1, "S": 9000, "N": 8, "D": 128 if level == "cuda" and gate == 2 else 4}, seed=13))
    return out + _eps(m)


def _plan_swiglu(gate: int, level: str) -> list[Setup]:
    if level == "tiny":
        shapes, mid = [(1, 7), (5, 33), (2, 4099)], (5, 33)
    elif gate == 1:
        shapes, mid = [(1, 7), (37, 129), (3, 12288), (2, 8193), (2, 20001), (65537, 2), (2, 8192)], (37, 129)
        shapes += [(3, w) for w in TAILS]
    else:
        shapes, mid = [(1, 7), (37, 129), (3, 12288), (2, 20001), (65537, 2), (2, 8192)], (300, 257)
        shapes += [(3, w) for w in TAILS]
        if level == "cuda":
            shapes, mid = shapes + [(2048, 12288)], (2048, 1000)
    out = [Setup({"R": r, "N": n}, seed=i) for i, (r, n) in enumerate(shapes)]
    m = {"R": mid[0], "N": mid[1]}
    out += [Setup(m, family=f, seed=20) for f in ("tiny3", "outlier", "large", "positive", "zero_rows", "mixed")]
    out += [Setup(m, dy=d, seed=30) for d in ("correlated", "positive")]
    out += [Setup(m, layout=lay, seed=40) for lay in ("transposed", "sliced")]
    out += [Setup(m, dy_layout=lay, seed=41) for lay in ("expanded", "expanded_cols", "transposed", "sliced")]
    three = {"R": (3, 5), "N": mid[1]}
    out += [Setup(three, seed=42), Setup(three, layout="sliced", dy_layout="transposed", seed=44)]
    out += [Setup(three, layout="gap", dy_layout="gap", seed=45)]
    # Only one of two tensors strided: a kernel that takes one's strides for the other's.
    out += [Setup(m, layout=lay, seed=46) for lay in ("sliced@0", "sliced@1", "transposed@1")]
    return out


def _plan_rope(gate: int, level: str) -> list[Setup]:
    m = {"B": 2, "C": 2, "Hq": 4, "Hk": 2, "S": 5 if level == "tiny" else 37, "D": 16 if level == "tiny" else 64}
    out = [Setup(m), Setup({**m, "C": 1}, seed=1), Setup({**m, "B": 1, "C": 1, "S": 1}, seed=2),
           Setup({**m, "Hq": 3, "Hk": 3, "D": 20}, seed=3)]  # fmt: skip
    if level != "tiny":
        out += [Setup({"B": 3, "C": 3, "Hq": 8, "Hk": 1, "S": 67, "D": 128}, seed=4),
                Setup({"B": 1, "C": 1, "Hq": 2, "Hk": 1, "S": 1030, "D": 16}, seed=7)]  # fmt: skip
    if level == "cuda":
        out += [Setup({"B": 2, "C": 2, "Hq": 32, "Hk": 8, "S": 1023, "D": 128}, layout="swapped", seed=5)]
        if gate == 2:
            out += [Setup({"B": 1, "C": 1, "Hq": 2, "Hk": 1, "S": 65600, "D": 16}, seed=6)]
    out += [Setup(m, family=f, seed=10) for f in ("outlier", "large", "positive", "mixed")]
    out += [Setup(m, dy="correlated", seed=11), Setup(m, dy="positive", seed=12)]
    out += [Setup(m, layout=a, dy_layout=b, seed=13) for a, b in (
        ("swapped", "swapped"), ("swapped", "contiguous"), ("contiguous", "swapped"), ("sliced", "sliced"),
        ("transposed", "contiguous"), ("contiguous", "expanded"), ("contiguous", "expanded_cols"),
        ("swapped@0", "contiguous"), ("swapped@1", "contiguous"), ("contiguous", "swapped@0"), ("contiguous", "swapped@1"),
        ("gap", "gap"))]  # fmt: skip
    out += [Setup(m, tables=lay, seed=14) for lay in ("sliced", "transposed", "gap")]
    return out


def _plan_ce(gate: int, level: str) -> list[Setup]:
    if level == "tiny":
        shapes, mid = [(1, 7), (6, 33), (2, 9001)], (6, 33)
    elif gate == 1:
        shapes, mid = [(1, 7), (37, 129), (9, 1000), (5, 8193), (2, 151937), (65537, 3)], (37, 129)
        shapes += [(5, 4096), (2, 32768), (2, 65536)] + [(3, w) for w in TAILS]
    else:
        shapes, mid = [(1, 7), (37, 129), (5, 8193), (2, 151937), (65537, 3)], (300, 517)
        shapes += [(5, 4096), (2, 32768), (2, 65536)] + [(3, w) for w in TAILS]
        if level == "cuda":
            shapes, mid = shapes + [(64, 151936), (2050, 4096)], (2050, 517)
    out = [Setup({"N": n, "V": v}, seed=i) for i, (n, v) in enumerate(shapes)]
    m = {"N": mid[0], "V": mid[1]}
    out += [Setup(m, family=f, seed=20) for f in (
        "none_ignored", "many_ignored", "large", "negative", "outlier", "positive", "zero_rows", "tiny3", "masked",
        "masked_inf")]  # fmt: skip
    wide = [(2, 9001)] if level == "tiny" else [(2, 9001), (3, 32776), (3, 40005)]
    out += [Setup({"N": n, "V": v}, family=f, seed=21) for n, v in wide for f in ("tail", "masked_inf")]
    out += [Setup(m, family="all_ignored", options={"num_items_in_batch": mid[0]}, seed=22)]
    out += [Setup(m, tables="sliced", seed=23)]
    out += [Setup(m, layout=lay, seed=40) for lay in ("transposed", "sliced")]
    out += [Setup(m, options={"ignore_index": i}, seed=50) for i in (3, 0)]
    out += [Setup(m, options={"num_items_in_batch": n}, seed=51) for n in (mid[0] * 3, f"tensor:{mid[0] * 3}", 2)]
    return out


def _plan_causal(gate: int, level: str) -> list[Setup]:
    b, t, v = (2, 5, 17) if level == "tiny" else (3, 29, 131)
    m = {"B": b, "T": t, "V": v}
    out = [Setup(m), Setup({**m, "B": 1}, seed=1), Setup({"B": 2, "T": 3, "V": 4099 if level == "tiny" else 20001}, seed=3)]
    out += [Setup(m, dy="positive", seed=4)]
    out += [Setup(m, family=f, seed=2) for f in ("none_ignored", "many_ignored", "large", "masked", "masked_inf", "tail")]
    out += [Setup(m, layout=lay, seed=5) for lay in ("transposed", "sliced", "gap")] + [Setup(m, tables="sliced", seed=6)]
    out += [Setup(m, options={"ignore_index": 3}, seed=7)]
    return out + [Setup(m, options={"num_items_in_batch": n}, seed=8) for n in (2, f"tensor:{b * t * 3}")]


def _ce_slack(tensors, dys, options) -> dict[str, Tensor]:
    """Fused kernels store the log-sum-exp and take exp(z - lse): one rounding of lse scales a whole row."""
    z, labels = tensors
    lse = torch.logsumexp(z, -1, keepdim=True)
    keep = labels != options["ignore_index"]
    count = options.get("num_items_in_batch")
    count = keep.sum() if count is None else count
    return {"d_logits": torch.exp(z - lse) * lse.abs() * keep.unsqueeze(-1) * dys[0].abs() / count}


def _causal_slack(tensors, dys, options) -> dict[str, Tensor]:
    z, labels = tensors
    shifted = torch.nn.functional.pad(labels, (0, 1), value=options["ignore_index"])[..., 1:]
    return _ce_slack((z, shifted), dys, options)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("rms_norm", (Arg("x", ("R", "H")), Arg("weight", ("H",), "weight")), references.rms_norm, _plan_rms,
           {"R": 3, "H": 5}, {"eps": 1e-6}),
        Op("head_norm", (Arg("x", ("B", "S", "N", "D")), Arg("weight", ("D",), "weight")), references.rms_norm,
           _plan_head_norm, {"B": 1, "S": 2, "N": 2, "D": 5}, {"eps": 1e-6}),
        Op("swiglu", (Arg("gate", ("R", "N")), Arg("up", ("R", "N"))), references.swiglu, _plan_swiglu,
           {"R": 2, "N": 5}),
        Op("rope", (Arg("q", ("B", "Hq", "S", "D")), Arg("k", ("B", "Hk", "S", "D")),
                    Arg("cos", ("C", "S", "D"), "cos"), Arg("sin", ("C", "S", "D"), "sin")), references.rope,
           _plan_rope, {"B": 2, "C": 2, "Hq": 2, "Hk": 1, "S": 2, "D": 4}),
        Op("cross_entropy", (Arg("logits", ("N", "V")), Arg("labels", ("N",), "label", "V")),
           references.cross_entropy, _plan_ce, {"N": 5, "V": 4}, {"ignore_index": -100}, _ce_slack),
        Op("causal_lm_loss", (Arg("logits", ("B", "T", "V")), Arg("labels", ("B", "T"), "label", "V")),
           references.causal_lm_loss, _plan_causal,
           {"B": 2, "T": 4, "V": 4}, {"ignore_index": -100}, _causal_slack),
    )
}  # fmt: skip


# -------------------------------------------------------------------- the reader's own op

_ARG = re.compile(r"(\w+)(?::(\w+))?\[([^\]]*)\](?:<(\w+))?$")
ROLES = {None: "data", "float": "data", "weight": "weight", "const": "const", "int": "label"}


def parse_inputs(text: str) -> tuple[Arg, ...]:
    """``"x[R,H] w:weight[H] labels:int[R]<V"`` → arguments.

    ``name[dims]`` is floating data; ``:weight`` lies around 1; ``:const`` gets no gradient; ``:int``
    needs ``<bound``, a size. Dims are integers or symbols, at least one symbol in all.

    Raises:
        UsageError: says which piece is wrong and what is accepted.
    """
    out = []
    for piece in re.sub(r"\s*,\s*", ",", text).split():
        m = _ARG.match(piece)
        if not m or m[2] not in ROLES:
            raise UsageError(f"--inputs: cannot read {piece!r}; write name[R,H], name:weight[H], name:const[H] or name:int[R]<V")
        dims = tuple(int(d) if d.isdigit() else d for d in (s.strip() for s in m[3].split(",")) if d)
        if any(isinstance(d, str) and not d.isidentifier() for d in dims):
            raise UsageError(f"--inputs: bad dimension in {piece!r}; use integers or identifiers")
        if 0 in dims or m[4] == "0":
            raise UsageError(f"--inputs: {piece!r}: sizes and bounds start at 1 (the gates try 0 rows by themselves)")
        if (ROLES[m[2]] == "label") != bool(m[4]):
            raise UsageError(f"--inputs: {piece!r}: integers, and only they, need a bound, e.g. labels:int[R]<V")
        out.append(Arg(m[1], dims, ROLES[m[2]], (int(m[4]) if m[4].isdigit() else m[4]) if m[4] else None))
    if not any(a.grad for a in out):
        raise UsageError("--inputs: at least one floating input that receives a gradient is needed")
    if len({a.name for a in out}) != len(out):
        raise UsageError("--inputs: argument names must differ")
    symbols = {d for a in out for d in a.dims if isinstance(d, str)}
    missing = [a.high for a in out if isinstance(a.high, str) and a.high not in symbols]
    if missing:
        raise UsageError(f"--inputs: bound {missing[0]!r} is no dimension of any input; use a number or a known symbol")
    return tuple(out)


def generic(args: tuple[Arg, ...], reference: Callable[..., Any]) -> Op:
    """An operator from parsed arguments: the gates choose adversarial sizes for every symbol."""
    symbols: list[str] = []
    for a in args:
        symbols += [d for d in a.dims if isinstance(d, str) and d not in symbols]
    last = {a.dims[-1] for a in args if a.dims and isinstance(a.dims[-1], str)}
    lead = [s for s in symbols if s not in last]

    def dims(rows: int, width: int) -> dict[str, int]:
        # A symbol that is the last dim of some argument is a width; the rest are rows, the first
        # of them the long one, so that a many-dimensional input stays affordable. All sizes differ,
        # or two dims taken for each other would not show.
        sizes = {s: (rows if i == 0 else min(rows, 2 + i)) for i, s in enumerate(lead)}
        return sizes | {s: max(width + 2 * i, 2) for i, s in enumerate(s for s in symbols if s in last)}

    def plan(gate: int, level: str) -> list[Setup]:
        if level == "tiny":
            shapes, mid = [(1, 7), (5, 33)], (5, 33)
        elif gate == 1:
            shapes, mid = [(1, 7), (37, 129), (3, 1000), (300, 64)], (37, 129)
        else:
            shapes, mid = [(1, 67), (37, 129), (2050, 100), (3, 2049)], (300, 129)
        if level != "tiny" and lead:
            shapes.append((65537, 5))
        sizes = [dims(r, w) for r, w in shapes]
        # One dim far beyond a block while the others are short, each width in turn; and a long dim in
        # the middle, e.g. the sequence behind a batch.
        sizes += [dims(2, 5) | {s: 4099 if level == "tiny" else 20001} for s in symbols if s in last]
        if len(lead) > 1:
            sizes.append(dims(2, 5) | {lead[-1]: 7 if level == "tiny" else 1030})
        m = dims(*mid)
        out = [Setup(d, seed=i) for i, d in enumerate(sizes) if d not in sizes[:i]]
        # Only families on which any operator is defined: exp or a division would overflow on more.
        out += [Setup(m, family=f, seed=20) for f in ("tiny3", "tiny4", "outlier", "large", "positive", "negative", "zero_rows", "mixed")]
        out += [Setup(m, dy=d, seed=30) for d in ("correlated", "positive")]
        out += [Setup(m, layout=lay, seed=40) for lay in ("transposed", "sliced")]
        out += [Setup(m, dy_layout=lay, seed=41) for lay in ("expanded", "expanded_cols", "transposed", "sliced")]
        return out

    small = {s: 3 + i for i, s in enumerate(symbols)}
    return Op("custom", args, reference, plan, small)


class _Keep64(TorchDispatchMode):
    """Casts from fp64 to fp32 do nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def lifted(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference that computes in fp64 when given fp64, even if its code says ``x.float()``.

    Model code casts to fp32 for stability (transformers' Qwen3RMSNorm does); as the source of truth
    it must not. For narrower inputs nothing changes.
    """

    @functools.wraps(reference)
    def call(*tensors: Tensor, **options: Any) -> Any:
        if any(t.dtype == torch.float64 for t in tensors):
            with _Keep64():
                return reference(*tensors, **options)
        return reference(*tensors, **options)

    return call


# --------------------------------------------------------------------- calling the kernel


def signature(kernel: Callable[..., Any]) -> tuple[Callable[..., Any], list[inspect.Parameter]]:
    """The kernel, callable by keyword, and its parameters; none where python cannot tell.

    Two kinds hide their parameters behind ``*args, **kwargs``: a module (look at its ``forward``), and
    ``SomeFunction.apply``, whose options moreover go by position.
    """
    owner = getattr(kernel, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and kernel.__name__ == "apply":
        sig = inspect.signature(owner.forward)
        if owner.setup_context is torch.autograd.Function.setup_context:  # then forward's first parameter is ctx
            sig = sig.replace(parameters=list(sig.parameters.values())[1:])

        def by_position(*tensors: Tensor, **options: Any) -> Any:
            bound = sig.bind(*tensors, **options)
            bound.apply_defaults()
            return kernel(*bound.args)

        return by_position, list(sig.parameters.values())
    try:
        return kernel, list(inspect.signature(kernel.forward if isinstance(kernel, torch.nn.Module) else kernel).parameters.values())
    except (TypeError, ValueError):
        return kernel, []


def _takes(kernel: Callable[..., Any], op: Op, name: str) -> bool:
    """Whether a kernel that declares ``**kwargs`` lets this option through to whatever it wraps."""
    case = build(op, Setup(op.small), torch.float32, torch.device("cpu"))
    try:
        with torch.no_grad():
            kernel(*case.tensors, **{name: op.options.get(name)})
    except TypeError as e:
        return "keyword" not in str(e)
    except (Exception, SystemExit):  # noqa: BLE001 - it may need a GPU; a gate will report what is really wrong
        pass
    return True


def adapt(op: Op, kernel: Callable[..., Any]) -> tuple[Callable[..., Any], Op, list[str]]:
    """Fit the operator's options to the kernel's signature.

    Returns:
        the kernel taking ``(*tensors, **options)``, the operator restricted to the options that the
        kernel knows, and notes for the report (what could not be tested).
    """
    kernel, params = signature(kernel)
    if op.name == "causal_lm_loss" and any(p.name == "vocab_size" for p in params):  # transformers' signature
        inner = kernel
        kernel = lambda *t, **o: inner(*t, vocab_size=t[0].shape[-1], **o)  # noqa: E731
        params = [p for p in params if p.name != "vocab_size"]
    names = [n for n in ("eps", "ignore_index", "num_items_in_batch") if n in op.options or "ignore_index" in op.options and n != "eps"]
    if not names:
        return kernel, op, []
    known, by_name = set(), {p.name for p in params if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if any(p.kind == p.VAR_KEYWORD for p in params):
        known = {n for n in names if _takes(kernel, op, n)}
    known |= {n for n in names if n in by_name}
    positional = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    fn = kernel
    if "eps" in names and "eps" not in known:
        star = any(p.kind == p.VAR_POSITIONAL for p in params)
        if len(positional) > len(op.args) or star or not params:
            # eps under another name: pass it by position, as Qwen3's own call sites do.
            known.add("eps")
            fn = lambda *t, eps: kernel(*t, eps)  # noqa: E731
    if known == set(names):
        return fn, op, []
    notes = [f"kernel 的签名里没有参数 {n}，只按默认语义检查" for n in names if n not in known]
    inner_plan = op.plan

    def plan(gate: int, level: str) -> list[Setup]:
        return [s for s in inner_plan(gate, level) if set(s.options) <= known]

    # The reference keeps the documented defaults (eps 1e-6, ignore_index -100) for what the kernel lacks.
    call = fn
    hidden = {n for n in op.options if n not in known}
    if hidden:
        call = lambda *t, **o: fn(*t, **{k: v for k, v in o.items() if k not in hidden})  # noqa: E731
    return call, replace(op, plan=plan), notes
