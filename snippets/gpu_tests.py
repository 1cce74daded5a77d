"""The project's own GPU tests, run and recorded like any other measurement.

Continuous integration has no GPU, so the tests marked ``gpu`` run where the numbers are made.
A failing test is a row here, not an exception: the page shows what failed, and a claim over the
``failed`` column keeps a release from going out with it.

    python -m snippets.gpu_tests
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from snippets import measure as measure_module

ROOT = Path(__file__).resolve().parent.parent

EXPERIMENT = {
    "title": "GPU 测试",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 3,
    "full": {"paths": ["tests/checkpointing", "tests/kernels", "tests/precision", "tests/test_gpu_tests.py", "tests/test_variants.py", "tests/cuda_graph"], "limit_s": 480},
    "smoke": {"paths": ["tests/test_gpu_tests.py"], "limit_s": 60},
    "tables": {
        "files": {"file": "", "passed": "项", "failed": "项", "skipped": "项", "seconds": "s"},
        "failures": {"file": "", "test": "", "message": ""},
    },
    # What the outcome depends on: every file with a test marked gpu, and what they share.
    "data": [
        "tests/checkpointing/test_chunked_loss.py",
        "tests/checkpointing/test_offload.py",
        "tests/checkpointing/test_pitfalls.py",
        "tests/checkpointing/test_recipes.py",
        "tests/cuda_graph/test_on_gpu.py",
        "tests/kernels/test_cross_entropy.py",
        "tests/kernels/test_patch.py",
        "tests/kernels/test_rms_norm.py",
        "tests/kernels/test_rope.py",
        "tests/kernels/test_swiglu.py",
        "tests/precision/test_liger_ci.py",
        "tests/precision/test_sources.py",
        "tests/precision/test_techniques.py",
        "tests/precision/test_training.py",
        "tests/test_gpu_tests.py",
        "tests/test_variants.py",
        "tests/conftest.py",
        "tests/kernels/common.py",
    ],
}


# --8<-- [start:run]
def run_pytest(report: Path, paths: list[str], limit_s: float, root: Path = ROOT, marker: str = "gpu") -> None:
    """Run the marked tests in a process of their own, which writes a JUnit report.

    Raises:
        MeasureError: pytest found nothing, could not start, was killed, or ran out of time. Failing
            tests (exit code 1) are a result and raise nothing.
    """
    command = [sys.executable, "-m", "pytest", "-m", marker, "-q", "-p", "no:cacheprovider"]
    command += [f"--junit-xml={report}", *paths]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise measure_module.MeasureError(f"{' '.join(command)}: not finished after {limit_s} s") from error
    if done.returncode not in (0, 1) or not report.exists():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise measure_module.MeasureError(f"{' '.join(command)} ended with code {done.returncode}:\n{tail}")
# --8<-- [end:run]


def read_report(report: Path) -> measure_module.Tables:
    """Rows of a JUnit report: counts per test file, and one row per failure.

    An error in a fixture or an import counts as failed. Without failures the second table says so
    in one row, since an empty table would be no evidence.
    """
    files: dict[str, dict] = {}
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        file = source_file(case.get("classname", ""), case.get("name", ""))
        row = files.setdefault(file, {"file": file, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        row["seconds"] += float(case.get("time", 0.0))
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            row["failed"] += 1
            message = (bad.get("message") or bad.text or "").strip().splitlines() or [""]
            failures.append({"file": file, "test": case.get("name", ""), "message": message[0][:300]})
        elif case.find("skipped") is not None:
            row["skipped"] += 1
        else:
            row["passed"] += 1
    if not files:
        raise measure_module.MeasureError(f"{report}: no test in it; is any test marked gpu?")
    return {
        "files": sorted(files.values(), key=lambda r: r["file"]),
        "failures": failures or [{"file": "", "test": "", "message": "没有失败的测试"}],
    }


def source_file(classname: str, name: str) -> str:
    """``tests.precision.test_sources.TestX`` → ``tests/precision/test_sources.py``.

    A file that cannot even be imported appears with its dotted path as the name and no class.
    """
    parts = (classname or name).split(".")
    last = max((i for i, p in enumerate(parts) if p.startswith("test_")), default=len(parts) - 1)
    return "/".join(parts[: last + 1]) + ".py"


def measure(*, paths: list[str], limit_s: float) -> measure_module.Tables:
    """Run the tests marked ``gpu`` below ``paths``.

    Args:
        paths: files or folders, relative to the project's root.
        limit_s: time limit for all of them together, seconds.
    """
    measure_module.progress(f"pytest -m gpu {' '.join(paths)}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run_pytest(report, paths, limit_s)
        return read_report(report)


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
