"""Rendering: HTML fragments as pure functions of data (tables, badges, provenance, boxes, tabs).

Nothing here reads a file, a clock or a record store; the same rows give the same bytes. All
text that comes from data is escaped. Colours and spacing live in
docs/assets/stylesheets/results.css, which uses the palette's CSS variables.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Row = Mapping[str, Any]
Spec = str | tuple | None  # how the pages write a column: "label" | (label, format) | (label, format, unit)

UNITLESS = ("", "1")  # units of a declared column that are not printed
EMPTY_MARK = 'class="hf-empty"'  # show.py recognises a fragment without data by this

# Verdict words a cell may hold → (palette role, word shown). Exact match only, so that ordinary
# text that merely contains such a word stays text.
VERDICTS = {
    "pass": ("pass", "通过"), "accept": ("pass", "通过"), "accepted": ("pass", "通过"), "通过": ("pass", "通过"),
    "fail": ("fail", "拒绝"), "reject": ("fail", "拒绝"), "rejected": ("fail", "拒绝"), "拒绝": ("fail", "拒绝"),
    "n/a": ("input", "不适用"), "不适用": ("input", "不适用"),
    "成立": ("pass", "成立"), "不成立": ("fail", "不成立"), "未测": ("warning", "未测"),
}  # fmt: skip
MARKS = {"pass": "✓", "fail": "✗", "warning": "!", "input": "–"}  # never colour alone


class RenderError(ValueError):
    """A page asked for something that the data does not have; the message lists what exists."""


def format_value(value: Any, spec: str | None = None) -> str:
    """A value as plain text.

    Args:
        value: str, bool, int, float or None.
        spec: a Python format spec; a spec that ends in "×" formats the number and adds that sign
            (".2f×" → "1.23×"). None means four significant digits for a float, thousands
            separators for an int, and for a float from 1000 up no decimals.

    Raises:
        RenderError: the spec does not fit the value.
    """
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "是" if value else "否"
    if isinstance(value, str):
        if spec:
            raise RenderError(f"format {spec!r} is for numbers, but the value is the text {value!r}; drop the format or take another column")
        return value
    if not isinstance(value, (int, float)):
        raise RenderError(f"cannot show {value!r} of type {type(value).__name__}; a value is str, bool, int, float or None")
    if spec is None:
        if isinstance(value, int):
            return f"{value:,}"
        # %g turns to exponents at the fifth digit; a bandwidth of 12345.6 must not.
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    suffix = "×" if spec.endswith("×") else ""
    try:
        return format(value, spec.removesuffix("×")) + suffix
    except ValueError as error:
        raise RenderError(f"format {spec!r} does not fit {value!r} ({error}); examples: .0f  .2f  ,d  .1%  .2f×") from error


def badge(text: str, role: str, title: str = "") -> str:
    """A small coloured label; role is a palette role. Role and word say the same thing twice."""
    mark = f'<span aria-hidden="true">{MARKS[role]}</span> ' if role in MARKS else ""
    hint = f' title="{escape(title)}"' if title else ""
    return f'<span class="hf-badge hf-{role}"{hint}>{mark}{escape(text)}</span>'


# --------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Column:
    """One shown column: key in the rows, label in the head, format spec, unit ("" = none)."""

    key: str
    label: str
    spec: str | None = None
    unit: str = ""


def columns_of(rows: Sequence[Row], columns: Mapping[str, Spec] | None, units: Mapping[str, str] | None) -> list[Column]:
    """The columns to show, checked against the rows.

    Args:
        rows: the data; every row has the same keys.
        columns: key → "label", (label, format), (label, format, unit) or None; None shows every column.
        units: key → unit, for columns that do not give their own.

    Raises:
        RenderError: a column that the rows do not have; the message lists those they have.
    """
    present = list(rows[0]) if rows else list(columns or {})
    units = units or {}
    if columns is None:
        columns = dict.fromkeys(present)
    if not isinstance(columns, Mapping):
        raise RenderError('columns must be a dict {key: label} or {key: (label, format)}, like {"gbps": ("带宽", ".0f")}')
    out = []
    for key, value in columns.items():
        if key not in present:
            raise RenderError(f"no column {key!r}; there are: {', '.join(present)}")
        parts = (value,) if isinstance(value, str) or value is None else tuple(value)
        if not 1 <= len(parts) <= 3:
            raise RenderError(f"column {key!r} is given as {value!r}; write label, (label, format) or (label, format, unit)")
        label, spec, unit = (*parts, None, None)[:3]
        out.append(Column(key, key if label is None else label, spec, units.get(key, "") if unit is None else unit))
    return out


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def best_rows(rows: Sequence[Row], key: str, how: str, by: Sequence[str]) -> set[int]:
    """Indices of the rows that hold the best value of a column, ties included.

    Args:
        key, how: the column, and "max" or "min".
        by: columns that form groups; the best is found within each group. Empty = over all rows.
    """
    if how not in ("max", "min"):
        raise RenderError(f"best={{{key!r}: {how!r}}}; write 'max' or 'min'")
    for name in (key, *by):
        if rows and name not in rows[0]:
            raise RenderError(f"best: no column {name!r}; there are: {', '.join(rows[0])}")
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(rows):
        if _is_number(row[key]):
            groups.setdefault(tuple(row[c] for c in by), []).append(i)
    pick = max if how == "max" else min
    out = set()
    for members in groups.values():
        # A group of one has nothing to be better than; marking it would only add noise.
        if len(members) > 1:
            value = pick(rows[i][key] for i in members)
            out |= {i for i in members if rows[i][key] == value}
    return out


def _cell(value: Any, column: Column) -> str:
    if isinstance(value, bool):
        # The format of a yes/no column is its two words: "相同/不同". They carry no judgement,
        # so they get neutral colours; without a format, a bool is a verdict.
        if column.spec and column.spec.count("/") == 1:
            yes, no = column.spec.split("/")
            return badge(yes if value else no, "compute" if value else "input")
        return badge(*(("通过", "pass") if value else ("拒绝", "fail")))
    if isinstance(value, str) and value in VERDICTS:
        role, word = VERDICTS[value]
        return badge(word, role)
    if value is None:
        return '<span class="hf-none" title="没有值">—</span>'
    spec = column.spec if _is_number(value) else None
    text = escape(format_value(value, spec))
    return text.replace("\n", "<br>")


def table(
    rows: Iterable[Row],
    columns: Mapping[str, Spec] | None = None,
    *,
    best: Mapping[str, str] | None = None,
    best_by: str | Sequence[str] = (),
    units: Mapping[str, str] | None = None,
    caption: str = "",
) -> str:
    """Rows as an HTML table: unit in the head, numbers aligned right, first column sticky.

    Args:
        rows: dicts with the same keys; values str, bool, int, float or None.
        columns: which columns, in which order; see ``columns_of``. For a bool column the format
            may give the two words ("相同/不同"); otherwise it shows 通过/拒绝.
        best: column → "max" | "min"; marks the best number.
        best_by: column or columns within whose groups the best is sought (one best per shape).
        units: column → unit, as the experiment declares them; "" and "1" print nothing.
        caption: shown above the table and read by screen readers.

    Raises:
        RenderError: unknown column, bad format.
    """
    rows = list(rows)
    shown = columns_of(rows, columns, units)
    if not rows:
        return f"<p {EMPTY_MARK}>（没有数据）</p>"
    by = (best_by,) if isinstance(best_by, str) else tuple(best_by)
    marked = {key: best_rows(rows, key, how, by) for key, how in (best or {}).items()}
    numeric = {c.key for c in shown if any(_is_number(r[c.key]) for r in rows)}

    head = ""
    for c in shown:
        unit = "" if c.unit in UNITLESS else f' <span class="hf-unit">{escape(c.unit)}</span>'
        css = ' class="hf-num"' if c.key in numeric else ""
        head += f'<th scope="col"{css}>{escape(c.label)}{unit}</th>'
    body = ""
    for i, row in enumerate(rows):
        cells = ""
        for j, c in enumerate(shown):
            if c.key not in row:
                raise RenderError(f"row {i + 1} lacks column {c.key!r}; it has: {', '.join(row)}")
            text = _cell(row[c.key], c)
            css = ["hf-num"] if c.key in numeric else []
            if i in marked.get(c.key, ()):
                css.append("hf-best")
                text = f'<strong>{text}</strong><span class="hf-sr">（最优）</span>'
            attr = f' class="{" ".join(css)}"' if css else ""
            cells += f'<th scope="row"{attr}>{text}</th>' if j == 0 else f"<td{attr}>{text}</td>"
        body += f"<tr>{cells}</tr>\n"
    title = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""  # the span stays in view while the table scrolls
    # A region that scrolls must be reachable by keyboard, and then it needs a name.
    name = escape(caption or "结果表：" + "、".join(c.label for c in shown))
    return (
        f'<div class="hf-table" role="region" tabindex="0" aria-label="{name}">\n<table class="hf-results">{title}'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n</div>"
    )


def select(rows: Sequence[Row], where: Mapping[str, Any] | None, what: str) -> list[dict[str, Any]]:
    """Rows whose columns equal the given values (a list, tuple or set means: one of these).

    Args:
        what: names the table in messages.

    Raises:
        RenderError: unknown column, or no row matches; the message lists what exists.
    """
    where = dict(where or {})
    if not rows:
        return []
    for key in where:
        if key not in rows[0]:
            raise RenderError(f"{what} has no column {key!r}; there are: {', '.join(rows[0])}")

    def matches(row: Row) -> bool:
        for key, want in where.items():
            options = want if isinstance(want, (list, tuple, set, frozenset)) else (want,)
            # 1 == True in Python; a page that asks for rows=1 must not get flag=True.
            if not any(row[key] == o and isinstance(row[key], bool) == isinstance(o, bool) for o in options):
                return False
        return True

    out = [dict(r) for r in rows if matches(r)]
    if not out:
        raise RenderError(f"{what} has no row with {_kv(where)}; {existing(rows, where)}")
    return out


def _kv(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in where.items()) or "no condition"


def existing(rows: Sequence[Row], keys: Iterable[str]) -> str:
    """The distinct values of some columns, for error messages."""
    parts = []
    for key in keys:
        values = list(dict.fromkeys(r[key] for r in rows))
        more = f" and {len(values) - 12} more" if len(values) > 12 else ""
        parts.append(f"{key} is one of {', '.join(repr(v) for v in values[:12])}{more}")
    return "; ".join(parts) or f"it has {len(rows)} rows"


def text_table(rows: Sequence[Row], units: Mapping[str, str]) -> str:
    """Rows as an aligned plain-text table in a <pre>: every column, numbers to the right.

    For long listings: a cell costs its characters, not an element that every later step of a
    build parses again.
    """
    if not rows:
        return f"<p {EMPTY_MARK}>（没有数据）</p>"
    heads = [k if units.get(k, "") in UNITLESS else f"{k} ({units[k]})" for k in rows[0]]
    lines = [heads] + [[format_value(v).replace("\n", "⏎") for v in row.values()] for row in rows]
    wide = [max(width(line[i]) for line in lines) for i in range(len(heads))]
    right = [any(_is_number(r[k]) for r in rows) for k in rows[0]]

    def padded(text: str, i: int) -> str:
        gap = " " * (wide[i] - width(text))
        return gap + text if right[i] else text + gap

    return output("  ".join(padded(cell, i) for i, cell in enumerate(line)).rstrip() for line in lines)


def width(text: str) -> int:
    """Columns that a text takes in a monospace font; a CJK character takes two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


