"""What is slow to make and always comes out the same, kept in .cache/ below the project's root."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable

import hooks

FOLDER = ".cache"


def kept(kind: str, key: str, make: Callable[[], str], whole: Callable[[str], bool]) -> str:
    """The text that ``make`` gives, made once for each key.

    Args:
        kind: folder below FOLDER, also the files' ending.
        key: everything that the text depends on, the version of its maker included.
        whole: tells a good text from what is left of a damaged file, which is made anew.
    """
    folder = hooks.root() / FOLDER / kind
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.txt"
    try:
        held = path.read_text(encoding="utf-8")
        if whole(held):
            return held
    except (OSError, UnicodeDecodeError):
        pass
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(made)
    os.replace(temporary, path)  # readers see a whole file or none
    return made
