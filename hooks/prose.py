"""The running text of a rendered page, apart from its markup, code, tables and pictures.

The page is cut at its tags and nothing is parsed and written anew: what is not changed on purpose
keeps its bytes, and a page of half a megabyte costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_TAG = re.compile(r"""<!--.*?-->|</?[A-Za-z](?:[^<>"']|"[^"]*"|'[^']*')*>""", re.S)
_NAME = re.compile(r"</?([A-Za-z][\w-]*)")
_CLASS = re.compile(r"""\bclass=["']([^"']*)""")
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def split(html: str, *, tags: Collection[str], classes: Collection[str] = ()) -> tuple[list[str], list[int]]:
    """Cut a page into tags and texts.

    Args:
        html: well-formed, as Markdown and hooks.render write it.
        tags, classes: elements whose inside is not wanted: by name, or by one of their classes.

    Returns:
        (pieces, wanted): ``"".join(pieces) == html``; the indices of the texts that lie outside of
        those elements. Texts are still escaped.
    """
    pieces: list[str] = []
    wanted: list[int] = []
    shut: list[str] = []  # the open elements from the unwanted one inwards
    end = 0

    def text(piece: str) -> None:
        if piece:
            if not shut:
                wanted.append(len(pieces))
            pieces.append(piece)

    for found in _TAG.finditer(html):
        text(html[end : found.start()])
        end, tag = found.end(), found[0]
        pieces.append(tag)
        if tag.startswith("<!--") or tag.endswith("/>"):
            continue
        name = _NAME.match(tag)[1].lower()
        if name in _VOID:
            continue
        if tag.startswith("</"):
            if name in shut:
                del shut[len(shut) - 1 - shut[::-1].index(name) :]
        elif shut or name in tags or (classes and (given := _CLASS.search(tag)) and not set(given[1].split()).isdisjoint(classes)):
            shut.append(name)
    text(html[end:])
    return pieces, wanted