# ------------------------------------------------------------------ output, boxes, provenance


def output(lines: Iterable[Any]) -> str:
    """Program output, preformatted and escaped. It is nothing to run, so it has no copy button."""
    text = "\n".join("" if line is None else str(line) for line in lines)
    # A keyboard user must be able to scroll long lines, hence tabindex.
    return f'<pre class="hf-output no-copy" tabindex="0"><code>{_keep_lines(escape(text))}</code></pre>'


def code(text: str, language: str = "python") -> str:
    """Code to copy, in the box of the pages' fences; a command stays uncoloured, a build shows a hundred of them."""
    if language == "bash":
        html = escape(text)
    else:
        from pygments import highlight  # here: most builds need it for nothing else
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name

        html = highlight(text, get_lexer_by_name(language), HtmlFormatter(nowrap=True)).rstrip("\n")
    return f'<div class="language-{escape(language)} highlight"><pre><code>{_keep_lines(html)}\n</code></pre></div>'


def _keep_lines(text: str) -> str:
    # Raw HTML in Markdown ends at a blank line in some contexts; a numeric entity for the newline
    # renders the same inside <pre> and never ends anything.
    return re.sub(r"\n(?=\n|$)", "&#10;", text)


def diagram(source: str) -> str:
    """A Mermaid diagram: the element that the pages' ```mermaid fences become; diagrams.js draws it.

    The source is no text that a reader sees, so the search index leaves it out.
    """
    return f'<pre class="mermaid" data-search-exclude><code>{_keep_lines(escape(source, quote=False))}</code></pre>'


