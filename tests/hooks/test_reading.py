import os
import subprocess

import pytest

import hooks
from hooks import reading, runner
from tests.hooks import small_project


@pytest.mark.parametrize(
    ("html", "minutes"),
    [
        (f"<p>{'字' * 4000}</p>", 10),
        (f"<p>{'word ' * 1000}</p>", 5),
        (f"<p>{'字，' * 2000}</p><p>{'3.5 ms ' * 500}</p>", 10),
        (f"<p>{'字' * 800}</p><pre>{'word ' * 9000}</pre><table><tr><td>{'字' * 9000}</td></tr></table><code>{'x ' * 9000}</code>", 2),
        ("<p>短</p>", 1),
    ],
)
def test_minutes(html, minutes):
    assert reading.minutes(html) == minutes


@pytest.fixture
def project(tmp_path):
    previous = hooks.root()
    small_project.make(tmp_path)
    runner.reset()
    yield tmp_path
    hooks.use_root(previous)
    runner.reset()


def git(folder, *words, day="2026-01-02"):
    stamp = f"{day}T23:30:00-08:00"  # the next day in UTC
    env = os.environ | {"GIT_COMMITTER_DATE": stamp, "GIT_AUTHOR_DATE": stamp}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)


def test_dates_of_pages_are_those_of_their_last_commits(project):
    git(project, "init", "-q")
    (project / "docs/其他.md").write_text("x")
    git(project, "add", ".")
    git(project, "commit", "-qm", "1")
    (project / "docs/index.md").write_text("y")
    git(project, "commit", "-qam", "2", day="2026-02-03")
    (project / "snippets/__init__.py").write_text("# z\n")
    git(project, "commit", "-qam", "3", day="2026-03-04")
    assert reading.commits() == {"index.md": "2026-02-04", "其他.md": "2026-01-03"}

    git(project.parent, "clone", "-q", "--depth", "1", f"file://{project}", "shallow")
    hooks.use_root(project.parent / "shallow")
    assert reading.commits() == {}


def test_without_git_there_are_no_commits(project):
    assert reading.commits() == {}


def test_a_page_is_as_new_as_the_newest_of_its_text_and_numbers(project):
    small_project.put(small_project.record())  # of 2026-11-30
    html = '<a href="../reproduce/#demo.squares">1</a> <a href="#demo.unknown">2</a>'
    assert reading.shown(html) == reading.shown('<h3 id="x"><a href="#demo.squares">') == ["demo.squares"]
    assert reading.updated("index.md", ["demo.squares"], {}) == "2026-11-30"
    assert reading.updated("index.md", ["demo.squares"], {"index.md": "2026-12-05"}) == "2026-12-05"
    assert reading.updated("index.md", ["demo.squares"], {"index.md": "2026-11-05"}) == "2026-11-30"
    assert reading.updated("index.md", [], {}) == ""
