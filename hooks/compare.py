"""`python -m hooks.compare A [B]`: what differs between two sets of records, as Markdown.

A and B each name a commit (``main``, ``HEAD~3``), a device below records/ (``nvidia-h200``), or both
(``main:nvidia-h200``). Without B: the working tree. Two devices are compared with one another; otherwise each device with itself.

Rows are matched by what they describe: their leading text, yes/no and whole-number columns, as many as it takes to tell
them apart. A time that was recorded with its spread counts as changed where the two spreads (20th to 80th percentile) don't
overlap; any other number where it moved by more than `NO_SPREAD`; text and verdicts wherever they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import hooks
from hooks import claims, experiments, history, records
from hooks.records import Record

NO_SPREAD = 0.02  # relative change from which a number without a recorded spread is shown
MOST = 25  # changes shown for an experiment, the largest first

Row = dict[str, Any]


class CompareError(Exception):
    """A side that cannot be compared; the message says why."""


@dataclass(frozen=True)
class Side:
    """One side: how readers know it, and device slug → experiment id → Record."""

    name: str
    found: dict[str, dict[str, Record]]

    def load(self, id: str) -> dict[str, Record]:
        """As `records.load`, of this side."""
        return {slug: by_id[id] for slug, by_id in self.found.items() if id in by_id}


@dataclass(frozen=True)
class Change:
    """A cell that differs. relative: (B - A) / A, None where that means nothing. spread: both sides' spreads, "" if unknown."""

    table: str
    row: str
    column: str
    before: Any
    after: Any
    relative: float | None
    spread: str

    @property
    def size(self) -> float:
        """For sorting; what is no number comes first."""
        return float("inf") if self.relative is None else abs(self.relative)


# ------------------------------------------------------------------------------------- sides


def side(name: str) -> Side:
    """The records that `name` stands for ("" is the working tree).

    Raises:
        CompareError: neither commit nor device, or without any record.
        RecordError: a record is damaged.
    """
    revision, colon, device = name.partition(":")
    if not colon and revision in records.devices():
        revision, device = "", revision
    if revision:
        try:
            contents = history.files(revision, records.DIRECTORY)
            shown = f"{revision} ({history.commit(revision)[:8]})"
        except history.HistoryError as error:
            known = ", ".join(records.devices()) or "none"
            raise CompareError(f"{name!r} is neither a device below {records.DIRECTORY}/ ({known}) nor a commit: {error}") from error
    else:
        folder = hooks.root() / records.DIRECTORY
        contents = {records.relative(p): p.read_bytes() for p in sorted(folder.glob("*/*.json"))}
        shown = "working tree"
    found: dict[str, dict[str, Record]] = {}
    for path, data in sorted(contents.items()):
        parts = path.split("/")
        if len(parts) == 3 and path.endswith(".json") and device in ("", parts[1]):
            value = records.parse(data, f"{path} ({shown})", "compare other commits")
            if value["mode"] == "full":  # a smoke run's numbers mean nothing
                found.setdefault(parts[1], {})[value["experiment"]] = records.record_of(value, path, stale=False)
    if not found:
        raise CompareError(f"{shown} has no full record{f' of {device}' if device else ''}; nothing to compare")
    return Side(f"{shown}, {device}" if device else shown, found)


# -------------------------------------------------------------------------------------- rows


def _key(rows: list[list[Row]], columns: list[str]) -> list[str] | None:
    """The leading columns that name a row in every one of these tables; None if none do."""
    key: list[str] = []
    for column in columns:
        if all(isinstance(row[column], (str, bool, int)) for table in rows for row in table):
            key.append(column)
            if all(len({tuple(row[c] for c in key) for row in table}) == len(table) for table in rows):
                return key
    return None


def _matched(before: list[Row], after: list[Row], columns: list[str]) -> Iterator[tuple[str, Row | None, Row | None, list[str]]]:
    """(the row's name, A's, B's, the key); a row that one side lacks is None there."""
    key = _key([before, after], columns)
    if key is None:
        for i in range(max(len(before), len(after))):
            yield f"#{i + 1}", before[i] if i < len(before) else None, after[i] if i < len(after) else None, []
        return
    old, new = ({tuple(row[c] for c in key): row for row in table} for table in (before, after))
    for name in dict.fromkeys([*old, *new]):
        yield " · ".join(str(v) for v in name), old.get(name), new.get(name), key


