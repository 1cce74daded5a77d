"""How long a page takes to read and when it last changed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from html import unescape

import hooks
from hooks import experiments, prose, records, runner

PER_MINUTE = {"characters": 400, "words": 200}  # Chinese characters; Latin words and numbers
_TAGS = {"code", "pre", "script", "style", "svg", "table"}
_CLASSES = {"filename", "headerlink", "hf-data", "hf-legend", "hf-more", "hf-prov"}
_CHINESE = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_WORD = re.compile(r"[A-Za-z0-9]+(?:[.,'’_-][A-Za-z0-9]+)*")
_RECORD = re.compile(r'"(?:\.\./)*(?:reproduce/)?#([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)"')


def minutes(html: str) -> int:
    """Minutes that the prose of a rendered page takes, at least 1; code and tables are looked up, not read."""
    pieces, wanted = prose.split(html, tags=_TAGS, classes=_CLASSES)
    text = unescape(" ".join(pieces[i] for i in wanted))
    return max(1, round(len(_CHINESE.findall(text)) / PER_MINUTE["characters"] + len(_WORD.findall(text)) / PER_MINUTE["words"]))


def shown(html: str) -> list[str]:
    """The experiments whose results a rendered page shows or quotes: it links to the section of each."""
    known = experiments.all()
    return sorted(id for id in set(_RECORD.findall(html)) if id in known)


def updated(src_uri: str, ids: Iterable[str], committed: dict[str, str]) -> str:
    """The day of a page's last change, "2026-12-04"; "" if neither git nor a record knows.

    The later of its file's last commit and of the newest record that it shows: new numbers change
    a page whose file stays as it was. Never the day of the build: the same checkout gives the same page.

    Args:
        src_uri: path below docs/. ids: the experiments whose records it shows.
        committed: as commits() gives it.
    """
    days = [committed[src_uri]] if src_uri in committed else []
    for id in ids:
        try:
            days += [f"{record.started:%Y-%m-%d}" for record in runner.ensure(id).values()]
        except (experiments.ExperimentError, records.RecordError, runner.RunError):
            pass  # the build fails for it, and says so where the result is shown
    return max(days, default="")


def commits() -> dict[str, str]:
    """{path below docs/: day of its last commit, UTC}; {} without git or the history.

    A shallow clone has all files in its oldest commit, so its dates would be wrong.
    """
    try:
        if _git("rev-parse", "--is-shallow-repository").strip() != "false":
            return {}
        log = _git("-c", "core.quotePath=false", "log", "--relative", "--no-renames", "--date=format-local:%Y-%m-%d", "--format=%x00%cd", "--name-only", "--", "docs/*.md")
    except (OSError, subprocess.SubprocessError):
        return {}
    days: dict[str, str] = {}
    for commit in log.split("\0")[1:]:
        day, *files = commit.split("\n")
        for file in filter(None, files):
            path = file.removeprefix("docs/")
            days[path] = max(day, days.get(path, ""))
    return days


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=hooks.root(), env=os.environ | {"TZ": "UTC"}, capture_output=True, text=True, timeout=60, check=True
    ).stdout
