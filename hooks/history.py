"""The project as it was: files of a commit, read through git."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import hooks


class HistoryError(Exception):
    """git cannot show what was asked for; the message says why and what would help."""


def _git(*words: str) -> bytes:
    try:
        return subprocess.run(["git", *words], cwd=hooks.root(), capture_output=True, timeout=120, check=True).stdout
    except FileNotFoundError as error:
        raise HistoryError("git is not installed; install it to look at earlier commits") from error
    except subprocess.TimeoutExpired as error:
        raise HistoryError(f"git {words[0]} took longer than 120 s") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise HistoryError(f"git {words[0]}: {said[-1]}") from error


def commit(name: str) -> str:
    """The full hash of a commit, branch or tag.

    Raises:
        HistoryError: this repository has no such commit.
    """
    try:
        return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()
    except HistoryError as error:
        raise HistoryError(
            f"{name!r} is no commit of this repository ({error}). A shallow clone has only the newest ones: git fetch --unshallow"
        ) from error


def files(name: str, *folders: str) -> dict[str, bytes]:
    """Path → content of the files below `folders` (all of them if none is named) at a commit; a folder that it lacks is empty.

    Raises:
        HistoryError: this repository has no such commit.
    """
    tree = commit(name)
    there = {line for line in _git("ls-tree", "--name-only", "-z", tree).decode().split("\0") if line}
    wanted = [f for f in folders if f in there]
    if folders and not wanted:
        return {}
    archive = tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", tree, "--", *wanted)))
    return {m.name: archive.extractfile(m).read() for m in archive.getmembers() if m.isfile()}


def extract(name: str, into: Path) -> None:
    """Write a commit's files below a folder, but for its records.

    Raises:
        HistoryError: this repository has no such commit.
    """
    for path, data in files(name).items():
        if not path.startswith("records/"):
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
