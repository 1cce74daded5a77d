"""Records: one measurement with its provenance, in one JSON file per device and experiment.

    records/<device slug>/<experiment id>.json

Only the recorder (hooks.runner) writes them. Reading trusts nothing: a file that is damaged,
edited by hand, half merged, from a newer version, in the wrong place or out of step with its
experiment raises RecordError, which names the file and the remedy. No other exception escapes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hooks
from hooks import experiments

SCHEMA = 1
DIRECTORY = "records"
_SLUG = re.compile(r"[a-z0-9][a-z0-9._+-]*")
_ID = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_CONFLICT = re.compile(r"^(<{7} |={7}$|>{7} |\|{7} )", re.MULTILINE)
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": int, "experiment": str, "mode": str, "settings": dict, "device": dict, "versions": dict,
    "commit": str, "dirty": bool, "started": str, "seconds": (int, float), "digest": str, "tables": dict,
    "checksum": str,
}  # fmt: skip
_DEVICE: dict[str, type | tuple[type, ...]] = {
    "name": str, "slug": str, "memory_gib": (int, float), "capability": str, "sm_count": int, "driver": str,
}  # fmt: skip
_VERSIONS = {"python", "torch", "cuda", "triton", "transformers", "liger-kernel"}
_LARGEST = 64 << 20  # bytes; a record of curves is some 100 kB, anything near this is a mistake


class RecordError(Exception):
    """A record cannot be used. The message names the file, what is wrong and the remedy."""


@dataclass(frozen=True)
class Record:
    """One stored measurement; shared by all who load it, so not to be changed.

    Attributes:
        experiment: the experiment's id.
        mode: ``"full"`` or ``"smoke"``; a smoke record's numbers mean nothing.
        settings: keyword arguments that ``measure`` got.
        device: ``name``, ``slug``, ``memory_gib``, ``capability``, ``sm_count``, ``driver``.
        versions: ``python``, ``torch``, ``cuda``, ``triton``, ``transformers``, ``liger-kernel`` ("" if absent).
        commit, dirty: the commit that was checked out ("" unknown), and whether the code differed from it.
        started: ISO 8601, UTC. seconds: duration of ``measure``.
        digest: of the code that was measured (`Experiment.digest` at that time).
        tables: table → rows; a row maps column → str, bool, int, finite float or None.
        path: the file, relative to the project.
        stale: whether the experiment's digest is another one now.
    """

    experiment: str
    mode: str
    settings: dict[str, Any]
    device: dict[str, Any]
    versions: dict[str, str]
    commit: str
    dirty: bool
    started: datetime
    seconds: float
    digest: str
    tables: dict[str, list[dict[str, Any]]]
    path: str
    stale: bool

    @property
    def smoke(self) -> bool:
        """Whether the numbers come from smoke settings."""
        return self.mode == "smoke"


def path_of(slug: str, id: str) -> Path:
    """Absolute path of a record's file."""
    return hooks.root() / DIRECTORY / slug / f"{id}.json"


def relative(path: Path) -> str:
    """`path` as messages name it."""
    return path.relative_to(hooks.root()).as_posix()


def checksum(record: dict[str, Any]) -> str:
    """``sha256:<hex>`` over the canonical JSON of every key but the checksum itself."""
    body = {k: v for k, v in record.items() if k != "checksum"}
    return "sha256:" + hashlib.sha256(experiments.canonical_json(body)).hexdigest()


# ---------------------------------------------------------------------------------- reading


def load(id: str) -> dict[str, Record]:
    """Every device's record of one experiment: device slug → Record, sorted; {} when there is none.

    Raises:
        UnknownExperiment, ExperimentError: see `experiments.find`.
        RecordError: a file is unusable.
    """
    experiment = experiments.find(id)
    found = sorted((hooks.root() / DIRECTORY).glob(f"*/{id}.json"))
    return {path.parent.name: _cached(path, experiment) for path in found}


_cache: dict[Path, tuple[tuple, Record]] = {}


def _cached(path: Path, experiment: experiments.Experiment) -> Record:
    """`read`, again only when the file or its experiment changed: a page asks for one record many times."""
    try:
        stat = path.stat()
    except OSError:
        return read(path, experiment)
    stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino, experiment.digest, experiment.tables)
    if path not in _cache or _cache[path][0] != stamp:
        _cache[path] = (stamp, read(path, experiment))
    return _cache[path][1]


def devices() -> list[str]:
    """Slugs of the devices with a directory below records/."""
    return sorted(p.name for p in (hooks.root() / DIRECTORY).glob("*") if p.is_dir())