def command(experiment: str) -> str:
    """The command that repeats an experiment."""
    return f"python -m snippets.{experiment}"


def seconds_text(seconds: float) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min 05 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


VERSION_NAMES = ("torch", "triton", "transformers", "liger-kernel")


def facts(record: Any) -> list[str]:
    """Device, versions, date and commit of a record, in the order they are shown (plain text)."""
    out = [record.device["name"]]
    out += [f"{n.removesuffix('-kernel')} {record.versions[n]}" for n in VERSION_NAMES if record.versions.get(n)]
    out.append(str(record.started)[:10])
    if record.commit:
        out.append("提交 " + record.commit[:9])
    return out


def state_badges(record: Any) -> str:
    """Badges for what a reader must know before trusting a record: stale, smoke, dirty. "" if nothing."""
    out = ""
    if record.stale:
        out += " " + badge("过期", "warning", "代码或设置在这次测量之后改过，数字待重测")
    if record.mode == "smoke":
        out += " " + badge("冒烟", "warning", "用缩小的设置跑出，只证明能跑，数字不可引用")
    if record.dirty:
        out += " " + badge("含未提交改动", "warning", "测量时工作区有未提交的改动，提交号不足以复现")
    return out


def provenance(record: Any, link: str, file: str) -> str:
    """The line under a result: where it comes from and how to repeat it.

    Args:
        record: a hooks.records.Record.
        link, file: URLs, relative to the page, of reproduce.md's section for this experiment and of the record's file.
    """
    parts = [escape(f) for f in facts(record)] + [escape(seconds_text(record.seconds))]
    return (
        f'<p class="hf-prov" data-search-exclude>{" · ".join(parts)}{state_badges(record)} · '
        f'<code>{escape(command(record.experiment))}</code> · <a href="{escape(link)}">复现</a> · <a href="{escape(file)}">记录</a></p>'
    )


