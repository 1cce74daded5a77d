"""What a reader's first commands rely on: the Makefile's promises, the vendored library, the pins."""

import hashlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.site.browser import ROOT


@pytest.fixture
def project(tmp_path):
    """A one-page project under this project's Makefile; returns (folder, make)."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "mkdocs.yml").write_text("site_name: x\ntheme: {name: null, custom_dir: theme}\nplugins: []\n")
    (tmp_path / "theme").mkdir()
    (tmp_path / "theme/main.html").write_text("{{ page.content }}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("first")

    def make(*arguments):
        return subprocess.run(["make", *arguments, f"PY={sys.executable}"], cwd=tmp_path, text=True, capture_output=True)

    return tmp_path, make


def test_a_failed_build_keeps_the_old_site(project):
    folder, make = project
    done = make("site")
    assert done.returncode == 0, done.stderr
    assert (folder / "site/index.html").read_text() == "<p>first</p>"

    (folder / "docs/index.md").write_text("second [broken](nowhere.md)")
    done = make("site")
    assert done.returncode != 0 and "nowhere.md" in done.stderr
    assert (folder / "site/index.html").read_text() == "<p>first</p>"

    (folder / "docs/index.md").write_text("third")
    assert make("site").returncode == 0
    assert (folder / "site/index.html").read_text() == "<p>third</p>"
    assert list(folder.glob(".site-new*")) == []


@pytest.mark.parametrize(
    ("arguments", "refresh", "smoke"),
    [
        ([], "all", ""),
        (["STALE=1"], "stale", ""),
        (["ONLY=precision.*,kernels.bench", "SMOKE=1"], "precision.*,kernels.bench", "1"),
    ],
)
def test_refresh_passes_its_choice_to_the_build(project, arguments, refresh, smoke):
    folder, make = project
    (folder / "mkdocs.yml").write_text((folder / "mkdocs.yml").read_text() + "hooks: [hook.py]\n")
    (folder / "hook.py").write_text(
        "import os\ndef on_page_markdown(markdown, **_):\n    return os.environ['REFRESH'] + '|' + os.environ['SMOKE']\n"
    )
    done = make("refresh", *arguments)
    assert done.returncode == 0, done.stderr
    text = re.sub(r"<[^>]+>", "", (folder / "site/index.html").read_text())
    assert text == f"{refresh}|{smoke}"


def test_refresh_refuses_a_contradiction(project):
    _, make = project
    done = make("refresh", "ONLY=a", "STALE=1")
    assert done.returncode != 0 and "ONLY" in done.stderr


def test_mermaid_is_the_file_that_was_vetted():
    folder = ROOT / "docs/assets/javascripts"
    digest, name = (folder / "mermaid.min.js.sha256").read_text().split()
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", ["requirements-site.txt", "requirements.txt", "requirements-test.txt"])
def test_requirements_are_pinned_exactly(name):
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    wrong = [line for line in lines if line and not re.fullmatch(r"-r requirements[\w-]*\.txt|[\w.-]+==[\w.]+", line)]
    assert wrong == []


def test_site_requirements_hold_no_torch():
    text = (ROOT / "requirements-site.txt").read_text()
    assert not re.search(r"^(torch|triton|transformers|liger)", text, re.M)
