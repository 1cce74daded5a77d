"""Which page and section shows an experiment's results: read from the built pages' own links, so nothing is missed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

MARK = re.compile(r'<ul data-uses="([\w.]+)"></ul>')  # where reproduce.md takes an experiment's list

_TO = r'[^<>]*?href="[^"#]*reproduce/#([\w.]+)"[^<>]*>'
_FOUND = re.compile(
    r'<h[1-6]\b[^>]*? id="(?P<id>[^"]+)"[^>]*>(?P<title>.*?)</h[1-6]>'
    rf'|<a class="(?:num|unmeasured)"{_TO}(?P<number>.*?)</a>'
    rf'|<(?:p class="hf-prov"|div class="hf-box hf-box-missing").*?<a {_TO}',  # both end with this link
    re.DOTALL,
)


@dataclass
class Use:
    """What one section shows of one experiment: how many results (tables, plots, outputs), and which numbers in the text."""

    page: str
    title: str
    anchor: str
    section: str
    results: int = 0
    numbers: list[str] = field(default_factory=list)


def find(pages: Iterable[tuple[str, str, str]]) -> dict[str, list[Use]]:
    """Experiment id → its uses, in the order of the pages.

    Args:
        pages: (path below docs/, title, HTML) of each page.
    """
    out: dict[str, dict[tuple[str, str], Use]] = {}
    for src_uri, title, html in pages:
        anchor = section = ""
        for match in _FOUND.finditer(html):
            if match["id"]:
                anchor, section = match["id"], _text(re.sub(r'<a class="headerlink".*?</a>', "", match["title"]))
                continue
            use = out.setdefault(match[3] or match[5], {}).setdefault((src_uri, anchor), Use(src_uri, title, anchor, section))
            if match["number"] is None:
                use.results += 1
            else:
                use.numbers.append("未测" if "未测" in match["number"] else _text(match["number"].partition("<span")[0]))
    return {id: list(found.values()) for id, found in out.items()}


def _text(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html).strip()


def listing(found: list[Use]) -> str:
    """The uses of one experiment for reproduce.md, with links back to the sections."""
    if not found:
        return "<p>没有页面直接显示它的结果。</p>"
    items = ""
    for use in found:
        address = "../" if use.page == "index.md" else f"../{use.page.removesuffix('.md')}/"
        parts = [f"{use.results} 个结果"] if use.results else []
        parts += [f"正文数字 {'，'.join(use.numbers)}"] if use.numbers else []
        name = use.title if use.section == use.title else f"{use.title} › {use.section}"
        # The titles come out of HTML, escaped already.
        items += f'<li><a href="{escape(address)}#{escape(use.anchor)}">{name}</a>：{"；".join(parts)}</li>'
    return f'<ul class="hf-uses">{items}</ul>'


def fill(html: str, found: dict[str, list[Use]]) -> str:
    """reproduce.md's HTML with every list in its place."""
    return MARK.sub(lambda mark: listing(found.get(mark[1], [])), html)
