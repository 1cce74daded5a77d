"""Diagrams drawn ahead of time: on a page, a Mermaid source is replaced by the SVG that `make diagrams` made of it.

    diagrams/<page>-<key>.svg

The key is a digest of the source, of Mermaid and of how it is drawn, so a drawing is used for exactly what it was
made of. A source without a drawing stays as it is: the browser renders it (docs/assets/javascripts/diagrams.js),
which costs a reader 3.5 MB, and `make check` lists it. hooks.draw makes the drawings; building needs no browser.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from pathlib import Path

import hooks

FOLDER = "diagrams"
SCRIPTS = "docs/assets/javascripts"
_ELEMENT = re.compile(r'<pre class="mermaid"[^<>]*><code>(.*?)</code></pre>', re.DOTALL)


class DiagramError(RuntimeError):
    """The diagrams of the pages cannot be told; the message says why and what to do."""


@dataclass(frozen=True)
class Diagram:
    """A diagram on a page: `page` below docs/, `line` of its accTitle there (0 unknown), Mermaid `source`."""

    page: str
    line: int
    source: str

    @property
    def where(self) -> str:
        return f"docs/{self.page}" + (f":{self.line}" if self.line else "")

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(f"{_manner()}\n{self.source}".encode()).hexdigest()[:12]

    @property
    def path(self) -> Path:
        name = self.page.removesuffix(".md").replace("/", "-")
        return hooks.root() / FOLDER / f"{name}-{self.key}.svg"


_seen: list[Diagram] = []


def reset() -> None:
    """Forget the last build."""
    _seen.clear()


def _manner() -> str:
    """Digest of what a drawing depends on besides its source."""
    scripts = hooks.root() / SCRIPTS
    files = [scripts / "diagrams.js", scripts / "mermaid.min.js.sha256", Path(__file__).with_name("draw.js")]
    return hashlib.sha256(b"\n".join(path.read_bytes() for path in files if path.exists())).hexdigest()


def place(html: str, src_uri: str, markdown: str) -> str:
    """The page with its drawings in place of their sources.

    Args:
        html: the rendered page. src_uri: its path below docs/. markdown: the text of that file.
    """
    times: dict[str, int] = {}

    def drawing(match: re.Match[str]) -> str:
        source = unescape(match[1]).strip()
        title = re.search(r"accTitle[ \t]*:.*", source)
        at = markdown.find(title[0].strip()) if title else -1
        diagram = Diagram(src_uri, markdown.count("\n", 0, at) + 1 if at >= 0 else 0, source)
        _seen.append(diagram)
        try:
            svg = diagram.path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return match[0]
        times[diagram.key] = n = times.get(diagram.key, 0) + 1
        if n > 1:  # the ids of one page differ
            svg = svg.replace(ident(diagram), f"{ident(diagram)}-{n}")
        # A keyboard user must be able to scroll a wide diagram, hence tabindex.
        return f'<figure class="diagram" tabindex="0" data-search-exclude>{svg}</figure>'

    return _ELEMENT.sub(drawing, html)


def ident(diagram: Diagram) -> str:
    """The id of a drawing's svg element; all other ids in it contain this one."""
    return f"diagram-{diagram.key}"


def collect() -> list[Diagram]:
    """Every diagram of the site, as the pages hold it now: sources may be made from records, so the pages are built.

    Nothing is measured and nothing is written.

    Raises:
        DiagramError: the pages do not build.
    """
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    for name in ("REFRESH", "SMOKE"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(str(hooks.root() / "mkdocs.yml"), site_dir=folder)

        def stop(env, **_):
            raise _Known

        config.plugins.events["env"].append(stop)  # after the hook's own, which fails on faults of the pages
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)
        except _Known:
            return list(_seen)
        except (Exception, SystemExit) as error:  # MkDocs ends a build that failed with SystemExit
            raise DiagramError(f"the pages do not build, so their diagrams are unknown ({error}). Remedy: make site") from error
        finally:
            config.plugins.on_shutdown()
    raise DiagramError("MkDocs ended the build before its event env. Remedy: correct hooks/diagrams.py for this MkDocs")


class _Known(Exception):
    """All pages are rendered; nothing needs to be written."""


def undrawn(found: list[Diagram]) -> list[Diagram]:
    """Those without a drawing, each source once."""
    return list({d.path: d for d in found if not d.path.exists()}.values())


def orphans(found: list[Diagram]) -> list[Path]:
    """Drawings that no page shows any more."""
    used = {d.path for d in found}
    return sorted(path for path in (hooks.root() / FOLDER).glob("*.svg") if path not in used)
