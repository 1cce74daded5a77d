"""Plots: rows → Vega-Lite spec → static SVG → HTML figure.

``spec`` and ``figure`` are pure. ``svg`` runs vl-convert once per distinct spec and keeps the
result in .cache/plots under the hash of spec and converter version, so a warm build never even
imports the converter (import and first chart cost about a second).

The SVG is static: colours are CSS variables, which pass through vl-convert unchanged, so a plot
follows the page's colour scheme live, without script. Title, legend, device and date are HTML
around it, so they wrap on a phone. Each mark carries its value as a hover title. Below lie the
data as a folded table and as CSV.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from html import escape, unescape
from typing import Any
from urllib.parse import quote

from hooks import cache, render
from hooks.render import RenderError, Row

CLEANER = 2  # raise it when ``clean`` changes, so that cached drawings are made anew
ROLES = ("compute", "fail", "pass", "memory", "warning", "decision", "input")  # series colours, in order
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 4], [12, 3], [1, 3])  # so that no series is told by colour alone
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
KINDS = ("line", "bar", "point", "span")
MAX_POINTS = 400  # per series; more are thinned, and the figure says so
POINT_MARKS = 32  # a line with more points than this shows no dots
TABLE_ROWS = 40  # more rows than this are not repeated as a table
CSV_BYTES = 32_000  # a larger CSV would outweigh the page; then it holds the drawn points
CSV_ROWS = 2000  # more rows than this exceed CSV_BYTES for certain, so they are not even written out
WIDTH = 440  # px of the plotting area; the page scales the drawing (results.css), so this sets the size of its text
HEIGHT = 280  # px, of lines and points
# Where a point's text may stand, best first: offset of its anchor from the point in px, and alignment.
# From FAR on a thin line leads to it.
SIDES = (
    (9, 0, "left"), (-9, 0, "right"), (0, -15, "center"), (0, 15, "center"),
    (7, -11, "left"), (7, 11, "left"), (-7, -11, "right"), (-7, 11, "right"),
    *(
        (right * dx, down * dy, "left" if right > 0 else "right")
        for dx, dy in ((14, 24), (28, 14), (28, 28), (14, 40), (44, 28), (28, 48)) for right in (1, -1) for down in (-1, 1)
    ),
)  # fmt: skip
FAR = 20  # px


# ----------------------------------------------------------------------------------- data


def _check(rows: Sequence[Row], names: Mapping[str, str | None]) -> None:
    for role, name in names.items():
        if name is not None and name not in rows[0]:
            raise RenderError(f"plot: {role}={name!r} is no column; there are: {', '.join(rows[0])}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def thin(rows: Sequence[Row], keys: Sequence[str], limit: int = MAX_POINTS) -> list[Row]:
    """At most about ``limit`` rows that keep the extremes of every key.

    The rows (in drawing order) are cut into equal buckets; of each bucket those rows stay in
    which some key has its least or greatest value, and the first and last rows of all. So a
    spike never disappears, which taking every n-th row would allow.
    """
    if len(rows) <= limit:
        return list(rows)
    buckets = limit // 2
    while True:
        keep = {0, len(rows) - 1}
        for b in range(buckets):
            span = range(b * len(rows) // buckets, (b + 1) * len(rows) // buckets)
            for key in keys:
                held = [i for i in span if _number(rows[i][key])]
                if held:
                    keep |= {min(held, key=lambda i: rows[i][key]), max(held, key=lambda i: rows[i][key])}
        # How many rows a bucket keeps depends on how far the keys agree, so the count is found by trying.
        if len(keep) <= limit or buckets == 1:
            return [rows[i] for i in sorted(keep)]
        buckets = max(1, buckets * 3 // 4)


def _series(rows: Sequence[Row], color: str | None) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault("" if color is None else str(row[color]), []).append(row)
    if len(out) > len(ROLES):
        raise RenderError(f"plot: color={color!r} makes {len(out)} series, at most {len(ROLES)} can be told apart; filter with where=")
    return out


# -------------------------------------------------------------------------- text at points

Box = tuple[float, float, float, float]  # left, top, right, bottom in px
Side = tuple[float, float, str]  # one of SIDES


def _overlap(a: Box, b: Box) -> float:
    if a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]:  # nearly always
        return 0.0
    return (min(a[2], b[2]) - max(a[0], b[0])) * (min(a[3], b[3]) - max(a[1], b[1]))


def _beads(a: tuple[float, float], b: tuple[float, float]) -> list[Box]:
    """A straight line as small boxes along it."""
    n = 1 + int(math.dist(a, b) / 5)
    along = [(a[0] + (b[0] - a[0]) * i / n, a[1] + (b[1] - a[1]) * i / n) for i in range(n + 1)]
    return [(x - 3, y - 3, x + 3, y + 3) for x, y in along]


def wide(text: str) -> float:
    """About the width in px of a text at 12 px, a little more in most fonts."""
    return 6.3 * render.width(text)


def place(spots: Sequence[tuple[float, float, str]], taken: Sequence[Box], width: float, height: float) -> list[Side]:
    """Where the texts of points go: per spot an offset and alignment out of ``SIDES``.

    One after the other takes the side where it covers least, then again given what the others took;
    of several orders the best counts. A far text counts with the line that leads to it. Nothing is
    dropped: where there is no room, texts overlap as little as was found.

    Args:
        spots: (x, y, text) of every point in px; "" is a point without text, which is still in the way.
        taken: what else is better not covered, such as lines.
        width, height: of the plotting area, which no text leaves.
    """

    def boxes(i: int, side: Side) -> list[Box]:
        (x, y, text), (dx, dy, align) = spots[i], side
        left = x + dx - wide(text) * {"left": 0, "center": 0.5, "right": 1}[align]
        lead = _beads((x, y), (x + dx, y + dy))[1:-1] if math.hypot(dx, dy) > FAR else []
        return [(left, y + dy - 7, left + wide(text), y + dy + 7), *lead]

    def covered(these: Sequence[Box], those: Sequence[Box]) -> float:
        return sum(_overlap(a, b) for a in these for b in those)

    near, marks = ([(x - r, y - r, x + r, y + r) for x, y, _ in spots] for r in (14, 8))
    texts = [i for i, spot in enumerate(spots) if spot[2]]
    options: dict[int, list[tuple[float, Side, list[Box]]]] = {}  # cost, whatever the other texts do; cheapest first
    for i in texts:
        options[i] = []
        for rank, side in enumerate(SIDES):
            own = boxes(i, side)
            outside = 14 * wide(spots[i][2]) - _overlap(own[0], (0, 0, width, height))
            # Beside another point a text would be read as that one's.
            strange = 3 * covered(own[:1], near[:i] + near[i + 1 :]) + 3 * covered(own, marks[:i] + marks[i + 1 :])
            dull = 4 * rank + (40 if len(own) > 1 else 0)
            options[i].append((dull + 100 * outside + strange + 3 * covered(own, taken), side, own))
        options[i].sort(key=lambda option: option[0])

    def settled(order: Sequence[int]) -> tuple[float, dict[int, Side]]:
        chosen: dict[int, Side] = {}
        held: dict[int, list[Box]] = {}
        for _ in range(6):
            before, total = dict(chosen), 0.0
            for i in order:
                others = [b for j, own in held.items() if j != i for b in own]
                least = math.inf
                for cost, side, own in options[i]:
                    if cost >= least:
                        break
                    cost += 10 * covered(own, others)
                    if cost < least:
                        least, chosen[i], held[i] = cost, side, own
                total += least
            if chosen == before:
                break
        return total, chosen

    orders = [texts, texts[::-1], *(sorted(texts, key=lambda i: s * spots[i][k]) for k in (0, 1) for s in (1, -1))]
    best = min((settled(order) for order in orders), key=lambda found: found[0])[1]
    return [best.get(i, SIDES[0]) for i in range(len(spots))]


def _span(values: Sequence[float], log: bool, zero: bool) -> tuple[float, float]:
    """The ends of an axis with room for texts around the values; it begins at 0 where that is near."""
    low, high = min(values), max(values)
    if log:
        room = max(high / low, 1.1) ** 0.08
        return low / room, high * room
    if zero:
        low, high = min(low, 0), max(high, 0)
    room = 0.1 * (high - low or abs(high) or 1)
    return 0.0 if 0 <= low < 2 * room else low - room, high + room


def _taken(
    points: Sequence[Row], spots: Sequence[tuple[float, float, str]], rules: Sequence[Row],
    pixel: Callable[[str, float], float], height: float,
) -> list[Box]:  # fmt: skip
    """What texts are better kept off: the lines that join points; reference lines and their labels."""
    out: list[Box] = []
    for name in {p["s"]: None for p in points if p.get("j")}:
        ends = sorted(spot[:2] for p, spot in zip(points, spots, strict=True) if p.get("j") and p["s"] == name)
        out += [b for pair in zip(ends, ends[1:]) for b in _beads(*pair)]
    for rule in rules:
        said = wide(str(rule.get("label", "")))
        if "x" in rule:
            x = pixel("x", rule["x"])
            out += [*_beads((x, 0), (x, height)), (x + 5, 4, x + 5 + said, 18)]
        else:
            y = pixel("y", rule["y"])
            out += [*_beads((0, y), (WIDTH, y)), (WIDTH - 4 - said, y - 20, WIDTH - 4, y - 6)]
    return out


# ----------------------------------------------------------------------------------- spec


def _title(name: str, label: str, unit: str) -> str:
    return label if unit in render.UNITLESS else f"{label}（{unit}）"


def _axis(title: str, values: list[Any], log: bool, numeric: bool) -> dict[str, Any]:
    """Scale and axis of one channel. A log axis with few distinct values gets a tick at each."""
    if not numeric:
        return {"type": "nominal", "sort": None, "axis": {"title": title, "labelAngle": 0}}
    out: dict[str, Any] = {"type": "quantitative", "axis": {"title": title, "tickCount": 6, "labelOverlap": True}}
    if log:
        held = sorted({v for v in values if v is not None})
        if held and held[0] <= 0:
            raise RenderError(f"plot: the log axis {title!r} meets the value {held[0]!r}; drop log= or filter these rows")
        powers = all(math.log2(v).is_integer() for v in held)
        out["scale"] = {"type": "log", "base": 2 if powers else 10, "nice": not powers}
        if len(held) <= 10 and powers:
            out["axis"] |= {"values": held}
    else:
        out["scale"] = {"zero": False, "nice": True}
    return out


def spec(
    rows: Sequence[Row],
    *,
    kind: str,
    x: str,
    y: str,
    color: str | None = None,
    x_end: str | None = None,
    y_low: str | None = None,
    y_high: str | None = None,
    text: str | None = None,
    joined: str | None = None,
    log: str = "",
    rules: Sequence[Mapping[str, Any]] = (),
    labels: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    fmt: str | None = None,
    height: int | None = None,
    zero: bool = False,
) -> dict[str, Any]:
    """The Vega-Lite spec of a plot. Pure; everything it draws is inside.

    Args:
        rows: data, already thinned; a row with None in x or y draws nothing; it breaks a line, and a bar
            shows "—" in its place.
        kind: "line", "point", "bar" (horizontal: x is the value, y the category; with color, grouped), or "span" (a timeline:
            from x to x_end in the lane y).
        x, y, color: column names.
        x_end: of spans: column with their end.
        y_low, y_high: columns of a band around each line.
        text: of points: column with what is written beside the point; "" and None write nothing.
        joined: of points: column of bools; per series, the rows where it is true are joined by a thin line in
            the order of x, e.g. the Pareto frontier.
        log: "", "x", "y" or "xy".
        rules: reference lines: {"x" or "y": number, "label": text}.
        labels, units: column → label, unit for axis titles and hover texts.
        fmt: Python format spec for the values printed at bars and in hover texts.
        height: px of the plotting area.
        zero: force the value axis of a line or point plot to include 0.

    Raises:
        RenderError: unknown kind or column, text where numbers are needed, non-positive values on a log axis.
    """
    labels, units = labels or {}, units or {}
    if kind not in KINDS:
        raise RenderError(f"plot: unknown kind={kind!r}; there are: {', '.join(KINDS)}")
    if set(log) - set("xy"):
        raise RenderError(f"plot: log={log!r}; write 'x', 'y' or 'xy'")
    if not rows:
        raise RenderError("plot: no rows to draw")
    if (kind == "span") != (x_end is not None):
        raise RenderError(f'plot: x_end= belongs to kind="span" and is needed there; got kind={kind!r}, x_end={x_end!r}')
    if (y_low is None) != (y_high is None):
        raise RenderError("plot: a band needs both y_low= and y_high=")
    lanes = kind in ("bar", "span")
    if lanes and (y_low or log == "y" or log == "xy"):
        raise RenderError(f"plot: {kind}s lie along x (x is the value, y the category); no band and no log y")
    if kind != "point" and (text or joined):
        raise RenderError(f'plot: text= and joined= are for kind="point", not {kind!r}; a line joins its points anyway, a bar prints its value')
    _check(rows, {"x": x, "y": y, "color": color, "y_low": y_low, "y_high": y_high, "x_end": x_end, "text": text, "joined": joined})
    for rule in rules:
        on = next((k for k in ("x", "y") if k in rule), None)
        if on is None or not _number(rule[on]) or set(rule) - {"x", "y", "label"}:
            raise RenderError(f'plot: reference line {dict(rule)!r}; write {{"y": 0.9, "label": "..."}}')
        if on == "y" and lanes:
            raise RenderError(f'plot: {kind}s lie along x, so their reference line is {{"x": ...}}')
        if on in log and rule[on] <= 0:
            raise RenderError(f"plot: reference line {dict(rule)!r} has no place on a log axis; drop log= or the line")
    value = x if lanes else y
    held = [r for r in rows if r[x] is not None and r[y] is not None]
    if x_end and (bad := next((r for r in held if not _number(r[x_end]) or not _number(r[x]) or r[x_end] < r[x]), None)):
        raise RenderError(f"plot: a span must end at or after its start, but {x!r} is {bad[x]!r} and {x_end!r} is {bad[x_end]!r}")
    # A line keeps a row without y: the line breaks there instead of bridging what was not measured.
    # A bar without a value keeps its place and shows "—".
    rows = [r for r in rows if r[y if kind == "bar" else x] is not None] if kind in ("line", "bar") and held else held
    if not rows:
        raise RenderError(f"plot: no row has a value in both {x!r} and {y!r}")
    bad = next((r[value] for r in held if not _number(r[value])), None)
    if bad is not None:
        raise RenderError(f"plot: column {value!r} must hold numbers but holds {bad!r}; choose another column")
    bad = next((r[x] for r in held if not _number(r[x])), None) if text or joined else None
    if bad is not None:
        raise RenderError(f"plot: with text= or joined= column {x!r} must hold numbers too but holds {bad!r}; choose another x=")
    bad = next((r[joined] for r in held if not isinstance(r[joined], bool | None)), None) if joined else None
    if bad is not None:
        raise RenderError(f"plot: joined={joined!r} must hold true or false but holds {bad!r}; choose another column")

    series = _series(rows, color)
    height = height or (None if lanes else HEIGHT)
    label = {c: labels.get(c, c) for c in (x, y)}
    unit = {c: units.get(c, "") for c in (x, y)}

    def said(row: Row) -> str:
        parts = [str(row[color])] if color else []
        for c in (x, y):
            text = render.format_value(row[c], fmt if c == value and fmt else None)
            if c == x and x_end:
                text += f"–{render.format_value(row[x_end], fmt)}"
            parts.append(f"{label[c]} {text}" + ("" if unit[c] in render.UNITLESS else f" {unit[c]}"))
        return " · ".join(parts)

    marks = kind != "line" or max(len(v) for v in series.values()) <= POINT_MARKS
    # Fixed field names: column names may hold dots and brackets, which Vega reads as paths.
    points = []
    for row in rows:
        p = {"x": row[x], "y": row[y], "s": "" if color is None else str(row[color])}
        if marks:
            p["d"] = said(row)
        if kind == "bar":
            p |= {"t": render.format_value(row[value], fmt), "at": row[value] or 0}
        if x_end:
            p["end"] = row[x_end]
        if y_low:
            p |= {"lo": row[y_low], "hi": row[y_high]}
        if text:
            p["t"] = "" if row[text] is None else render.format_value(row[text])
        if joined:
            p["j"] = bool(row[joined])
        points.append(p)

    spans: dict[str, tuple[float, float]] = {}  # of the axes, where texts need places in px

    def channel(c: str, on: str) -> dict[str, Any]:
        extra = [r[k] for k, along in ((y_low, "y"), (y_high, "y"), (x_end, "x")) if k and on == along for r in rows]
        values = [r[c] for r in rows] + extra
        out = _axis(_title(c, label[c], unit[c]), values, on in log, all(_number(r[c]) for r in held))
        if text:
            ruled = [r[on] for r in rules if on in r]
            spans[on] = _span([v for v in values if v is not None] + ruled, on in log, zero and on == "y")
            out["scale"] |= {"domain": list(spans[on]), "nice": False}
        return {"field": on} | out

    def pixel(on: str, value: float) -> float:
        (low, high), f = spans[on], math.log if on in log else float
        share = (f(value) - f(low)) / (f(high) - f(low))
        return round(WIDTH * share if on == "x" else height * (1 - share), 1)

    px, py = channel(x, "x"), channel(y, "y")
    names = list(series)

    def ranged(values: list[Any]) -> dict[str, Any]:
        return {"field": "s", "type": "nominal", "legend": None, "scale": {"domain": names, "range": values[: len(names)]}}

    stroke = ranged([f"var(--hf-{r}-stroke)" for r in ROLES])
    fill = ranged([f"var(--hf-{r}-fill)" for r in ROLES])
    said_by = {"description": {"field": "d", "type": "nominal"}}
    written = {"type": "text", "fontSize": 12, "color": "var(--hf-ink)", "aria": False}
    written |= {"stroke": "var(--md-default-bg-color)", "strokeWidth": 3}  # a halo; results.css paints it under the glyphs
    layers: list[dict[str, Any]] = []

    if kind == "bar":
        py = {"field": "y", "type": "nominal", "sort": None, "axis": {"title": None, "labelLimit": 190}}
        if "x" not in log:
            # Room for the number at the end of the longest bar.
            top = max([0, *(p["at"] for p in points), *(r["x"] for r in rules if _number(r.get("x")))])
            px["scale"] = {"zero": True, "nice": False} | ({"domainMax": top * 1.13} if top else {})
        offset = {"yOffset": {"field": "s", "type": "nominal", "sort": names, "scale": {"paddingInner": 0.15}}} if color else {}
        base = {"x": px, "y": py, **offset}
        layers.append({"mark": {"type": "bar", "strokeWidth": 1}, "encoding": base | {"fill": fill, "stroke": stroke} | said_by})
        # The number at the bar's end; hidden from assistive technology, the bar already says it.
        number = base | {"x": px | {"field": "at"}, "text": {"field": "t", "type": "nominal"}}
        layers.append({"mark": written | {"align": "left", "dx": 4}, "encoding": number})
        count = len({p["y"] for p in points}) * max(1, len(names))
        height = height or max(60, 22 * count + 12 * len({p["y"] for p in points}))
    elif kind == "span":
        names_of_lanes = list(dict.fromkeys(p["y"] for p in points))
        py = {"field": "y", "type": "nominal", "sort": names_of_lanes, "axis": {"title": None, "labelLimit": 190}, "scale": {"paddingInner": 0.35}}
        span = {"x": px, "x2": {"field": "end"}, "y": py, "fill": fill, "stroke": stroke}
        layers.append({"mark": {"type": "bar", "strokeWidth": 0.5}, "encoding": span | said_by})
        height = height or max(60, 40 * len(names_of_lanes))
    else:
        if zero and "y" not in log:
            py["scale"]["zero"] = True
        base = {"x": px, "y": py}
        if y_low:
            band = {"x": px, "y": py | {"field": "lo"}, "y2": {"field": "hi"}, "fill": fill}
            layers.append({"mark": {"type": "area", "fillOpacity": 0.75, "strokeWidth": 0, "aria": False}, "encoding": band})
        if kind == "line":
            line = base | {"stroke": stroke, "strokeDash": ranged(list(DASHES))}
            layers.append({"mark": {"type": "line", "strokeWidth": 2 if marks else 1.4, "aria": False}, "encoding": line})
        if joined:
            front = {"type": "line", "strokeWidth": 1, "aria": False}
            layers.append({"transform": [{"filter": "datum.j"}], "mark": front, "encoding": base | {"stroke": stroke}})
        if text:
            spots = [(pixel("x", p["x"]), pixel("y", p["y"]), p["t"]) for p in points]
            taken = _taken(points, spots, rules, pixel, height)
            for p, (dx, dy, align) in zip(points, place(spots, taken, WIDTH, height), strict=True):
                p |= {"dx": dx, "dy": dy, "align": align}
            beside = written | {k: {"expr": f"datum.{k}"} for k in ("dx", "dy", "align")} | {"baseline": "middle"}
            lead = {"type": "rule", "stroke": "var(--hf-line)", "strokeWidth": 0.8, "aria": False}
            lead |= {"x2Offset": {"expr": "datum.dx * 0.93"}, "y2Offset": {"expr": "datum.dy"}}
            ends = base | {"x2": {"field": "x"}, "y2": {"field": "y"}}
            far = f"datum.t && hypot(datum.dx, datum.dy) > {FAR}"
            layers.append({"transform": [{"filter": far}], "mark": lead, "encoding": ends})
            said_at = base | {"text": {"field": "t", "type": "nominal"}}
            layers.append({"transform": [{"filter": "datum.t"}], "mark": beside, "encoding": said_at})
        if marks:
            dot = {"type": "point", "size": 46, "strokeWidth": 1.5, "opacity": 1, "filled": False}
            enc = base | {"fill": fill, "stroke": stroke, "shape": ranged(list(SHAPES))} | said_by
            layers.append({"mark": dot, "encoding": enc})

    for rule in rules:
        on = "x" if "x" in rule else "y"
        data = {"values": [{"v": rule[on], "t": rule.get("label", "")}]}
        at = {on: {"field": "v", "type": "quantitative"}}
        dash = {"type": "rule", "stroke": "var(--hf-ink)", "strokeDash": [5, 4], "strokeWidth": 1.2, "aria": False}
        layers.insert(0, {"data": data, "mark": dash, "encoding": at})
        if rule.get("label"):
            stands = (
                {"x": {"value": WIDTH - 4}, "align": "right", "dy": -6, "baseline": "bottom"} if on == "y"
                else {"y": {"value": 4}, "align": "left", "dx": 5, "baseline": "top"}
            )  # fmt: skip
            other = {k: stands.pop(k) for k in ("x", "y") if k in stands}
            mark = {"type": "text", "fontSize": 12, "color": "var(--hf-ink)", "aria": False, **stands}
            layers.append({"data": data, "mark": mark, "encoding": at | other | {"text": {"field": "t", "type": "nominal"}}})

    grid = "var(--hf-input-stroke)"
    axis = {
        "labelColor": "var(--hf-ink)", "titleColor": "var(--hf-ink)", "labelFontSize": 12, "titleFontSize": 12.5,
        "titleFontWeight": 500, "gridColor": grid, "gridOpacity": 0.28, "domainColor": grid, "tickColor": grid, "titlePadding": 8,
    }  # fmt: skip
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": None,
        "width": WIDTH,
        "height": height,
        "padding": 6,
        "data": {"values": points},
        "layer": layers,
        "config": {"view": {"stroke": None}, "axis": axis, "font": "sans-serif", "axisY": {"minExtent": 44}},
    }


# ------------------------------------------------------------------------------------ svg


@lru_cache(maxsize=1)
def _converter() -> str:
    return importlib.metadata.version("vl-convert-python")


def svg(spec: Mapping[str, Any]) -> str:
    """The cleaned SVG of a spec (``clean``), from the cache when the same spec was drawn before.

    Raises:
        RenderError: vl-convert refuses the spec.
    """
    text = json.dumps(spec, ensure_ascii=False, sort_keys=True, separators=(",", ":"))

    def make() -> str:
        import vl_convert  # here: a warm build must not pay for it

        try:
            return clean(vl_convert.vegalite_to_svg(text, allowed_base_urls=[]).strip())
        except ValueError as error:
            raise RenderError(f"vl-convert refuses the plot: {str(error).splitlines()[0]}") from error

    return cache.kept("plots", f"{CLEANER}\n{_converter()}\n{text}", make, lambda held: held.startswith("<svg") and held.endswith("</svg>"))


_MARK = re.compile(r"<(path|rect|circle)\b([^>]*?)/>")
_NOISE = re.compile(
    r' (?:role="graphics-[^"]*"|aria-roledescription="[^"]*"|aria-hidden="true"|font-family="[^"]*"|pointer-events="none")'
)
_DECIMALS = re.compile(r"-?\d+\.\d{2,}")


def _short(match: re.Match) -> str:
    """A coordinate to a tenth of a pixel: half the bytes of a long curve, the same picture."""
    return f"{float(match.group(0)):.1f}".removesuffix(".0")


def clean(raw: str) -> str:
    """vl-convert's SVG without what a page does not need: roles, fonts, empty paths, long decimals.

    Each mark's aria-label becomes a child <title>, which browsers show on hover. (The whole is one
    image to assistive technology, so a label on a part would be unreachable there.)
    """

    def titled(match: re.Match) -> str:
        tag, attributes = match.groups()
        label = re.search(r' aria-label="([^"]*)"', attributes)
        if not label:
            return match.group(0)
        return f"<{tag}{attributes.replace(label.group(0), '')}><title>{escape(unescape(label.group(1)), quote=False)}</title></{tag}>"

    raw = _NOISE.sub("", raw).replace("\n", "")
    raw = re.sub(r'<path class="(?:background|foreground)"[^>]*/>', "", raw)
    raw = _MARK.sub(titled, raw)
    raw = re.sub(r' d="([^"]+)"', lambda m: f' d="{_DECIMALS.sub(_short, m.group(1))}"', raw)
    raw = re.sub(r' class="mark-[^"]*"', "", raw)
    while (less := re.sub(r"<g[^>]*></g>", "", raw)) != raw:
        raw = less
    return re.sub(r'<g([^>]*?) aria-label="[^"]*"', r"<g\1", raw)


def finish(raw: str, uid: str, title: str, description: str) -> str:
    """A cleaned SVG made fit to stand inline: ids prefixed with ``uid``, role, title, description."""
    for name in set(re.findall(r'\bid="([^"]+)"', raw)):
        raw = raw.replace(f'id="{name}"', f'id="{uid}-{name}"')
        raw = raw.replace(f"url(#{name})", f"url(#{uid}-{name})").replace(f'href="#{name}"', f'href="#{uid}-{name}"')
    opening = re.match(r'<svg[^>]*?width="([\d.]+)" height="([\d.]+)"[^>]*?viewBox="([^"]+)"[^>]*>', raw)
    if not opening:
        raise RenderError("vl-convert's output does not begin with a known <svg> tag")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{uid}-title {uid}-desc" '
        f'viewBox="{opening.group(3)}" width="{opening.group(1)}" height="{opening.group(2)}">'
        f'<title id="{uid}-title">{escape(title, quote=False)}</title>'
        f'<desc id="{uid}-desc">{escape(description, quote=False)}</desc>'
    )
    return head + raw[opening.end() :]


# --------------------------------------------------------------------------------- figure


def _legend(names: Sequence[str], kind: str) -> str:
    if names in ([""], []):
        return ""
    items = ""
    for i, name in enumerate(names):
        role = ROLES[i]
        if kind in ("bar", "span"):
            key = f'<rect x="1" y="1" width="22" height="10" fill="var(--hf-{role}-fill)" stroke="var(--hf-{role}-stroke)"/>'
        elif kind == "line":
            dash = " ".join(map(str, DASHES[i]))
            key = f'<path d="M0 6H24" fill="none" stroke="var(--hf-{role}-stroke)" stroke-width="2" stroke-dasharray="{dash}"/>'
        else:
            key = f'<path d="{_SHAPE_PATHS[SHAPES[i]]}" fill="var(--hf-{role}-fill)" stroke="var(--hf-{role}-stroke)" stroke-width="1.5"/>'
        items += f'<li><svg aria-hidden="true" width="24" height="12" viewBox="0 0 24 12">{key}</svg>{escape(name)}</li>'
    return f'<ul class="hf-legend">{items}</ul>'


_SHAPE_PATHS = {
    "circle": "M8 6a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "square": "M8 2h8v8h-8Z", "triangle-up": "M12 1l5 9h-10Z",
    "diamond": "M12 1l5 5l-5 5l-5 -5Z", "cross": "M10 1h4v3h3v4h-3v3h-4v-3h-3v-4h3Z", "triangle-down": "M12 11l5 -9h-10Z",
    "triangle-right": "M17 6l-9 5v-10Z",
}  # fmt: skip


def _csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _csv_value(v) for k, v in row.items()} for row in rows)
    return buffer.getvalue()


def _csv_value(value: Any) -> Any:
    # Seven digits are more than any measurement here holds, and half of what repr() prints.
    return "" if value is None else f"{value:.7g}" if isinstance(value, float) else value


def _data(
    rows: Sequence[Row], drawn: Sequence[Row], uid: str, labels: Mapping[str, str], units: Mapping[str, str], text: str | None, joined: str | None
) -> str:
    """The folded data below a plot: a table where it is short, without the words that stand at the points, and the CSV."""
    written, note = _csv(rows) if len(rows) <= CSV_ROWS else "", ""
    if not written or len(written.encode()) > CSV_BYTES:
        written, note = _csv(drawn), f"（图中所画的 {len(drawn):,} 点；全部 {len(rows):,} 行在 records/ 的记录文件里）"
    columns = {k: (labels.get(k, k), "是/否") if k == joined else (labels.get(k, k),) for k in rows[0] if k != text}
    shown = render.table(rows, columns, units=units) if len(rows) <= TABLE_ROWS else ""
    # A byte order mark, or spreadsheets read the Chinese as Latin-1.
    body = quote("\ufeff" + written, safe=",.-_:")
    link = f'<a download="{uid}.csv" href="data:text/csv;charset=utf-8,{body}">下载 CSV</a>'
    return f'<details class="hf-data" data-search-exclude><summary>数据（{len(rows):,} 行）</summary>{shown}<p>{link}{note}</p></details>'


def figure(
    rows: Sequence[Row],
    *,
    uid: str,
    kind: str = "line",
    x: str,
    y: str,
    color: str | None = None,
    y_low: str | None = None,
    y_high: str | None = None,
    title: str = "",
    subtitle: str = "",
    labels: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    **options: Any,
) -> str:
    """Rows as an HTML figure: title, legend, static SVG, folded data with CSV.

    Args:
        rows: all rows; more than MAX_POINTS a series are thinned (``thin``), and the figure says so.
        uid: unique on the page; prefix of every id.
        title: shown above the plot; default names the two axes.
        subtitle: shown below the title, e.g. device and date.
        kind, x, y, color, y_low, y_high, labels, units, **options: see ``spec``.
    """
    labels, units = dict(labels or {}), dict(units or {})
    rows = list(rows)
    if not rows:
        return f"<p {render.EMPTY_MARK}>（没有数据）</p>"
    _check(rows, {"x": x, "y": y, "color": color, "y_low": y_low, "y_high": y_high})
    drawn = rows
    if kind == "line":
        keys = [k for k in (y, y_low, y_high) if k]
        parts = _series(rows, color).values()
        if all(_number(r[x]) for r in rows):
            # Buckets are spans of the x axis only if the rows run along it.
            parts = [sorted(p, key=lambda r: r[x]) for p in parts]
        drawn = [r for part in parts for r in thin(part, keys)]
    chart = spec(
        drawn, kind=kind, x=x, y=y, color=color, y_low=y_low, y_high=y_high, labels=labels, units=units, **options
    )  # fmt: skip
    names = list(_series([r for r in drawn if r[x] is not None and r[y] is not None], color))
    title = title or f"{labels.get(y, y)} — {labels.get(x, x)}"
    notes = [subtitle] if subtitle else []
    if len(drawn) < len(rows):
        notes.append(f"{len(rows):,} 点太密，每段只画最大与最小的点，共 {len(drawn):,} 点，尖峰都保留")
    if y_low:
        notes.append(f"色带：{labels.get(y_low, y_low)} 至 {labels.get(y_high, y_high)}")
    if joined := options.get("joined"):
        notes.append(f"细线：{labels.get(joined, joined)}")
    if "x" in options.get("log", "") or "y" in options.get("log", ""):
        notes.append("、".join(f"{a} 轴" for a in options["log"]) + "为对数")
    described = f"{_title(x, labels.get(x, x), units.get(x, ''))}；{_title(y, labels.get(y, y), units.get(y, ''))}"
    if names != [""]:
        described += "；系列：" + "、".join(names)
    if notes:
        described += "；" + "；".join(notes)
    image = finish(svg(chart), uid, title, described)
    below = f'<span class="hf-sub">{escape("；".join(notes))}</span>' if notes else ""
    data = _data(rows, drawn, uid, labels, units, options.get("text"), options.get("joined"))
    return (
        f'<figure class="hf-plot" id="{uid}"><figcaption><strong>{escape(title)}</strong>{below}</figcaption>'
        f'{_legend(names, kind)}<div class="hf-canvas" data-search-exclude role="region" tabindex="0" aria-label="{escape(title)}">{image}</div>'
        f"{data}</figure>"
    )
