"""What the pages call: results of an experiment as HTML, each with its provenance.

    from hooks.show import experiment, table, plot
    e = experiment("kernels.bench")
    print(e.table("speed", where={"direction": "forward"}, columns={"kernel": "算子", "gbps": ("带宽", ".0f")}))
    rows = e.rows("speed", kernel="rms_norm")
    print(e.show(table(rows, columns={...})))                   # any HTML, with the provenance line
    print(e.show(lambda r: table(reshape(r.rows("speed")))))    # the same, once per device
    print(e.diagram(lambda r: "sequenceDiagram\n..."))          # Mermaid source made from the record

A text made of several numbers uses ``format_value(number, ".2f")``: a result that was NaN or inf is
None in its record, and an f-string would fail on it.

``experiment`` is the one place that chooses run or replay (through hooks.runner). Where no record
exists, every method gives the same visible box with the command, and a function handed to ``show``
is not called. Records of several devices appear as tabs whose labels switch together.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from hooks import experiments, plots, render
from hooks.render import RenderError, format_value, table

__all__ = ["ShowError", "experiment", "format_value", "plot", "table"]

# The page that is being rendered, as its path below docs/; links are relative to it.
page: ContextVar[str] = ContextVar("page", default="")

# The diagrams of Mermaid that take accTitle and accDescr, which the site asks of every diagram.
DIAGRAMS = (
    "classDiagram", "erDiagram", "flowchart", "gantt", "gitGraph", "graph", "journey", "pie", "quadrantChart", "sequenceDiagram",
    "stateDiagram", "stateDiagram-v2", "xychart-beta",
)  # fmt: skip


class ShowError(RenderError):
    """A block asked for something that the experiment does not have; the message lists what exists."""


def reproduce_link(experiment_id: str, src_uri: str = "") -> str:
    """URL of an experiment's section in reproduce.md, relative to a page's URL. Arguments: see ``site_link``."""
    if src_uri == "reproduce.md":
        return f"#{experiment_id}"
    return site_link(f"reproduce/#{experiment_id}", src_uri)


def site_link(address: str, src_uri: str = "") -> str:
    """URL of an address below the site's root (a record's path, say), relative to a page's URL.

    Args:
        src_uri: the page's path below docs/ ("" = a page at the top that is not index.md).
            Pages are directories (use_directory_urls), index.md is its directory itself.
    """
    parts = (src_uri or "page.md").removesuffix(".md").split("/")
    depth = len(parts) - (parts[-1] in ("index", "README"))
    return "../" * depth + address


def ordered(records: Mapping[str, Any]) -> list[Any]:
    """Records in the order they are shown; the first is the one that prose quotes.

    Full runs only, if there is one; GPUs before the CPU; then by slug, so that the order never
    depends on which record is newer.
    """
    found = [r for r in records.values() if r.mode == "full"] or list(records.values())
    return sorted(found, key=lambda r: (r.device["slug"] == "cpu", r.device["slug"]))


def table_rows(exp: Any, record: Any, name: str, where: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows of one table of one record that match ``where``.

    Raises:
        ShowError: unknown table; the record is older than the table.
        RenderError: unknown column, no matching row.
    """
    check_declared(exp, name, where or ())
    if name not in record.tables:
        raise ShowError(
            f"the record of {exp.id} on {record.device['slug']} has no table {name!r} (it has: "
            f"{', '.join(record.tables)}); the code is newer: make refresh ONLY={exp.id}"
        )
    return render.select(record.tables[name], where, f"{exp.id}, table {name!r}")


def check_declared(exp: Any, name: str, columns: Sequence[str] | Mapping[str, Any]) -> None:
    """Table and columns must be declared. Checked without a record too, so a typo shows before any GPU run."""
    if name not in exp.tables:
        raise ShowError(f"{exp.id} has no table {name!r}; there are: {', '.join(exp.tables)}")
    for column in columns:
        if column not in exp.tables[name]:
            raise ShowError(f"{exp.id}, table {name!r} has no column {column!r}; there are: {', '.join(exp.tables[name])}")


class Result:
    """One record of an experiment, as handed to the function in ``Experiment.show``."""

    def __init__(self, exp: Any, record: Any) -> None:
        self.experiment, self.record = exp, record

    @property
    def device(self) -> str:
        """Name of the device, e.g. "NVIDIA H200"."""
        return self.record.device["name"]

    def rows(self, name: str, **where: Any) -> list[dict[str, Any]]:
        """Rows of a table as fresh dicts; keyword arguments select by column value."""
        return table_rows(self.experiment, self.record, name, where)


