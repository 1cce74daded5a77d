"""Experiments, found and fingerprinted without importing them.

An experiment is a module below snippets/ with a literal dict EXPERIMENT and a function
`measure(*, ...)`. Both are read from the syntax tree, so that a machine without torch can list
every experiment and tell whether a record still belongs to the code.

The digest covers what can change a number: the syntax trees of the module and of every
snippets/ file that it imports directly or not, the declared data files (Python among them counts as
code: its syntax tree, and what it imports from snippets/), the full settings and
the declared tables. It leaves out what cannot: comments, formatting, docstrings, and the
title, needs, minutes, memory and smoke settings of EXPERIMENT.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import hooks

PACKAGE = "snippets"
_REQUIRED = {"title", "needs", "memory_gib", "minutes", "full", "smoke", "tables"}
_OPTIONAL = {"data"}
_DIGESTED = {"full", "tables", "data"}  # keys of EXPERIMENT that can change a number
_DOTTED = re.compile(rf"{PACKAGE}(\.[A-Za-z_]\w*)+")


class ExperimentError(Exception):
    """An experiment module is unreadable or malformed. The message names the file and the remedy."""


class UnknownExperiment(ExperimentError):
    """No experiment has this id."""


@dataclass(frozen=True)
class Experiment:
    """One experiment as declared in its module.

    Attributes:
        id: dotted path below snippets/, for example ``precision.sources``.
        path: the module, relative to the project, with forward slashes.
        title: shown to readers.
        needs: ``"cuda"`` or ``"cpu"``.
        memory_gib: least device memory, GiB.
        minutes: expected duration of the full run.
        full, smoke: keyword arguments of ``measure``.
        tables: table → column → unit (``""`` text or flag, ``"1"`` dimensionless).
        data: declared data files, relative to the project.
    """

    id: str
    path: str
    title: str
    needs: str
    memory_gib: float
    minutes: float
    full: dict[str, Any]
    smoke: dict[str, Any]
    tables: dict[str, dict[str, str]]
    data: tuple[str, ...]

    @property
    def limit_seconds(self) -> float:
        """Time limit of one run: three times the expected duration, between 2 and 10 minutes."""
        return 60.0 * min(max(3 * self.minutes, 2), 10)

    @property
    def command(self) -> str:
        """What a reader types to repeat the measurement."""
        return f"python -m {PACKAGE}.{self.id}"

    @cached_property
    def digest(self) -> str:
        """``sha256:<hex>`` of everything that can change a number.

        Raises:
            ExperimentError: a source or data file is unreadable.
        """
        code = [path for path in self.data if path.endswith(".py")]
        parts = {path: _source(path).digest for start in (self.path, *code) for path in sources(start)}
        parts |= {f"data:{path}": _bytes_digest(path) for path in self.data if path not in code}
        body = {"sources": parts, "full": self.full, "tables": self.tables}
        return "sha256:" + hashlib.sha256(canonical_json(body)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """One byte string per JSON value: keys sorted, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


# ------------------------------------------------------------------------------ source files


@dataclass(frozen=True)
class _Source:
    tree: ast.Module
    digest: str
    imports: tuple[str, ...]


_cache: dict[str, tuple[tuple, Any]] = {}
_listing: list[Path] = []


def notice_files() -> None:
    """Forget everything when a file below snippets/ came or went: an import may mean another file now."""
    global _listing
    listing = sorted((hooks.root() / PACKAGE).rglob("*.py"))
    if listing != _listing:
        _cache.clear()
        _listing = listing


def _cached(path: str, kind: str, make) -> Any:
    """`make(absolute path)`, again only when the file's time or size changed."""
    full = hooks.root() / path
    try:
        stat = full.stat()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        key = f"{kind}:{full}"
        if key not in _cache or _cache[key][0] != stamp:
            _cache[key] = (stamp, make(full))
        return _cache[key][1]
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read ({error.strerror or error}); restore the file") from error


def _bytes_digest(path: str) -> str:
    return _cached(path, "bytes", lambda full: hashlib.sha256(full.read_bytes()).hexdigest())


def _source(path: str) -> _Source:
    def make(full: Path) -> _Source:
        try:
            tree = ast.parse(full.read_bytes(), filename=path)
            out: list[str] = []
            _write(tree, out)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None) or 1
            raise ExperimentError(f"{path}:{line}: not valid Python ({error}); correct the file") from error
        digest = hashlib.sha256("".join(out).encode()).hexdigest()
        return _Source(tree, digest, tuple(sorted(set(_imports(tree, path)))))

    return _cached(path, "source", make)