def missing(experiment: str, title: str, needs: str, memory_gib: float, minutes: float, link: str) -> str:
    """The box shown where an experiment has no record yet. Not an error: pages outlive devices."""
    where = "一张 CUDA GPU" if needs == "cuda" else " CPU"
    return (
        f'<div class="hf-box hf-box-missing" role="note"><p>{badge("未测量", "warning")} '
        f"<strong>{escape(title)}</strong> 还没有记录。需要{where}、{memory_gib:g} GiB 内存、约 {minutes:g} 分钟：</p>"
        f"{code(command(experiment), 'bash')}"
        f'<p><a href="{escape(link)}">{escape(experiment)} 的设置与说明</a></p></div>'
    )


def tabs(panels: Sequence[tuple[str, str]], uid: str) -> str:
    """Content tabs with the structure that Material expects, so that equal labels switch together.

    Args:
        panels: (label, html) in order; one panel is returned without tabs.
        uid: prefix of the ids, unique on the page.
    """
    if len(panels) == 1:
        return panels[0][1]
    inputs = labels = blocks = ""
    for i, (label, html) in enumerate(panels, 1):
        on = ' checked="checked"' if i == 1 else ""
        inputs += f'<input{on} id="{uid}_{i}" name="{uid}" type="radio">'
        labels += f'<label for="{uid}_{i}">{escape(label)}</label>'
        blocks += f'<div class="tabbed-block">\n{html}\n</div>\n'
    return (
        f'<div class="tabbed-set tabbed-alternate" data-tabs="{uid}:{len(panels)}">{inputs}'
        f'<div class="tabbed-labels">{labels}</div>\n<div class="tabbed-content">\n{blocks}</div>\n</div>'
    )
