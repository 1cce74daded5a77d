"""Site hooks: experiments and their records, run or replay, rendering, checks. Nothing here imports torch.

The package serves one project at a time, the one whose root `root()` names: by default the
directory that holds this package; the MkDocs hook sets it to the directory of mkdocs.yml.
"""

from __future__ import annotations

from pathlib import Path

_root = Path(__file__).resolve().parent.parent


def root() -> Path:
    """Absolute path of the project: the directory with snippets/, records/ and docs/."""
    return _root


def use_root(path: str | Path) -> None:
    """Serve the project in `path` from now on."""
    global _root
    _root = Path(path).resolve()
