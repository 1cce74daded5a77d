"""`python -m hooks.draw` (make diagrams): draw what is not drawn yet, and delete drawings that no page shows.

Mermaid runs in a headless Chromium with the settings and the theme that a page would render it with
(docs/assets/javascripts/diagrams.js). The same source gives the same bytes on one machine; another machine's fonts
may give other sizes, so what is drawn is not drawn again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import hooks
from hooks import diagrams
from hooks.diagrams import Diagram, DiagramError

# As on a page, so that texts are measured in the fonts that they are shown in.
_PAGE = '<link rel="stylesheet" href="/assets/stylesheets/palette.css"><link rel="stylesheet" href="/assets/stylesheets/site.css"><body></body>'
# Some shapes cost this much each: Mermaid draws their outline as a pencil would, point by point.
_LARGEST = 40_000


def draw(wanted: Iterable[Diagram]) -> Iterator[tuple[Diagram, str]]:
    """Each diagram with its SVG, as it goes into a page.

    Raises:
        DiagramError: Mermaid refuses a source, or the drawing is too large for a page; the message says where it stands.
    """
    from playwright.sync_api import Error, sync_playwright

    from tests.site.browser import launch, serving

    script = Path(__file__).with_name("draw.js").read_text(encoding="utf-8")
    with serving(hooks.root() / "docs") as origin, sync_playwright() as playwright:
        page = launch(playwright).new_page()
        for diagram in wanted:
            # Anew each time: Mermaid counts on from one diagram to the next.
            page.goto(f"{origin}/assets/javascripts/README.txt")
            page.set_content(_PAGE)
            page.add_script_tag(url="/assets/javascripts/diagrams.js")
            try:
                svg = page.evaluate(script, [diagrams.ident(diagram), diagram.source])
            except Error as error:
                raise DiagramError(f"{diagram.where}: Mermaid cannot draw this. Remedy: correct the diagram\n{error}") from error
            if len(svg) > _LARGEST:
                raise DiagramError(
                    f"{diagram.where}: the drawing has {len(svg) // 1000} kB, more than {_LARGEST // 1000}. Remedy: fewer nodes, or"
                    " plainer shapes, such as (…) for ([…])"
                )
            yield diagram, svg + "\n"


def main() -> int:
    """Command line; returns the exit status."""
    try:
        found = diagrams.collect()
        (hooks.root() / diagrams.FOLDER).mkdir(exist_ok=True)
        for diagram, svg in draw(diagrams.undrawn(found)):
            diagram.path.write_text(svg, encoding="utf-8")
            print(f"drawn: {diagram.path.relative_to(hooks.root())}  ({diagram.where})")
    except DiagramError as error:
        print(f"diagrams: {error}", file=sys.stderr)
        return 1
    for path in diagrams.orphans(found):
        path.unlink()
        print(f"deleted: {path.relative_to(hooks.root())}")
    print(f"{len({d.path for d in found})} diagrams are drawn.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
