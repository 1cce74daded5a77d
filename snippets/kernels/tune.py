"""Find launch parameters: try a few per kernel on this GPU and print the best.

    python -m snippets.kernels.tune                 # all, about a minute and a half
    python -m snippets.kernels.tune swiglu rope     # some

It changes nothing: copy what it prints into the CONFIG of the kernel's module. Every candidate runs
through the public function, so what is timed includes everything that a user's call includes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from snippets import measure
from snippets.kernels import bench

ROWS = 8192  # the middle one of the recorded shapes


def grid(**values: list) -> Iterator[dict[str, Any]]:
    """All combinations of the given values."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def sized(*pairs: tuple[int, int], unit: str = "elements", **values: list) -> Iterator[dict[str, Any]]:
    """(size, warps) pairs combined with the other values: most products of the two make no sense."""
    for size, warps in pairs:
        for rest in grid(**values):
            yield {unit: size, "warps": warps, **rest}


def searches() -> list[tuple[str, str, str, str, list[dict[str, Any]]]]:
    """(module, key in its CONFIG, case of the benchmark, direction, candidates)."""
    narrow = ((1024, 2), (2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
    flat = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
    streams = ((4096, 4), (8192, 4), (8192, 8), (16384, 8), (16384, 16), (32768, 16), (32768, 32))
    heads = list(sized((1024, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4), (2048, 8)))
    return [
        ("rms_norm", "forward", "rms_norm", "forward", list(sized((4096, 4), (4096, 8), (4096, 16), (8192, 16)))),
        ("rms_norm", "forward_narrow", "q_norm", "forward", list(sized(*narrow))),
        ("rms_norm", "backward", "rms_norm", "backward",
         list(sized((4096, 4), (4096, 8), (4096, 16), (8192, 16), waves=[1, 2, 4], stages=[1, 2]))
         + list(sized((4096, 8), (4096, 16), (8192, 16), waves=[1, 2], stages=[3, 4]))),
        ("rms_norm", "backward_narrow", "q_norm", "backward", list(sized(*narrow[1:], waves=[2, 4, 8], stages=[1, 2]))),
        ("rms_norm", "reduce", "rms_norm", "backward",
         list(grid(elements=[1024, 2048, 4096], columns=[16], warps=[4, 8]))),
        ("swiglu", "forward", "swiglu", "forward", list(sized(*flat))),
        ("swiglu", "backward", "swiglu", "backward", list(sized(*flat))),
        ("rope", "forward", "rope", "forward", heads),
        ("rope", "backward", "rope", "backward", heads),
        ("cross_entropy", "forward", "cross_entropy", "forward", list(sized(*streams, unit="bytes"))),
        ("cross_entropy", "backward", "cross_entropy", "backward", list(sized(*streams, unit="bytes"))),
    ]  # fmt: skip


def tune(module_name: str, key: str, case_name: str, direction: str, candidates: list[dict[str, Any]]) -> None:
    """Time the candidates side by side and print the three fastest and the one in use."""
    # By name: the package's attribute of that name is the function, not the module.
    config = importlib.import_module(f"snippets.kernels.{module_name}").CONFIG
    in_use = config[key]
    if in_use not in candidates:
        candidates = [in_use, *candidates]
    case = bench.CASES[case_name](ROWS)
    case.implementations = {n: case.implementations[n] for n in ("eager", "ours")}
    one = bench.prepare(case)["ours"]
    config[key] = candidates[0]
    call = one.direction(direction)

    def with_config(candidate):
        def run(i):
            config[key] = candidate
            return call(i)

        return run

    working = {}
    try:
        for candidate in candidates:
            try:
                with_config(candidate)(0)
                working[str(candidate)] = with_config(candidate)
            except Exception as error:  # too much shared memory, say: not a candidate on this GPU
                print(f"  {candidate} doesn't run here: {type(error).__name__}: {error}", file=sys.stderr)
        times = measure.side_by_side(working, rounds=20, warmup=2)
    finally:
        config[key] = in_use
    moved = case.moved[direction]
    copy = measure.copy_bandwidth(moved, rounds=20)
    ranked = sorted(times, key=lambda name: times[name]["median_us"])
    print(f"{module_name}.CONFIG[{key!r}], {case_name} at {ROWS} rows, copy {copy:.0f} GB/s")
    shown = ranked[:3] + [str(in_use)] * (str(in_use) not in ranked[:3] and str(in_use) in times)
    for name in shown:
        gbps = moved / times[name]["median_us"] / 1e3
        mark = "  (in use)" if name == str(in_use) else ""
        print(f"  {times[name]['median_us']:8.1f} µs {gbps:6.0f} GB/s {gbps / copy:6.1%}  {name}{mark}", flush=True)
    torch.cuda.empty_cache()


def main() -> None:
    found = searches()
    parser = argparse.ArgumentParser(prog="python -m snippets.kernels.tune", description="Find launch parameters.")
    parser.add_argument("modules", nargs="*", help="kernel modules to tune; default all")
    wanted = parser.parse_args().modules or sorted({s[0] for s in found})
    unknown = set(wanted) - {s[0] for s in found}
    if unknown:
        parser.error(f"no kernel module {', '.join(sorted(unknown))}; known: {', '.join(sorted({s[0] for s in found}))}")
    if not torch.cuda.is_available():
        sys.exit("snippets.kernels.tune: needs a CUDA GPU; launch parameters mean nothing in the interpreter")
    for search in found:
        if search[0] in wanted:
            tune(*search)


if __name__ == "__main__":
    main()
