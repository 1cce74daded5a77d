"""The command line that experiments share, and what every experiment owes it."""

import json
import os
import subprocess
import sys

import pytest

from hooks import experiments
from snippets import measure


@pytest.mark.parametrize("name", sorted(experiments.all()))
def test_every_experiment_runs_as_a_newcomer_starts_it(name, tmp_path):
    """In a process of its own, without the environment variable that the tests set for themselves."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", f"snippets.{name}", "--smoke", "--json", out],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert (result["experiment"], result["mode"]) == (name, "smoke")
    assert all(f"\n{table}\n" in done.stdout for table in result["tables"])


def test_columns_line_up_under_chinese_heads(capsys):
    declared = {"t": {"名称": "", "value": "µs"}}
    measure.print_tables(declared, {"t": [{"名称": "残差流", "value": 1.0}, {"名称": "ab", "value": None}]})
    _, title, *lines = capsys.readouterr().out.splitlines()
    assert title == "t"
    assert lines == ["名称    value [µs]", "残差流  1", "ab      –"]