class Experiment:
    """An experiment with its records. Made by ``experiment``; see the module's text."""

    def __init__(self, exp: Any, records: Mapping[str, Any]) -> None:
        self.declared = exp
        self.results = [Result(exp, r) for r in ordered(records)]

    @property
    def missing(self) -> bool:
        """True where no device has a record."""
        return not self.results

    def rows(self, name: str, **where: Any) -> list[dict[str, Any]]:
        """Rows of the first device's record as fresh dicts; [] where there is no record.

        A reshape that cannot work on [] belongs into a function handed to ``show``.
        """
        check_declared(self.declared, name, where)
        return self.results[0].rows(name, **where) if self.results else []

    def show(self, fragment: str | Callable[[Result], str]) -> str:
        """HTML with the provenance line under it.

        Args:
            fragment: HTML made from ``rows`` (shown for the first device, whose rows those are),
                or a function Result → HTML, called once per device.

        Raises:
            ShowError: the fragment is empty although a record exists, or is no text.
        """
        exp = self.declared
        link = reproduce_link(exp.id, page.get())
        if not self.results:
            return render.missing(exp.id, exp.title, exp.needs, exp.memory_gib, exp.minutes, link)
        panels = []
        for result in self.results if callable(fragment) else self.results[:1]:
            html = fragment(result) if callable(fragment) else fragment
            if not isinstance(html, str) or not html.strip() or render.EMPTY_MARK in html:
                raise ShowError(f"{exp.id}: show() got {html!r:.60}, nothing to show; check the rows that the block selects")
            file = site_link(result.record.path, page.get())
            panels.append((result.device, html + "\n" + render.provenance(result.record, link, file)))
        return render.tabs(panels, _uid(exp.id, "tabs", [h for _, h in panels]))

    def table(
        self,
        name: str,
        *,
        where: Mapping[str, Any] | None = None,
        columns: Mapping[str, render.Spec] | None = None,
        best: Mapping[str, str] | None = None,
        best_by: str | Sequence[str] = (),
        caption: str = "",
    ) -> str:
        """A table of the record; units come from its declaration. Arguments: see ``render.table``."""
        by = (best_by,) if isinstance(best_by, str) else tuple(best_by)
        check_declared(self.declared, name, [*(where or ()), *(columns or ()), *(best or ()), *by])
        units = self.declared.tables[name]
        return self.show(
            lambda r: table(r.rows(name, **(where or {})), columns, best=best, best_by=by, units=units, caption=caption)
        )

    def plot(self, name: str, *, x: str, y: str, where: Mapping[str, Any] | None = None, **options: Any) -> str:
        """A plot of a table; units, device and date are added. Options: see ``plots.figure`` and ``plots.spec``."""
        named = [options[k] for k in ("color", "y_low", "y_high", "text", "joined") if options.get(k)]
        check_declared(self.declared, name, [x, y, *named, *(where or ())])
        units = dict(self.declared.tables[name]) | options.pop("units", {})
        return self.show(lambda r: self._figure(r, r.rows(name, **(where or {})), x=x, y=y, units=units, **options))

    def figure(self, result: Result, rows: Sequence[render.Row], **options: Any) -> str:
        """A plot of reshaped rows with the result's device and date; for use inside ``show(lambda r: ...)``."""
        return self._figure(result, rows, **options)

    def _figure(self, result: Result, rows: Sequence[render.Row], **options: Any) -> str:
        record = result.record
        marks = [{"smoke": "冒烟运行"}.get(record.mode, ""), "过期" if record.stale else ""]
        subtitle = " · ".join([result.device, str(record.started)[:10], *filter(None, marks)])
        told = f"{subtitle}；{options.pop('subtitle')}" if options.get("subtitle") else subtitle
        return plot(rows, subtitle=told, **options)

    def diagram(self, function: Callable[[Result], str]) -> str:
        """A Mermaid diagram made from the record, e.g. a sequenceDiagram with the measured durations.

        Args:
            function: Result → Mermaid source, called once per device. It begins with the diagram's word and
                holds the lines "accTitle: ..." and "accDescr: ...", as every diagram of this site.

        Raises:
            ShowError: the source lacks one of these.
        """
        return self.show(lambda r: render.diagram(_mermaid(self.declared.id, function(r))))

    def output(self, name: str, *, column: str, where: Mapping[str, Any] | None = None) -> str:
        """Program output that a text column holds, one row a line (or block), preformatted."""
        check_declared(self.declared, name, [column, *(where or ())])
        return self.show(lambda r: render.output(row[column] for row in r.rows(name, **(where or {}))))


def experiment(id: str) -> Experiment:  # noqa: A002 - the word the pages use
    """The experiment with its records: replayed, or run now where a refresh asks for it.

    Args:
        id: "<group>.<name>" as below snippets/.

    Raises:
        hooks.experiments.ExperimentError: no such experiment.
        Whatever hooks.runner raises when a run fails or a record is unreadable.
    """
    found = experiments.find(id)
    from hooks import runner  # here: only a page needs it, and tests of rendering must not

    return Experiment(found, runner.ensure(id))


def plot(rows: Sequence[render.Row], **options: Any) -> str:
    """Reshaped rows as a figure. Arguments: see ``plots.figure`` and ``plots.spec``; the id is made here."""
    rows = list(rows)
    return plots.figure(rows, uid=_uid("plot", options, rows), **options)


def _mermaid(experiment_id: str, source: Any) -> str:
    """The source of a diagram without common indentation, checked."""
    if not isinstance(source, str):
        raise ShowError(f"{experiment_id}: diagram() got {source!r:.60}; return the Mermaid source as text")
    source = textwrap.dedent(source).strip()
    word = re.match(r"\S*", source)[0]
    if word not in DIAGRAMS:
        raise ShowError(f"{experiment_id}: the diagram begins with {word!r}; begin it with one of: {', '.join(DIAGRAMS)}")
    for key in ("accTitle", "accDescr"):
        if not re.search(rf"^[ \t]*{key}[ \t]*:[ \t]*\S", source, re.MULTILINE):
            raise ShowError(f'{experiment_id}: the diagram has no {key}; write the line "{key}: ..." below {word}, for readers who cannot see it')
    return source


def _uid(*parts: Any) -> str:
    """An id that is unique on the page and the same in every build: the block's id and a hash of the content."""
    text = json.dumps(parts, ensure_ascii=False, default=str, sort_keys=True)
    return f"{_block_id() or 'r'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _block_id() -> str:
    """The id of the markdown-exec block that is running, "" outside one.

    markdown-exec compiles a block with the file name "<code block: id NAME>"; block ids are
    unique on the site, so ids that begin with one are unique on the page.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = re.fullmatch(r"<code block: id (.+)>", frame.f_code.co_filename)
        if found:
            return re.sub(r"[^A-Za-z0-9_-]", "-", found.group(1))
        frame = frame.f_back
    return ""