def _spread(row: Row, column: str) -> tuple[float, float] | None:
    low, high = (row.get(column.replace("median_", p, 1)) for p in ("p20_", "p80_"))
    return (low, high) if column.startswith("median_") and low is not None and high is not None else None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def changes(before: Record, after: Record) -> tuple[list[Change], int, list[str]]:
    """Cells that changed, how many were compared, and sentences about tables or rows that only one side has."""
    out, compared, notes = [], 0, []
    for table in dict.fromkeys([*before.tables, *after.tables]):
        old, new = before.tables.get(table), after.tables.get(table)
        if old is None or new is None:
            notes.append(f"table {table} is only in {'A' if new is None else 'B'}")
            continue
        columns = [c for c in old[0] if c in new[0]]
        if other := sorted(set(old[0]) ^ set(new[0])):
            notes.append(f"table {table}: only one side has the columns {', '.join(other)}")
        lone: dict[str, list[str]] = {"A": [], "B": []}
        for name, a, b, key in _matched(old, new, columns):
            if a is None or b is None:
                lone["A" if b is None else "B"].append(name)
                continue
            for column in columns:
                if column in key or column.startswith(("p20_", "p80_")):
                    continue
                compared += 1
                if (change := _change(table, name, column, a, b)) is not None:
                    out.append(change)
        notes += [f"table {table}: rows only in {s}: {'; '.join(n[:5])}{f' and {len(n) - 5} more' if len(n) > 5 else ''}" for s, n in lone.items() if n]
    return sorted(out, key=lambda c: -c.size), compared, notes


def _change(table: str, name: str, column: str, a: Row, b: Row) -> Change | None:
    before, after = a[column], b[column]
    if before == after and type(before) is type(after):
        return None
    if not (_number(before) and _number(after)):
        return Change(table, name, column, before, after, None, "")
    relative = (after - before) / abs(before) if before else None
    spreads = _spread(a, column), _spread(b, column)
    if None not in spreads:
        (low, high), (low_b, high_b) = spreads
        if low_b <= high and low <= high_b:
            return None
        return Change(table, name, column, before, after, relative, f"{_told(low)}–{_told(high)} → {_told(low_b)}–{_told(high_b)}")
    if relative is not None and abs(relative) <= NO_SPREAD:
        return None
    return Change(table, name, column, before, after, relative, "")


# ------------------------------------------------------------------------------------ report


def pairs(a: Side, b: Side) -> list[tuple[str, str]]:
    """(A's device, B's device) to lay side by side: each with itself, or one with the other.

    Raises:
        CompareError: the sides share no device and are not one device each.
    """
    if shared := [slug for slug in a.found if slug in b.found]:
        return [(slug, slug) for slug in shared]
    if len(a.found) == len(b.found) == 1:
        return [(next(iter(a.found)), next(iter(b.found)))]
    raise CompareError(f"A has {', '.join(a.found)}, B has {', '.join(b.found)}: name a device for each, as in A=main:{next(iter(a.found))}")


def report(a: Side, b: Side) -> str:
    """The whole report in Markdown.

    Raises:
        CompareError: see `pairs`.
        ClaimError: claims.yml is wrong.
    """
    out = ["# Records compared", "", f"- A: {a.name}", f"- B: {b.name}"]
    for old, new in pairs(a, b):
        out += ["", f"## {old}" if old == new else f"## {old} → {new}"]
        out += _environment(a.found[old], b.found[new]) + _claims(a, b, old, new) + _experiments(a.found[old], b.found[new])
    for name, here, there in (("A", a, b), ("B", b, a)):
        if lone := [s for s in here.found if s not in there.found and (len(a.found), len(b.found)) != (1, 1)]:
            out += ["", f"Only {name} has records of {', '.join(lone)}."]
    return "\n".join(out) + "\n"