def sources(path: str) -> list[str]:
    """The snippets/ files that the module in `path` is made of: itself and all it imports, sorted.

    Static: import statements anywhere in the files, and string constants that name a module
    below snippets/ (``"snippets.kernels.rms_norm:rms_norm"``, ``["-m", "snippets.x"]``).
    """
    seen, todo = set(), [path]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo.extend(_source(here).imports)
    return sorted(seen)


def _imports(tree: ast.Module, path: str) -> Iterator[str]:
    package = path.removesuffix(".py").split("/")[:-1]
    docstrings = set()
    for node in ast.walk(tree):  # parents before children
        if isinstance(node, _DOCUMENTED):
            docstrings.add(id(_docstring(node)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:  # a name may be a submodule
                yield from _files([*base, alias.name])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if _DOTTED.fullmatch(name := node.value.partition(":")[0]):
                yield from _files(name.split("."))


def _files(parts: list[str]) -> Iterator[str]:
    """Files of the project that importing the dotted name `parts` executes."""
    if parts[:1] != [PACKAGE]:
        return
    for n in range(1, len(parts) + 1):
        stem = "/".join(parts[:n])
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if (hooks.root() / path).is_file():
                yield path


# ------------------------------------------------------------------- canonical syntax tree


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_UNWRITTEN = {"ctx", "kind", "type_comment", "type_ignores"}


def _docstring(node: ast.AST) -> ast.Constant | None:
    if isinstance(node, _DOCUMENTED) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return first.value
    return None


def _write(node: Any, out: list[str]) -> None:
    """Append to `out` a text that is equal for equal code on Python 3.11 to 3.14.

    ast.dump is not: 3.12 added `type_params`, 3.13 leaves out defaults, and the f-string parser
    of 3.12 splits constants elsewhere. Empty fields are therefore left out, neighbouring constant
    parts of an f-string joined, and strings written as ASCII (repr follows the Unicode version).
    """
    if isinstance(node, list):
        out.append("[")
        for item in node:
            _write(item, out)
            out.append(",")
        out.append("]")
    elif isinstance(node, ast.Constant):
        out.append(f"{type(node.value).__name__}:{ascii(node.value)}")
    elif isinstance(node, ast.AST):
        out.append(type(node).__name__ + "(")
        for name in node._fields:
            if name in _UNWRITTEN:
                continue
            value = getattr(node, name, None)
            if name == "body" and _docstring(node) is not None:
                value = value[1:]
            elif name == "values" and isinstance(node, ast.JoinedStr):
                value = _joined(value)
            elif name == "format_spec" and isinstance(value, ast.JoinedStr) and not _joined(value.values):
                continue  # f"{x:}" is f"{x}"; versions differ in how they write it
            elif name == "value" and _is_experiment(node):
                value = _digested(value)
            if value is None or value == []:
                continue
            out.append(name + "=")
            _write(value, out)
            out.append(";")
        out.append(")")
    else:
        out.append(f"{type(node).__name__}:{ascii(node)}")


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    out: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant):
            if value.value == "":
                continue
            if out and isinstance(out[-1], ast.Constant):
                out[-1] = ast.Constant(out[-1].value + value.value)
                continue
        out.append(value)
    return out


def _is_experiment(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return False
    return [t.id for t in targets if isinstance(t, ast.Name)] == ["EXPERIMENT"]


def _digested(value: ast.expr | None) -> ast.expr | None:
    """The EXPERIMENT dict without the keys that cannot change a number."""
    if not isinstance(value, ast.Dict):
        return value
    kept = [(k, v) for k, v in zip(value.keys, value.values, strict=True)
            if not (isinstance(k, ast.Constant) and k.value in (_REQUIRED | _OPTIONAL) - _DIGESTED)]  # fmt: skip
    return ast.Dict([k for k, _ in kept], [v for _, v in kept])


# ---------------------------------------------------------------------------------- finding


def find(id: str) -> Experiment:
    """The experiment with this id.

    Raises:
        UnknownExperiment: there is none; the message proposes near ids.
        ExperimentError: its module is malformed.
    """
    path = f"{PACKAGE}/{id.replace('.', '/')}.py"
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", id) and (hooks.root() / path).is_file():
        if (experiment := _read(path)) is not None:
            return experiment
    known = list(_paths())
    near = difflib.get_close_matches(id, known, 3, 0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"
    raise UnknownExperiment(f"unknown experiment {id!r}; {hint} An experiment is a module with EXPERIMENT: {path}")


def all() -> dict[str, Experiment]:  # noqa: A001 - read as experiments.all()
    """Every experiment, by id, in alphabetical order.

    Raises:
        ExperimentError: one or more modules are malformed; the message lists each.
    """
    out, faults = {}, []
    for id, path in _paths().items():
        try:
            if (experiment := _read(path)) is not None:
                out[id] = experiment
        except ExperimentError as error:
            faults.append(str(error))
    if faults:
        raise ExperimentError("\n".join(faults))
    return out


def _paths() -> dict[str, str]:
    """id → path of every module below snippets/ that assigns EXPERIMENT, unread otherwise."""
    root = hooks.root()
    out = {}
    for full in sorted((root / PACKAGE).rglob("*.py")):
        # The name must occur in the text; this spares parsing what is no experiment.
        path = full.relative_to(root).as_posix()
        if full.name != "__init__.py" and _cached(path, "named", lambda f: b"EXPERIMENT" in f.read_bytes()):
            try:
                assigned = any(_is_experiment(node) for node in _source(path).tree.body)
            except ExperimentError:
                assigned = True  # unreadable: let _read say so
            if assigned:
                out[".".join(path.removesuffix(".py").split("/")[1:])] = path
    return out


def _read(path: str) -> Experiment | None:
    """The experiment in a file, or None; a fresh object, because its digest depends on other files too."""
    found = _cached(path, "experiment", lambda _: _parse(path))
    for file in found.data if found else ():
        if not (hooks.root() / file).is_file():
            raise ExperimentError(
                f"{path}:1: EXPERIMENT names the data file {file!r}, which does not exist (paths start at the project's root)"
            )
    return found and replace(found)


def _parse(path: str) -> Experiment | None:
    tree = _source(path).tree
    node = next((n for n in tree.body if _is_experiment(n)), None)
    if node is None:
        return None

    def wrong(what: str) -> ExperimentError:
        return ExperimentError(f"{path}:{node.lineno}: EXPERIMENT {what}")

    try:
        value = ast.literal_eval(node.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise wrong("is not a literal dict; write constants only (it is read without running the module)") from error
    if not isinstance(value, dict):
        raise wrong("is not a dict")
    if missing := _REQUIRED - set(value):
        raise wrong(f"lacks {', '.join(sorted(missing))}")
    if extra := set(value) - _REQUIRED - _OPTIONAL:
        raise wrong(f"has unknown keys {', '.join(sorted(map(str, extra)))}")
    if not isinstance(value["title"], str) or not value["title"].strip():
        raise wrong("needs a title for readers")
    if value["needs"] not in ("cuda", "cpu"):
        raise wrong(f"has needs={value['needs']!r}; write 'cuda' or 'cpu'")
    for key in ("memory_gib", "minutes"):
        number = value[key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise wrong(f"has {key}={number!r}; write a number that is not negative")
    for key in ("full", "smoke"):
        settings = value[key]
        if not isinstance(settings, dict) or not builtins.all(isinstance(k, str) for k in settings):
            raise wrong(f"has {key} settings that are not a dict of keyword arguments")
        try:
            same = json.loads(json.dumps(settings, allow_nan=False)) == settings
        except (TypeError, ValueError):
            same = False
        if not same:
            raise wrong(f"has {key} settings that JSON cannot hold; use lists, dicts, strings and finite numbers")
    if set(value["full"]) != set(value["smoke"]):
        raise wrong("has different keys in full and smoke")
    tables = value["tables"]
    if not isinstance(tables, dict) or not tables:
        raise wrong("declares no tables")
    for name, columns in tables.items():
        if not isinstance(name, str) or not isinstance(columns, dict) or not columns or not builtins.all(
            isinstance(c, str) and isinstance(u, str) for c, u in columns.items()
        ):  # fmt: skip
            raise wrong(f"declares table {name!r} wrongly; write {{column: unit}}")
    data = value.get("data", [])
    if not isinstance(data, list) or not builtins.all(isinstance(d, str) for d in data):
        raise wrong("has data that is not a list of paths")
    measure = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "measure"), None)
    if measure is None:
        raise wrong("stands in a module without a function measure(*, ...)")
    args = measure.args
    if args.posonlyargs or args.args or args.vararg:
        raise wrong("belongs to a measure() with positional arguments; make them keyword-only: measure(*, ...)")
    names = {a.arg for a in args.kwonlyargs}
    needed = {a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is None}
    unknown = set() if args.kwarg else set(value["full"]) - names
    if unknown or needed - set(value["full"]):
        raise wrong(f"has settings {sorted(value['full'])}, but measure() takes {sorted(names)}")
    return Experiment(
        id=".".join(path.removesuffix(".py").split("/")[1:]),
        path=path,
        title=value["title"],
        needs=value["needs"],
        memory_gib=value["memory_gib"],
        minutes=value["minutes"],
        full=value["full"],
        smoke=value["smoke"],
        tables=tables,
        data=tuple(data),
    )