def strays() -> list[str]:
    """One complaint for each file below records/ that no experiment owns."""
    known = set(experiments.all())
    out = []
    for path in sorted((hooks.root() / DIRECTORY).rglob("*")):
        if path.is_dir() or path.name.startswith("."):
            continue
        place = path.relative_to(hooks.root() / DIRECTORY)
        if len(place.parts) != 2 or path.suffix != ".json":
            out.append(f"{relative(path)}: is no record (records/<device>/<experiment>.json); move it away")
        elif not path.exists():
            out.append(f"{relative(path)}: a link that leads nowhere; restore the file (git checkout)")
        elif path.stem not in known:
            out.append(f"{relative(path)}: no experiment has this id; delete the file, or restore the experiment")
    return out


def read(path: Path, experiment: experiments.Experiment) -> Record:
    """Read and validate one file.

    Raises:
        RecordError: whatever is wrong with it.
    """
    name = relative(path)
    rerun = f"delete it and measure again: make refresh ONLY={experiment.id}"
    try:
        if path.stat().st_size > _LARGEST:
            raise RecordError(f"{name}: larger than {_LARGEST >> 20} MiB; {rerun}")
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{name}: cannot be read ({error.strerror or error}); {rerun}") from error
    value = parse(data, name, rerun)
    try:
        if value["experiment"] != experiment.id:
            raise RecordError(f"is a record of {value['experiment']!r}; foreign here: rename the file or delete it")
        if value["device"]["slug"] != path.parent.name:
            raise RecordError(f"comes from device {value['device']['slug']!r}; move it to that directory or delete it")
        stale = value["digest"] != experiment.digest
        if not stale:
            # Only of current code is more known than the record itself says.
            _match(value, experiment)
    except RecordError as error:
        text = str(error)
        raise RecordError(f"{name}: {text}" if ";" in text else f"{name}: {text}; {rerun}") from error
    return record_of(value, name, stale)


