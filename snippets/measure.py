"""Measuring: timing, memory, environment, and the command line that every experiment shares.

An experiment is a module of this package with a literal dict ``EXPERIMENT`` and a function
``measure(**settings)`` that returns ``{table: [row, ...]}``. ``cli`` runs it in this process,
checks the rows against the declared columns and prints them:

    python -m snippets.precision.sources            # full settings
    python -m snippets.precision.sources --smoke    # small settings, seconds

Nothing here knows how results are stored or shown. torch is imported where it is needed, so
that ``--help`` answers at once.

How times are taken: CUDA events on the current stream; before every timed call the L2 is
overwritten and a spin kernel is queued, so that the launches of the timed call are already
waiting when the device reaches them and the host's speed stays out of the number. Competitors
are timed in rounds whose order rotates (``side_by_side``), so that none is always first or
always on the hotter chip. The method follows triton.testing.do_bench; the rotation and the
spin are added here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Tables = dict[str, list[Row]]

L2_FLUSH_BYTES = 256 << 20  # several times the L2 of any current GPU (H100: 50 MB, H200: 60 MB)
SPIN_CYCLES = 1_500_000  # about 0.8 ms at 1.98 GHz: longer than the host needs for one timed call


class MeasureError(RuntimeError):
    """An experiment returned something that it did not declare, or cannot run here."""


# ---------------------------------------------------------------------------- environment


def device():
    """The torch device experiments run on: the current CUDA device, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """NVIDIA driver version, "" when nvidia-smi cannot tell."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return out.strip().splitlines()[0].strip() if out.strip() else ""


def environment() -> dict[str, dict[str, Any]]:
    """What a number depends on besides the code.

    Returns:
        ``{"device": {...}, "versions": {...}}``; memory in GiB; strings where unknown are "".
    """
    import torch

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "liger-kernel": _version("liger-kernel"),
    }
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(device())
        dev = {
            "name": p.name,
            "slug": p.name.lower().replace(" ", "-"),
            "memory_gib": round(p.total_memory / 2**30, 1),
            "capability": f"{p.major}.{p.minor}",
            "sm_count": p.multi_processor_count,
            "driver": _driver(),
        }
    else:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        dev = {
            "name": f"CPU ({_cpu_name()})",
            "slug": "cpu",
            "memory_gib": round(pages / 2**30, 1),
            "capability": "",
            "sm_count": 0,
            "driver": "",
        }
    return {"device": dev, "versions": versions}


def seeded(seed: int) -> None:
    """Seed every generator that an experiment may draw from (python, numpy if present, torch)."""
    import torch

    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """Run the body with or without torch's deterministic algorithms; an operator that has none only warns.

    Flash attention's backward, for one, otherwise adds dq in the order of arrival. cuBLAS also needs
    ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment before CUDA starts.
    """
    import torch

    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def progress(text: str, done: int | None = None, total: int | None = None) -> None:
    """One progress line on stderr. The recorder shows it with the elapsed time."""
    count = f" {done}/{total}" if done is not None and total is not None else ""
    print(f"[progress]{count} {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------- timing


def _summary(samples_us: Sequence[float]) -> dict[str, float]:
    if len(samples_us) < 5:
        raise MeasureError(f"{len(samples_us)} samples are too few for a median with spread; take at least 5")
    cuts = statistics.quantiles(samples_us, n=10, method="inclusive")
    out = {"median_us": statistics.median(samples_us), "p20_us": cuts[1], "p80_us": cuts[7]}
    if not all(math.isfinite(v) and v > 0 for v in out.values()):
        raise MeasureError(f"the clock gave impossible times: {out}")
    return out


def side_by_side(
    candidates: Mapping[str, Callable[[int], Any]],
    *,
    prepare: Mapping[str, Callable[[int], Any]] | None = None,
    rounds: int = 40,
    warmup: int = 8,
    spin_cycles: int = SPIN_CYCLES,
) -> dict[str, dict[str, float]]:
    """Time competitors in one process, one call each per round, in rotating order.

    Args:
        candidates: name → function of the round number (use it to rotate among input sets).
        prepare: name → untimed function called before each call with the same number.
        rounds: timed calls per candidate, at least 5.
        warmup: untimed calls per candidate before the first round.
        spin_cycles: length of the spin; more where one call takes the host longer to launch.

    Returns:
        name → ``{"median_us", "p20_us", "p80_us"}`` (µs; 20th and 80th percentiles).
    """
    import torch

    cuda = torch.cuda.is_available()
    names = list(candidates)
    before = dict.fromkeys(names, lambda _: None) | dict(prepare or {})
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda") if cuda else None
    for name in names:
        for i in range(warmup):
            before[name](i)
            candidates[name](i)
    samples: dict[str, list] = {n: [] for n in names}
    for r in range(rounds):
        shift = r % len(names)
        for name in names[shift:] + names[:shift]:
            fn = candidates[name]
            before[name](r)
            if cuda:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.zero_()
                torch.cuda._sleep(spin_cycles)
                start.record()
                fn(r)
                end.record()
                # Waiting here keeps the queue short, so that one candidate's backlog never
                # hides the next one's launch cost, and frees its outputs before the next call.
                end.synchronize()
                samples[name].append(start.elapsed_time(end) * 1e3)
            else:
                t = time.perf_counter()
                fn(r)
                samples[name].append((time.perf_counter() - t) * 1e6)
    return {n: _summary(v) for n, v in samples.items()}


def time_cuda(fn: Callable[[], Any], *, rounds: int = 40, warmup: int = 8) -> dict[str, float]:
    """Time one function; see ``side_by_side``. Falls back to the host clock without CUDA."""
    return side_by_side({"fn": lambda _: fn()}, rounds=rounds, warmup=warmup)["fn"]


def copy_bandwidth(nbytes: int, *, rounds: int = 40) -> float:
    """Measured device-to-device copy rate for a transfer that moves ``nbytes`` in total.

    ``nbytes`` counts bytes read plus bytes written, so the buffer is half as large: the same
    count as for the kernels that are compared with it.

    Returns:
        GB/s (1e9 bytes), from the median time.
    """
    import torch

    n = max(nbytes // 2, 1)
    dev = device()
    src = torch.empty(n, dtype=torch.uint8, device=dev).random_()  # random: zeros can copy faster
    dst = torch.empty_like(src)
    t = time_cuda(lambda: dst.copy_(src), rounds=rounds)
    return 2 * n / t["median_us"] / 1e3


def peak_memory(fn: Callable[[], Any]) -> float:
    """Peak memory above what is allocated on entry while ``fn`` runs, in GiB (0.0 without CUDA)."""
    import torch

    if not torch.cuda.is_available():
        fn()
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


# --------------------------------------------------------------------------- command line


def check_tables(declared: Mapping[str, Mapping[str, str]], tables: Mapping[str, Sequence[Row]]) -> None:
    """Refuse rows that don't match the declaration.

    Raises:
        MeasureError: names the table, row and column, and what would be right.
    """
    if set(tables) != set(declared):
        raise MeasureError(f"measure() returned tables {sorted(tables)}, EXPERIMENT declares {sorted(declared)}")
    for name, rows in tables.items():
        if not rows:
            raise MeasureError(f"table {name!r} is empty: a measurement that measured nothing is a failure")
        for i, row in enumerate(rows):
            if set(row) != set(declared[name]):
                raise MeasureError(
                    f"table {name!r} row {i}: columns {sorted(row)} differ from the declared {sorted(declared[name])}"
                )
            for column, value in row.items():
                if value is not None and not isinstance(value, str | bool | int | float):
                    raise MeasureError(
                        f"table {name!r} row {i} column {column!r}: {type(value).__name__} is no plain value;"
                        " return str, bool, int, float or None"
                    )
                if isinstance(value, float) and not math.isfinite(value):
                    raise MeasureError(
                        f"table {name!r} row {i} column {column!r} is {value}; use None and say why in a text column"
                    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _pad(text: str, width: int) -> str:
    """``text`` filled with spaces to ``width`` terminal columns; a Chinese character takes two."""
    return text + " " * (width - _columns(text))


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def print_tables(declared: Mapping[str, Mapping[str, str]], tables: Tables, *, most: int = 60) -> None:
    """Print tables with units; at most ``most`` rows of each, saying how many were left out."""
    for name, rows in tables.items():
        heads = [f"{c} [{u}]" if u and u != "1" else c for c, u in declared[name].items()]
        cells = [[_cell(r[c]) for c in declared[name]] for r in rows[:most]]
        widths = [max(map(_columns, (h, *(r[i] for r in cells)))) for i, h in enumerate(heads)]
        print(f"\n{name}")
        print("  ".join(map(_pad, heads, widths)).rstrip())
        for r in cells:
            print("  ".join(map(_pad, r, widths)).rstrip())
        if len(rows) > most:
            print(f"... {len(rows) - most} more rows")


def cli(experiment: Mapping[str, Any], measure: Callable[..., Tables]) -> None:
    """Command line of an experiment module: run, check, print, optionally write the payload."""
    spec = sys.modules["__main__"].__spec__
    name = (spec.name if spec else Path(sys.argv[0]).stem).removeprefix("snippets.")
    parser = argparse.ArgumentParser(prog=f"python -m snippets.{name}", description=experiment["title"])
    parser.add_argument("--smoke", action="store_true", help="small settings: does it run? Its numbers mean nothing")
    parser.add_argument("--json", metavar="FILE", help="write the result with its environment to FILE")
    args = parser.parse_args()
    mode = "smoke" if args.smoke else "full"
    try:
        payload = run(name, experiment, measure, mode)
    except MeasureError as error:
        sys.exit(f"{name}: {error}")
    print_tables(experiment["tables"], payload["tables"])
    if args.json:
        Path(args.json).write_text(json.dumps(payload, ensure_ascii=False, allow_nan=False), encoding="utf-8")


def run(name: str, experiment: Mapping[str, Any], measure: Callable[..., Tables], mode: str) -> dict[str, Any]:
    """Run one experiment in this process and return its payload.

    Raises:
        MeasureError: no suitable device, or rows that don't match the declaration.
    """
    env = environment()
    on_gpu = env["device"]["slug"] != "cpu"
    if experiment["needs"] == "cuda" and mode == "full":
        if not on_gpu:
            raise MeasureError("needs a CUDA GPU, and torch sees none. Run it on a GPU machine, or try --smoke")
        if env["device"]["memory_gib"] < experiment["memory_gib"]:
            raise MeasureError(
                f"needs {experiment['memory_gib']} GiB of device memory,"
                f" {env['device']['name']} has {env['device']['memory_gib']}"
            )
    settings = experiment[mode]
    seeded(0)
    started, t0 = datetime.now(UTC), time.perf_counter()
    tables = measure(**settings)
    check_tables(experiment["tables"], tables)
    return {
        "experiment": name,
        "mode": mode,
        "settings": settings,
        **env,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - t0, 1),
        "tables": tables,
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["--environment"]:
        sys.exit("usage: python -m snippets.measure --environment   (prints device and versions as JSON)")
    print(json.dumps(environment(), ensure_ascii=False))
