"""Code on the pages: a listing names its file and lines and links to them; a long one folds.

A fence that holds one include takes its title from there. Every file that is shown so is published
with the site, below code/: whole, highlighted, each line with an address, and as it is beside that.
So a link to the code works wherever the site is read, and shows the very lines that the site was
built from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape, unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mkdocs.commands.build import get_context
from mkdocs.utils import get_relative_url, write_file

import hooks
from hooks import cache
from hooks.valid import valid

FOLDER = "code"  # below the site
LONG = 40  # lines; a listing with more shows its beginning only, until it is unfolded
TEMPLATE = "code.html"

_TITLE = re.compile(r'\btitle="([^"]*)"')
_FILENAME = re.compile(r'<span class="filename">([^<>]*)</span>')
_LISTING = re.compile(r'(<div class="[^"]*\bhighlight)(">(?:<span class="filename">.*?</span>)?<pre>.*?</pre>)(</div>)', re.S)
_MARKER = r"8<-+[ \t]+\[[ \t]*{}[ \t]*:[ \t]*{}[ \t]*\]"


@dataclass(frozen=True)
class Lines:
    """Lines of a file, counted from 1; last is among them."""

    path: str
    first: int
    last: int


_named: dict[str, Lines] = {}  # what an include names, "path" or "path:section" → its lines
_shown: dict[str, dict[str, None]] = {}  # path → source files of the pages that show it, in their order


def reset() -> None:
    """Forget the last build."""
    _named.clear()
    _shown.clear()


def named(info: str, target: str, src_uri: str) -> tuple[str, str]:
    """A fence's first line with the title that its include gives.

    Args:
        info: the line, without indentation. target: what the include names, known to exist.
        src_uri: the page.

    Returns:
        (the line, ""), or ("", what is wrong).
    """
    path, _, section = target.partition(":")
    if section and not section[0].isalpha():
        return "", f"include {target!r}: numbers of lines change; mark a section of {path} and name that"
    own = _TITLE.search(info)
    if own and own[1] != path:
        return "", f"the title names {own[1]!r} but the lines are of {path!r}; remove the title, it is made from the include"
    _named[target] = _lines(path, section)
    _shown.setdefault(path, {})[src_uri] = None
    title = f'title="{target}"'
    if own:
        return _TITLE.sub(lambda _: title, info, count=1), ""
    return (f"{info[:-1]} {title} }}" if info.endswith("}") else f"{info} {title}"), ""


def _lines(path: str, section: str) -> Lines:
    lines = (hooks.root() / path).read_text(encoding="utf-8").splitlines()
    if not section:
        return Lines(path, 1, len(lines))
    start, end = (
        next(i for i, line in enumerate(lines, 1) if "8<-" in line and re.search(_MARKER.format(word, re.escape(section)), line))
        for word in ("start", "end")
    )
    return Lines(path, start + 1, end - 1)


def address(path: str) -> str:
    """Where a file is published, relative to the site; hosts leave out names that begin with a dot."""
    return f"{FOLDER}/{'/'.join(part.lstrip('.') for part in path.split('/'))}/"


def finish(html: str, url: str) -> str:
    """A rendered page whose listings link to their files and fold when long.

    Args:
        url: the page's, relative to the site.
    """

    def link(match: re.Match) -> str:
        it = _named.get(unescape(match[1]))
        if it is None:
            return match[0]
        href = get_relative_url(address(it.path), url)
        return (
            f'<span class="filename"><a href="{escape(href)}#L-{it.first}">{escape(it.path)}'
            f' <span class="hf-lines">第 {it.first}–{it.last} 行</span></a></span>'
        )

    def fold(match: re.Match) -> str:
        count = match[2].count("\n")
        if count <= LONG:
            return match[0]
        # No script: <details> has the state and the keyboard, results.css cuts the <pre> beside it.
        more = (
            '<details class="hf-more" data-search-exclude><summary>'
            f'<span class="hf-shut">展开全部 {count} 行</span><span class="hf-open">收起</span></summary></details>'
        )
        return f"{match[1]} hf-long{match[2]}{more}{match[3]}"

    return _LISTING.sub(fold, _FILENAME.sub(link, html))


def highlighted(path: str, text: str) -> str:
    """A whole file as HTML; line 12 has the id L-12."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_for_filename

    def make() -> str:
        # stripnl would drop leading blank lines and so count all others wrong.
        lexer = get_lexer_for_filename(path, stripnl=False)
        return highlight(text, lexer, HtmlFormatter(linespans="L", wrapcode=True, cssclass="highlight hf-file"))

    key = f"{version('pygments')}\n{Path(path).name}\n{text}"
    return cache.kept("code", key, make, lambda held: held.startswith("<div") and held.rstrip().endswith("</div>"))


def publish(env: Any, *, nav: Any, files: Any, config: Any) -> None:
    """Write every shown file into the built site."""
    template = env.get_template(TEMPLATE)
    for path, pages in _shown.items():
        place, name = address(path), Path(path).name
        data = (hooks.root() / path).read_bytes()
        text = data.decode("utf-8")
        context = get_context(nav, files, config, base_url=get_relative_url(".", place))
        context |= {
            "path": path,
            "raw": name,
            "code": highlighted(path, text),
            "shown_by": [files.get_file_from_path(src_uri).page for src_uri in pages],
        }
        out = Path(config.site_dir, place)
        write_file(valid(template.render(context)).encode("utf-8"), str(out / "index.html"))
        write_file(data, str(out / name))
