"""Records as files of the site: `records/<device>/<experiment>.json`, byte for byte what the recorder wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import hooks
from hooks import records


def publish(site: str | Path) -> None:
    """Copy every record into a built site. After the pages: a refresh writes records while they render."""
    for path in sorted((hooks.root() / records.DIRECTORY).glob("*/*.json")):
        target = Path(site) / records.relative(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
