"""Numbers in prose: `[[ one("kernels.bench", "speed", kernel="rms_norm").gbps | fmt(".0f") ]]`.

An expression between double square brackets is evaluated over the records and replaced by its
value, linked to the record's section in reproduce.md. The language is Jinja's expressions in a
sandbox, with these names and no others:

    one(experiment, table, **where)     the one row that matches, e.g. .gbps
    all_(experiment, table, **where)    all rows that match; at least one
    device(experiment)                  name of the device that the numbers come from
    min max abs round len sum           as in Python
    fmt(".0f")  pct(1)  x(2)            filters: Python format spec; "12.3%"; "1.23×"

Every experiment's number comes from the first device in show.ordered; `on="nvidia-h200"` in a call
names another. An expression that reads no record is an error: no number without a record.
Fenced code and inline code stay untouched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes

from hooks import experiments, render, show

LOOKUPS = ("one", "all_", "device")


class InlineError(ValueError):
    """An expression is wrong; the message says where, which, why and what to do."""


class Unmeasured(Exception):
    """The expression reads an experiment that has no record (on the device asked for)."""


class Row:
    """A row whose columns are attributes: row.gbps. Unknown ones raise with the list of columns."""

    def __init__(self, values: dict[str, Any], what: str) -> None:
        self.__dict__["_values"], self.__dict__["_what"] = values, what

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise InlineError(f"{self._what} has no column {name!r}; there are: {', '.join(self._values)}")
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy, pickle and Jinja probe for these
            raise AttributeError(name)
        return self[name]


@dataclass
class Lookup:
    """Access to records during one evaluation; remembers what was read.

    Args:
        load: experiment id → {slug: Record}.
        device: slug of the device to read from; "" = the first that has a record.
    """

    load: Callable[[str], dict[str, Any]]
    device: str = ""
    used: list[Any] = field(default_factory=list)

    def _record(self, exp: Any, on: str) -> Any:
        found = self.load(exp.id)
        slug = on or self.device
        if slug:
            held = {s: r for s, r in found.items() if s == slug}
        else:
            held = found
        if not held:
            raise Unmeasured(exp.id)
        record = show.ordered(held)[0]
        if not any(record is r for r in self.used):
            self.used.append(record)
        return record

    def all_(self, exp_id: str, table: str, /, *, on: str = "", **where: Any) -> list[Row]:
        exp = experiments.find(exp_id)
        show.check_declared(exp, table, where)
        rows = show.table_rows(exp, self._record(exp, on), table, where)
        if not rows:
            raise InlineError(f"{exp_id}, table {table!r} is empty")
        return [Row(r, f"{exp_id}, table {table!r}") for r in rows]

    def one(self, exp_id: str, table: str, /, *, on: str = "", **where: Any) -> Row:
        rows = self.all_(exp_id, table, on=on, **where)
        if len(rows) > 1:
            values = [r._values for r in rows]
            differ = [k for k in values[0] if len({v[k] for v in values}) > 1 and k not in where]
            hint = render.existing(values, differ[:4]) if differ else "the rows are equal"
            raise InlineError(f"one({exp_id!r}, {table!r}) matches {len(rows)} rows; narrow it: {hint}")
        return rows[0]

    def device_name(self, exp_id: str, /, *, on: str = "") -> str:
        return self._record(experiments.find(exp_id), on).device["name"]


def _numeric(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InlineError(f"{name} needs a number, not {value!r}")
    return value


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    env = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    env.globals = {"min": min, "max": max, "abs": abs, "round": round, "len": len, "sum": sum}
    env.filters |= {
        "fmt": lambda v, spec: render.format_value(_numeric(v, "fmt"), spec),
        "pct": lambda v, digits=1: f"{_numeric(v, 'pct'):.{digits}%}",
        "x": lambda v, digits=2: f"{_numeric(v, 'x'):.{digits}f}×",
    }
    return env


ENV = _environment()


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> Any:
    return ENV.compile_expression(expression, undefined_to_none=False)


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> nodes.Template:
    try:
        return ENV.parse("{{ " + expression + " }}")
    except jinja2.TemplateSyntaxError as error:
        raise InlineError(f"not an expression: {error.message}") from error


def experiments_in(expression: str) -> list[str]:
    """Ids of the experiments that an expression names, found without evaluating it.

    Everything that the experiments declare is checked here too: ids, tables, columns. A typo
    must not hide behind a missing record until someone has a GPU.

    Raises:
        InlineError: the expression does not parse, names something undeclared, or an id is not a literal.
    """
    tree = _parsed(expression)
    out = []
    try:
        for call in tree.find_all(nodes.Call):
            if _is_lookup(call):
                out.append(_declared(call)[0])
        for get in tree.find_all(nodes.Getattr):
            if _is_lookup(get.node) and get.node.node.name == "one":
                show.check_declared(experiments.find(_declared(get.node)[0]), _declared(get.node)[1], [get.attr])
    except (render.RenderError, experiments.ExperimentError) as error:
        raise InlineError(str(error)) from error
    return list(dict.fromkeys(out))


def _is_lookup(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in LOOKUPS


def _declared(call: nodes.Call) -> tuple[str, str]:
    """(experiment, table) of a lookup, both literals and declared; the table is "" for device()."""
    name = call.node.name
    wanted = 1 if name == "device" else 2
    given = [a.value for a in call.args if isinstance(a, nodes.Const) and isinstance(a.value, str)]
    if len(given) != len(call.args) or len(given) != wanted:
        example = 'device("group.name")' if wanted == 1 else f'{name}("group.name", "table", column=value)'
        raise InlineError(f"{name}() needs experiment{' and table' if wanted == 2 else ''} in quotes: {example}")
    exp = experiments.find(given[0])
    if wanted == 2:
        show.check_declared(exp, given[1], [k.key for k in call.kwargs if k.key != "on"])
    return given[0], given[-1] if wanted == 2 else ""


def evaluate(expression: str, lookup: Lookup) -> Any:
    """The value of an expression: str, bool, int or float.

    Raises:
        InlineError: it does not parse, names something unknown, reads no record, or its value cannot be shown.
        Unmeasured: it reads an experiment without a record.
    """
    if not expression.strip():
        raise InlineError("the expression is empty")
    experiments_in(expression)
    try:
        value = _compiled(expression)(one=lookup.one, all_=lookup.all_, device=lookup.device_name)
    except (InlineError, Unmeasured):
        raise
    except jinja2.TemplateSyntaxError as error:
        raise InlineError(f"not an expression: {error.message}") from error
    except (jinja2.UndefinedError, jinja2.sandbox.SecurityError) as error:
        raise InlineError(f"{error}; names: one, all_, device, min, max, abs, round, len, sum; filters: fmt, pct, x") from error
    except (render.RenderError, experiments.ExperimentError) as error:
        raise InlineError(str(error)) from error
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:
        raise InlineError(f"{type(error).__name__}: {error}") from error
    if isinstance(value, jinja2.Undefined):
        raise InlineError(f"unknown name; names: {', '.join(LOOKUPS)}, min, max, abs, round, len, sum")
    if value is None:
        raise InlineError("the value is None (this row has no such measurement); choose another row")
    if not isinstance(value, (str, bool, int, float)):
        raise InlineError(f"the value is {'a row' if isinstance(value, Row) else type(value).__name__}; name a column: one(...).column")
    if isinstance(value, float) and value - value != 0:
        raise InlineError(f"the value is {value}; a number in prose must be finite")
    if not lookup.used:
        raise InlineError("the expression reads no record; a fixed number is plain text")
    return value


# ----------------------------------------------------------------------------- in Markdown

_FENCE = re.compile(r"^[ \t>]*(?:[-*+] +|\d+\. +)?(`{3,}|~{3,})")
# Inline code first, so that brackets in it are never seen.
_TOKEN = re.compile(r"(?P<ticks>(?<!`)`+(?!`))(?:(?!\n\s*\n).)*?(?<!`)(?P=ticks)(?!`)|\[\[(?P<expr>.+?)\]\](?!\])", re.DOTALL)


def _prose(markdown: str) -> Iterator[tuple[bool, int, str]]:
    """(is prose, number of the first line, text) pieces; the other pieces are fenced code."""
    fence, piece, first = "", [], 1
    for number, line in enumerate(markdown.splitlines(keepends=True), 1):
        mark = _FENCE.match(line)
        run = mark.group(1) if mark else ""
        # The info string of a backtick fence holds no backtick; else it is inline code.
        opens = bool(run) and not fence and not (run[0] == "`" and "`" in line[mark.end() :])
        closes = bool(run) and bool(fence) and run[0] == fence[0] and len(run) >= len(fence) and not line[mark.end() :].strip()
        if opens:
            yield True, first, "".join(piece)
            piece, first, fence = [line], number, run
        elif closes:
            piece.append(line)
            yield False, first, "".join(piece)
            piece, first, fence = [], number + 1, ""
        else:
            piece.append(line)
    yield not fence, first, "".join(piece)


def expand(markdown: str, src_uri: str, load: Callable[[str], dict[str, Any]] | None = None) -> str:
    """The page with every `[[ expression ]]` replaced by its linked value.

    Args:
        markdown: source of one page.
        src_uri: the page's path below docs/, for links and messages.
        load: experiment id → {slug: Record}; default hooks.records.load.

    Raises:
        InlineError: names page, line, expression, reason.
    """
    if "[[" not in markdown:
        return markdown
    if load is None:
        from hooks import records

        load = records.load
    load = lru_cache(maxsize=None)(load)  # one page reads a record many times
    out = []
    for is_prose, first, text in _prose(markdown):
        if not is_prose or "[[" not in text:
            out.append(text)
            continue

        def replace(match: re.Match, first: int = first, text: str = text) -> str:
            if match["expr"] is None:
                return match[0]
            expression = " ".join(match["expr"].split())
            lookup = Lookup(load)
            try:
                return _number(evaluate(expression, lookup), lookup.used, src_uri)
            except Unmeasured as missing:
                return _unmeasured(str(missing), src_uri)
            except InlineError as error:
                if smoke := [r for r in lookup.used if r.mode == "smoke"]:  # it has other rows than a full run
                    return _unmeasured(smoke[0].experiment, src_uri)
                line = first + text.count("\n", 0, match.start())
                raise InlineError(f"docs/{src_uri}, line {line}: [[ {expression} ]]: {error}") from error

        out.append(_TOKEN.sub(replace, text))
    return "".join(out)


def _attribute(text: str) -> str:
    # A pipe would end a table cell; other Markdown does not reach into an attribute.
    return escape(text).replace("|", "&#124;")


def _number(value: Any, used: list[Any], src_uri: str) -> str:
    text = escape(render.format_value(value)).replace("|", "&#124;")
    title = "；".join(" · ".join([r.experiment, *render.facts(r)]) for r in used)
    marks = []
    if any(r.stale for r in used):
        marks.append(("过期", "代码或设置在测量之后改过，数字待重测"))
    if any(r.mode == "smoke" for r in used):
        marks.append(("冒烟", "用缩小的设置跑出，数字不可引用"))
    badges = "".join(render.badge(word, "warning", hint) for word, hint in marks)
    link = show.reproduce_link(used[0].experiment, src_uri)
    return f'<a class="num" href="{_attribute(link)}" title="{_attribute(title)}">{text}{badges}</a>'


def _unmeasured(id: str, src_uri: str) -> str:
    hint = f"{id} 还没有记录；运行 {render.command(id)}"
    return f'<a class="unmeasured" href="{_attribute(show.reproduce_link(id, src_uri))}">{render.badge("未测", "warning", hint)}</a>'
