"""MkDocs hook: what checkers of HTML and of access find wrong in a finished page and its text cannot mend.

Material's own templates, Python-Markdown and Mermaid wrote it. Copies of the templates
would have to follow every release; tests/site/test_audits.py says when one of these no longer fits.
"""

import re
from collections import Counter
from html import escape, unescape

_THEME = (
    # A checkbox has no autocomplete, and the label of a search box or drawer is only an icon.
    (r'(<input class="md-toggle" [^>]*?id="__drawer") autocomplete="off"', r'\1 aria-label="导航"'),
    (r'(<input class="md-toggle" [^>]*?id="__search") autocomplete="off"', r'\1 aria-label="搜索"'),
    # Landmarks and dialogs need names of their own.
    ('<div class="md-search" data-md-component="search" role="dialog">', '<div class="md-search" data-md-component="search" role="dialog" aria-label="搜索">'),
    ('<div class="md-search__inner" role="search">', '<div class="md-search__inner" role="search" aria-label="全站搜索">'),
    # The bar of a page that loads says nothing to who cannot see it.
    ('(data-md-component="progress") role="progressbar"', r'\1 aria-hidden="true"'),
    # Mermaid names the lines of a sequence diagram.
    (r'(<(?:line|rect)\b[^<>]*?) name="[^"]*"', r"\1"),
    # hooks/reproduce.py needs an element that nests nothing of its kind; to a reader it is no section.
    ("<section data-search-exclude>(.*?)</section>", r"<div data-search-exclude>\1</div>"),
    # The corner of a table is no heading; a heading in its first row is one of its column.
    (r"<th(?: [^>]*)?></th>", "<td></td>"),
    (r'<th((?: style="[^"]*")?)>', r'<th scope="col"\1>'),
)
_LANDMARK = re.compile(r'<(?:nav|aside|section|form|\w+ [^>]*?role="(?:region|search)")[^>]*? aria-label="([^"]*)"')
_TABLE = re.compile(r"<table>(?=\s*<thead>(.*?)</thead>)", re.S)


def valid(html):
    """`html`, a whole page, without those faults."""
    for fault, remedy in _THEME:
        html = re.sub(fault, remedy, html, flags=re.S)
    # A plain table scrolls in its own box, so the keyboard has to reach it.
    html = _TABLE.sub(lambda table: f'<table tabindex="0" aria-label="表格：{_heads(table[1])}">', html)
    used = Counter()

    def distinct(landmark):
        used[landmark[1]] += 1
        return landmark[0] if used[landmark[1]] == 1 else f"{landmark[0][:-1]}（{used[landmark[1]]}）\""

    return _LANDMARK.sub(distinct, html)


def _heads(row):
    heads = (re.sub(r"<[^>]*>", "", head).strip() for head in re.findall(r"<th[^>]*>(.*?)</th>", row, re.S))
    return escape(unescape("、".join(head for head in heads if head)))


def on_post_page(output, *, page, config):
    return valid(output)


def on_post_template(output_content, *, template_name, config):
    return valid(output_content) if template_name.endswith(".html") else output_content