def parse(data: bytes, name: str, remedy: str) -> dict[str, Any]:
    """The content of a record's file, validated as far as it speaks for itself.

    Args:
        name, remedy: for messages.

    Raises:
        RecordError: whatever is wrong with it.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{name}: not UTF-8; {remedy}") from error
    if _CONFLICT.search(text):
        raise RecordError(f"{name}: contains merge conflict marks; take one side whole (git checkout --ours/--theirs)")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError, MemoryError) as error:
        raise RecordError(f"{name}: not valid JSON ({error}); {remedy}") from error
    try:
        _validate(value)
    except RecordError as error:
        text = str(error)
        raise RecordError(f"{name}: {text}" if ";" in text else f"{name}: {text}; {remedy}") from error
    except (RecursionError, MemoryError) as error:
        raise RecordError(f"{name}: nested too deeply; {remedy}") from error
    return value


def record_of(value: dict[str, Any], name: str, stale: bool) -> Record:
    """The Record of a validated content."""
    fields = {k: v for k, v in value.items() if k not in ("schema", "checksum")}
    fields["started"] = datetime.fromisoformat(value["started"]).astimezone(UTC)
    return Record(**fields, path=name, stale=stale)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


# -------------------------------------------------------------------------------- validation


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))


def _validate(value: Any) -> None:
    """Everything that a record's own content shows. Raises RecordError without the file's name."""
    if not isinstance(value, dict):
        raise RecordError("not a JSON object")
    schema = value.get("schema")
    if _is(schema, int) and schema > SCHEMA:
        raise RecordError(f"schema {schema} is newer than this project's {SCHEMA}; update the project")
    if not _is(schema, int) or schema != SCHEMA:
        raise RecordError(f"schema is {schema!r:.40}, not {SCHEMA}")
    if set(value) != set(_FIELDS):
        raise RecordError(f"fields missing or unknown: {', '.join(sorted(set(value) ^ set(_FIELDS)))[:200]}")
    for field, kind in _FIELDS.items():
        if not _is(value[field], kind):
            raise RecordError(f"field {field!r} is {type(value[field]).__name__} or not finite")
    device = value["device"]
    if set(device) != set(_DEVICE) or not all(_is(device[k], kind) for k, kind in _DEVICE.items()):
        raise RecordError(f"device must have exactly {', '.join(_DEVICE)}, with the right types")
    if not _SLUG.fullmatch(device["slug"]):
        raise RecordError(f"device slug {device['slug']!r} is not usable as a directory name")
    versions = value["versions"]
    if not _VERSIONS <= set(versions) or not all(isinstance(v, str) for v in versions.values()):
        raise RecordError(f"versions must name {', '.join(sorted(_VERSIONS))}, as text")
    if not _ID.fullmatch(value["experiment"]):
        raise RecordError(f"experiment {value['experiment']!r} is no id")
    if value["mode"] not in ("full", "smoke"):
        raise RecordError(f"mode is {value['mode']!r}, not 'full' or 'smoke'")
    if not _SHA256.fullmatch(value["digest"]):
        raise RecordError("digest is not sha256:<64 hex digits>")
    if value["seconds"] < 0:
        raise RecordError("duration is negative")
    try:
        aware = datetime.fromisoformat(value["started"]).astimezone(UTC).tzinfo and "T" in value["started"]
        if not aware or datetime.fromisoformat(value["started"]).tzinfo is None:
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise RecordError("started is not an ISO 8601 time with a time zone") from error
    _validate_tables(value["tables"])
    try:
        expected = checksum(value)
    except (ValueError, TypeError) as error:  # a non-finite float inside settings, for example 1e999
        raise RecordError(f"holds a value that JSON cannot hold ({error})") from error
    if value["checksum"] != expected:
        raise RecordError(
            "checksum does not match the content: the file was edited or damaged;"
            " restore it (git checkout), or delete it and measure again"
        )


def _validate_tables(tables: dict[str, Any]) -> None:
    for name, rows in tables.items():
        if not isinstance(rows, list) or not rows:
            raise RecordError(f"table {name!r} is empty or no list")
        for i, row in enumerate(rows):
            if not isinstance(row, dict) or set(row) != set(rows[0]):
                raise RecordError(f"table {name!r} row {i}: columns differ from the first row's")
            for column, cell in row.items():
                if cell is not None and not (_is(cell, (str, int, float)) or isinstance(cell, bool)):
                    raise RecordError(f"table {name!r} row {i} column {column!r} is {cell!r:.40}, no finite plain value")


def _match(value: dict[str, Any], experiment: experiments.Experiment) -> None:
    """A record of the present code must agree with what the code declares."""
    expected = experiment.full if value["mode"] == "full" else experiment.smoke
    if value["settings"] != expected and value["mode"] == "full":
        raise RecordError("settings differ from the experiment's, though the digest is the present one")
    declared, tables = experiment.tables, value["tables"]
    if set(tables) != set(declared):
        raise RecordError(f"tables {sorted(tables)} differ from the declared {sorted(declared)}")
    for name, rows in tables.items():
        if set(rows[0]) != set(declared[name]):
            raise RecordError(f"table {name!r} has columns {sorted(rows[0])}, declared are {sorted(declared[name])}")
        numbers = [column for column, unit in declared[name].items() if unit]
        medians = [column for column in numbers if column.startswith("median_")]
        for i, row in enumerate(rows):
            for column in numbers:
                if isinstance(row[column], (str, bool)):
                    raise RecordError(
                        f"table {name!r} row {i} column {column!r} is {row[column]!r:.40}, declared is a number"
                        f" ({declared[name][column]})"
                    )
            for column in medians:
                if fault := _impossible(row, column):
                    raise RecordError(f"table {name!r} row {i} column {column!r}: {fault}")


def _impossible(row: dict[str, Any], column: str) -> str:
    """What no clock gives, in a measured time and its spread (``median_ms``, ``p20_ms``, ``p80_ms``); "" if nothing."""
    median, low, high = row[column], *(row.get(column.replace("median", p, 1)) for p in ("p20", "p80"))
    if median is None:
        return ""
    if median <= 0:
        return f"{median} is no time that anything takes"
    if low is not None and high is not None and not 0 < low <= median <= high:
        return f"{median} lies outside its own spread of {low} to {high}"
    return ""


# ----------------------------------------------------------------------------------- writing


def store(record: dict[str, Any]) -> Path:
    """Validate a record without checksum, add it, and put the file in place in one step.

    A full record is never replaced by a smoke one: then the old one stays and its path returns.

    Raises:
        RecordError: the record is not valid, or a smoke run would replace an unreadable file.
    """
    record = {k: record[k] for k in _FIELDS if k in record} | {k: v for k, v in record.items() if k not in _FIELDS}
    where = f"new record of {str(record.get('experiment', '?'))[:80]}"
    try:
        if isinstance(record.get("tables"), dict):
            _validate_tables(record["tables"])  # before the checksum, which can only say that JSON refuses
        record["checksum"] = checksum(record)
        _validate(record)
        experiment = experiments.find(record["experiment"])
        _match(record, experiment)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{where}: not representable as JSON ({error}); nothing was stored") from error
    except RecordError as error:
        raise RecordError(f"{where}: {error}; nothing was stored") from error
    path = path_of(record["device"]["slug"], record["experiment"])
    if record["mode"] == "smoke" and path.exists() and not read(path, experiment).smoke:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that ends in .tmp is never read, so a crash leaves at most a file that git ignores.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(record))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def dumps(record: dict[str, Any]) -> str:
    """The file's text: one row a line, so that a refresh leaves a diff a person can read."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    parts = []
    for key, value in record.items():
        if key == "tables":
            tables = []
            for name, rows in value.items():
                body = ",\n".join(f"   {line(row)}" for row in rows)
                tables.append(f"  {line(name)}: [\n{body}\n  ]")
            parts.append(' "tables": {\n' + ",\n".join(tables) + "\n }")
        else:
            parts.append(f" {line(key)}: {line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
