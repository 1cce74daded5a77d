"""The README's own example, followed to the letter."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_project

import hooks
from hooks import experiments, records

ROOT = Path(hooks.__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def project(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def test_the_example_of_an_experiment_is_measured_and_shown(project):
    path = re.search(r"新建 `(snippets/[\w/]+\.py)`", README)[1]
    assert not (ROOT / path).exists(), "the example must not carry the name of an experiment that exists"
    code = re.search(r"\n```python\n(from snippets.measure.*?)\n```\n", README, re.DOTALL)[1]
    page = re.search(r"\n````markdown\n(.*?)\n````\n", README, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12  # "ten lines"
    shutil.copy(ROOT / "snippets/measure.py", project / "snippets/measure.py")
    (project / path).parent.mkdir(parents=True)
    (project / path).write_text(code, encoding="utf-8")
    (project / "docs/index.md").write_text(f"# 页面\n\n{page}\n", encoding="utf-8")
    only = re.search(r"`make refresh ONLY=([\w.]+)`", README)[1]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q"], cwd=project, capture_output=True, text=True, timeout=120,
        env=os.environ | {"REFRESH": only, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = records.load(only).values()
    assert not record.smoke and not record.stale and experiments.find(only).title in README
    html = (project / "site/index.html").read_text(encoding="utf-8")
    worst = max(record.tables["error"], key=lambda row: row["relative"])
    assert f"{worst['relative']:.1e}" in html and "相对误差" in html


def test_every_command_exists():
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert set(re.findall(r"(?m)^make ([a-z]+)", README)) <= targets
    modules = set(re.findall(r"-m (snippets\.[\w.]+)", README))
    assert modules and modules <= {f"snippets.{id}" for id in experiments.all()}