def _environment(a: Mapping[str, Record], b: Mapping[str, Record]) -> list[str]:
    seen: dict[str, list[str]] = {}
    for id in a:
        if id not in b:
            continue
        old, new = a[id], b[id]
        values = {**{k: (old.versions.get(k, ""), new.versions.get(k, "")) for k in sorted({*old.versions, *new.versions})},
                  **{f"device {k}": (old.device[k], new.device[k]) for k in old.device}}  # fmt: skip
        for name, (x, y) in values.items():
            if x != y:
                seen.setdefault(f"{name}: {x if x != '' else '(none)'} → {y if y != '' else '(none)'}", []).append(id)
    lines = [f"- {line} ({_ids(ids)})" for line, ids in seen.items()]
    return ["", "### Environment", "", *(lines or ["Versions and device are the same in both."])]


def _ids(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 3 else f"{len(ids)} experiments"


def _claims(a: Side, b: Side, old: str, new: str) -> list[str]:
    rows = []
    for claim in claims.load():
        states = []
        for which, slug in ((a, old), (b, new)):
            try:
                states.append(next((s for s in claims.states(claim, which.load) if s.slug == slug), None))
            except claims.ClaimError:  # made for other tables than this side has
                states.append(None)
        said = [("unmeasured" if s is None or s.value is None else "holds" if s.state == claims.HOLDS else "fails") for s in states]
        if said[0] != said[1]:
            values = ["" if s is None or s.value is None else f" ({s.value:.4g})" for s in states]
            rows.append(f"| {claim.id} | {said[0]}{values[0]} | {said[1]}{values[1]} | {claim.band} |")
    head = ["", "### Claims that changed", ""]
    return [*head, "| claim | A | B | accepted |", "| --- | --- | --- | --- |", *rows] if rows else [*head, "None."]


def _told(value: Any) -> str:
    if _number(value):
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return {None: "–", True: "yes", False: "no"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 120 else text[:119] + "…"


def _experiments(a: Mapping[str, Record], b: Mapping[str, Record]) -> list[str]:
    overview, details, same = [], [], []
    declared = experiments.all()
    for id in sorted({*a, *b}):
        if id not in a or id not in b:
            overview.append(f"| {id} | only in {'A' if id in a else 'B'} | | |")
            continue
        old, new = a[id], b[id]
        if old.tables == new.tables:
            same.append(id)
            continue
        found, compared, notes = changes(old, new)
        largest = next((f"{c.relative:+.1%}" for c in found if c.relative is not None), "")
        overview.append(f"| {id} | {old.started:%Y-%m-%d} → {new.started:%Y-%m-%d} | {len(found)} of {compared} | {largest} |")
        if not found and not notes:
            continue
        units = declared[id].tables if id in declared else {}
        details += ["", f"#### {id}", "", *(f"- {note}" for note in notes)]
        if found:
            details += [""] * bool(notes) + ["| table | row | column | A | B | change | spreads |", "| --- | --- | --- | ---: | ---: | ---: | --- |"]
            for c in found[:MOST]:
                unit = units.get(c.table, {}).get(c.column, "")
                column = f"{c.column} [{unit}]" if unit not in ("", "1") else c.column
                moved = "" if c.relative is None else f"{c.relative:+.1%}"
                details.append(f"| {c.table} | {_cell(c.row)} | {column} | {_cell(_told(c.before))} | {_cell(_told(c.after))} | {moved} | {c.spread} |")
            if len(found) > MOST:
                details.append(f"\n{len(found) - MOST} smaller changes are not shown.")
    out = ["", "### Experiments", ""]
    if overview:
        out += ["| experiment | measured | changed values | largest change |", "| --- | --- | ---: | ---: |", *overview]
    if same:
        out += [""] * bool(overview) + [f"The same numbers in both: {', '.join(same)}."]
    return out + details


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hooks.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("a", metavar="A", help="commit, device, or commit:device")
    parser.add_argument("b", metavar="B", nargs="?", default="", help="the same (default: the working tree)")
    parser.add_argument("--root", help="the project (default: the one that holds this package)")
    options = parser.parse_args(arguments)
    if options.root:
        hooks.use_root(options.root)
    try:
        text = report(side(options.a), side(options.b))
    except (CompareError, records.RecordError, experiments.ExperimentError, claims.ClaimError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
