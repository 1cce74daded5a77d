"""The runner of the GPU tests, on a small project made for the purpose."""

import pytest
import torch

from snippets import gpu_tests
from snippets import measure as measure_module

SAMPLE = """
import pytest

pytestmark = pytest.mark.sample

def test_good(): pass

def test_bad(): assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

@pytest.fixture
def broken(): raise RuntimeError("no device")

def test_error(broken): pass
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sample: of this test\n", encoding="utf-8")
    (tmp_path / "tests" / "deep" / "test_a.py").write_text(SAMPLE, encoding="utf-8")
    (tmp_path / "tests" / "test_b.py").write_text(
        "import pytest\n@pytest.mark.sample\nclass TestB:\n    def test_b(self): pass\n"
        "def test_other(): assert False\n",
        encoding="utf-8",
    )
    return tmp_path


def outcome(project, paths, marker="sample", limit_s=60):
    report = project / "report.xml"
    gpu_tests.run_pytest(report, paths, limit_s, project, marker)
    return gpu_tests.read_report(report)


def test_counts_and_failures_per_file(project):
    tables = outcome(project, ["tests"])
    measure_module.check_tables(gpu_tests.EXPERIMENT["tables"], tables)
    counts = {r["file"]: (r["passed"], r["failed"], r["skipped"]) for r in tables["files"]}
    # test_other fails, but carries no marker: it must not run.
    assert counts == {"tests/deep/test_a.py": (1, 2, 1), "tests/test_b.py": (1, 0, 0)}
    assert {r["test"] for r in tables["failures"]} == {"test_bad", "test_error"}
    assert "one is not two" in next(r["message"] for r in tables["failures"] if r["test"] == "test_bad")


def test_no_failures_is_said(project):
    tables = outcome(project, ["tests/test_b.py"])
    assert [r["message"] for r in tables["failures"]] == ["没有失败的测试"]


def test_nothing_selected_is_an_error(project):
    with pytest.raises(measure_module.MeasureError, match="code 5"):
        outcome(project, ["tests"], "no_such_marker")


def test_a_broken_test_file_is_an_error_with_its_reason(project):
    (project / "tests" / "test_c.py").write_text("import no_such_package\n", encoding="utf-8")
    with pytest.raises(measure_module.MeasureError, match="no_such_package"):
        outcome(project, ["tests"])


def test_time_limit(project):
    (project / "tests" / "test_d.py").write_text(
        "import pytest, time\n@pytest.mark.sample\ndef test_d(): time.sleep(60)\n", encoding="utf-8"
    )
    with pytest.raises(measure_module.MeasureError, match="not finished after 3 s"):
        outcome(project, ["tests/test_d.py"], limit_s=3)


def test_every_file_with_a_gpu_test_ages_the_record():
    marked = {p.relative_to(gpu_tests.ROOT).as_posix() for p in (gpu_tests.ROOT / "tests").rglob("test_*.py")
              if "@pytest.mark.gpu" in p.read_text(encoding="utf-8")}  # fmt: skip
    assert marked and marked <= set(gpu_tests.EXPERIMENT["data"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_device_computes():
    assert torch.ones(8, device="cuda").sum().item() == 8
