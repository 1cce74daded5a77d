"""hooks/publish.py: the built site holds the records, and the line under a result leads there."""

import os
import re
import subprocess
import sys

import pytest
import small_project

import hooks
from hooks import publish, records


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    yield small_project.make(tmp_path)
    hooks.use_root(before)


def test_a_build_publishes_what_it_has_just_measured_byte_for_byte(root):
    environ = os.environ | {"REFRESH": "all", "SMOKE": "", "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q"], cwd=root, env=environ, check=True, timeout=60)
    file = re.search(r'<p class="hf-prov".*<a href="([^"]+)">记录</a>', (root / "site/index.html").read_text())[1]
    assert file == "records/cpu/demo.squares.json"
    assert (root / "site" / file).read_bytes() == records.path_of("cpu", "demo.squares").read_bytes()


def test_every_device_s_records_and_nothing_else(root, tmp_path):
    record = small_project.record()
    small_project.put(record)
    small_project.put(record | {"device": record["device"] | {"slug": "nvidia-h100"}}, slug="nvidia-h100")
    (root / "records/cpu/.demo.squares.x.tmp").write_text("half a record")
    publish.publish(tmp_path / "out")
    found = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert found == ["records/cpu/demo.squares.json", "records/nvidia-h100/demo.squares.json"]
