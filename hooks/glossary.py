"""The glossary in docs/series.md, and its terms marked where a page first uses them.

Markdown's `abbr` finds no word inside running Chinese, which has no word boundaries; so the
rendered page is searched. A glossary entry is a row of the table below the heading with the id
`glossary`:

    | <span id="roofline">roofline</span> | what it is | [where it is explained](series:qwen3-fusion) |
    | <span id="gate">关卡（Gate）</span> | what it is | |

All names count: the one before the brackets and those inside. A name with a capital letter is
matched as it is written, so that Gate is no gate of SwiGLU; others in any case. The term links to
what its third column names first, or to its own row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

from hooks import prose

PAGE = "series.md"
# Where a mark would nest links, change what is copied or searched, or only be noise.
_TAGS = {"a", "abbr", "button", "code", "figcaption", "h1", "h2", "h3", "h4", "h5", "h6", "kbd", "label", "pre", "script", "style",
         "summary", "svg", "table"}  # fmt: skip
_CLASSES = {"hf-box", "hf-error", "hf-legend", "hf-prov", "status"}
_ROW = re.compile(r'\| *<span id="(?P<id>[a-z][a-z0-9-]*)">(?P<names>[^<|]+)</span> *\| *(?P<meaning>[^|]+?) *\|(?P<where>[^|]*)\|\s*$')
_NAMES = re.compile(r"([^（）]+)(?:（([^（）]+)）)?")
_TARGET = re.compile(r"\]\(([^)\s]+)\)")
_LINK = re.compile(r'<a href="(?P<href>[^"]*\bseries/#(?P<id>[a-z][a-z0-9-]*))">')
_LETTER = "A-Za-z0-9_"


class GlossaryError(ValueError):
    """The glossary cannot be read; the message names file, line and remedy."""


@dataclass(frozen=True)
class Term:
    """One entry: its row's id, all its names, its meaning as plain text, and a target as Markdown has it ("" = its row)."""

    id: str
    names: tuple[str, ...]
    meaning: str
    target: str


def read(markdown: str) -> list[Term]:
    """The entries of the glossary page.

    Raises:
        GlossaryError: a row that is none, a name that stands twice, or no entry at all.
    """
    lines = markdown.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("#") and "{ #glossary }" in line), len(lines))
    terms: list[Term] = []
    owner: dict[str, str] = {}
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if line.startswith("#"):
            break
        if not line.startswith("|") or re.match(r"\|[ :|-]+\|\s*$|\| 术语 \|", line):
            continue
        row = _ROW.match(line)
        names = row and _NAMES.fullmatch(row["names"].strip())
        if not names:
            raise GlossaryError(
                f'docs/{PAGE}, line {number}: not a glossary entry. Remedy: write | <span id="roofline">名（name, 别名）</span> | 含义 | 详见 |'
            )
        all_names = (names[1], *(name.strip() for name in re.split("[,，、]", names[2] or "") if name.strip()))
        for name in all_names:
            if owner.setdefault(name.lower(), row["id"]) != row["id"]:
                raise GlossaryError(f"docs/{PAGE}, line {number}: {name!r} is a name of {owner[name.lower()]!r} too. Remedy: keep one")
        if any(term.id == row["id"] for term in terms):
            raise GlossaryError(f"docs/{PAGE}, line {number}: a second entry {row['id']!r}. Remedy: another id")
        target = _TARGET.search(row["where"])
        terms.append(Term(row["id"], all_names, re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", row["meaning"]), target[1] if target else ""))
    if not terms:
        raise GlossaryError(f"docs/{PAGE}: no glossary entries. Remedy: a table below the heading with the id glossary")
    return terms


def pattern(terms: Iterable[Term]) -> tuple[re.Pattern[str], dict[str, Term]]:
    """(what finds any name in escaped text, name in lower case → its term). The longest name wins."""
    of = {name.lower(): term for term in terms for name in term.names}
    parts = []
    for name in sorted((name for term in terms for name in term.names), key=lambda n: (-len(n), n)):
        # Chinese around a name is no obstacle; a letter beside a Latin one means another word.
        before = rf"(?<![{_LETTER}])" if re.match(f"[{_LETTER}]", name) else ""
        after = rf"(?![{_LETTER}])" if re.search(f"[{_LETTER}]$", name) else ""
        text = re.escape(escape(name))
        parts.append(before + (text if name != name.lower() else f"(?i:{text})") + after)
    return re.compile("|".join(parts)), of


def mark(html: str, terms: list[Term], address: Callable[[Term], str]) -> str:
    """Mark each term where the page first uses it: a link whose tooltip is the meaning.

    Args:
        html: the rendered page.
        address: the link's target as it must stand on this page.

    A link to the entry that the author has made counts as the first use and gets the tooltip.
    """
    by_id = {term.id: term for term in terms}
    seen: set[str] = set()

    def explain(link: re.Match[str]) -> str:
        term = by_id.get(link["id"])
        if term is None:
            return link[0]
        seen.add(term.id)
        return _anchor(link["href"], term)

    html = _LINK.sub(explain, html)
    finder, of = pattern(terms)

    def first(match: re.Match[str]) -> str:
        term = of[match[0].lower()]
        if term.id in seen:
            return match[0]
        seen.add(term.id)
        return f"{_anchor(escape(address(term)), term)}{match[0]}</a>"

    pieces, wanted = prose.split(html, tags=_TAGS, classes=_CLASSES)
    for i in wanted:
        pieces[i] = finder.sub(first, pieces[i])
    return "".join(pieces)


def _anchor(href: str, term: Term) -> str:
    return f'<a class="hf-term" href="{href}" title="{escape(term.meaning)}">'
