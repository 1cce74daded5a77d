"""Run or replay: the one place that decides, and the recorder that runs.

Environment:
    REFRESH  unset or empty: replay, nothing runs.
             "all", or globs of experiment ids ("precision.*,kernels.bench"): run these.
             "stale": run only what has no current full record of this machine's device;
             "stale,precision.*": of these, only the stale ones.
    SMOKE    "1": run the smoke settings. A smoke record never replaces a full one.
    RECORD_COMMIT  commit to note where the project is a copy without its git history.

Each experiment runs at most once per build, in a process group of its own with a time limit. A
failure is raised as RunError and stored nowhere; the record that stood there stays.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import hooks
from hooks import experiments, records
from hooks.experiments import Experiment
from hooks.records import Record

_PAYLOAD = ("experiment", "mode", "settings", "device", "versions", "started", "seconds", "tables")

_done: dict[str, RunError | None] = {}  # what this build has run: id → its failure
weak_read: set[str] = set()  # experiments whose stale or smoke records were handed out; for messages, cleared by who asks
_environment: dict[str, Any] | None = None


class RunError(Exception):
    """An experiment could not be run, or failed. Nothing was stored."""


def reset() -> None:
    """Start a new build: every experiment may run again."""
    global _environment
    _done.clear()
    _environment = None


def ensure(id: str) -> dict[str, Record]:
    """Run the experiment if this build refreshes it, then return its records by device slug.

    Raises:
        UnknownExperiment, ExperimentError, RecordError: see `records.load`.
        RunError: the run failed or cannot be made on this machine.
    """
    experiment = experiments.find(id)
    if id not in _done and wanted(experiment):
        try:
            run(experiment, "smoke" if smoke() else "full")
            _done[id] = None
        except RunError as error:
            _done[id] = error
    if (failure := _done.get(id)) is not None:
        raise RunError(str(failure))
    found = records.load(id)
    if any(record.stale for record in found.values()) or (found and all(record.smoke for record in found.values())):
        weak_read.add(id)
    return found


# ---------------------------------------------------------------------------- the decision


def smoke() -> bool:
    """Whether runs use the smoke settings."""
    return os.environ.get("SMOKE", "").lower() not in ("", "0", "no", "off", "false")


def request() -> tuple[bool, list[str]]:
    """REFRESH as (only what is stale, globs of ids); no globs: nothing runs."""
    tokens = [t.strip() for t in os.environ.get("REFRESH", "").split(",") if t.strip()]
    globs = ["*" if t == "all" else t for t in tokens if t != "stale"]
    stale = "stale" in tokens
    return stale, globs or (["*"] if stale else [])


def check_request() -> None:
    """Refuse a REFRESH that names no experiment: a typing error must not look like a success.

    Raises:
        RunError: names the glob and the known ids.
    """
    known = list(experiments.all()) if os.environ.get("REFRESH", "").strip() else []
    for glob in request()[1]:
        if not fnmatch.filter(known, glob):
            raise RunError(f"REFRESH: {glob!r} matches no experiment; known: {', '.join(known) or 'none'}")


def wanted(experiment: Experiment) -> bool:
    """Whether this build runs the experiment.

    Raises:
        RunError: REFRESH=stale needs this machine's device, and the environment cannot be read.
    """
    stale, globs = request()
    if not any(fnmatch.fnmatchcase(experiment.id, glob) for glob in globs):
        return False
    if not stale:
        return True
    path = records.path_of(environment()["device"]["slug"], experiment.id)
    if not path.exists():
        return True
    try:
        record = records.read(path, experiment)
    except records.RecordError:
        return True
    return record.stale or (record.smoke and not smoke())


def environment() -> dict[str, Any]:
    """Device and versions of this machine, asked once from a child process (hooks never import torch).

    Raises:
        RunError: torch is absent, or the child failed.
    """
    global _environment
    if _environment is None:
        out = _child([sys.executable, "-m", "snippets.measure", "--environment"], 120, "environment", quiet=True)
        try:
            _environment = json.loads(out.strip().splitlines()[-1])
            _environment["device"]["slug"]
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise RunError(f"python -m snippets.measure --environment printed no environment: {out[-300:]!r}") from error
    return _environment


# ----------------------------------------------------------------------------- the recorder


def run(experiment: Experiment, mode: str) -> Path:
    """Run one experiment in a process of its own and store its record.

    Args:
        mode: ``"full"`` or ``"smoke"``.

    Returns:
        The record's path.

    Raises:
        RunError: no torch, no suitable device, a failing or overlong run, or an invalid payload.
    """
    id, digest = experiment.id, experiment.digest
    device = environment()["device"]
    if mode == "full" and experiment.needs == "cuda":
        if device["slug"] == "cpu":
            raise RunError(
                f"{id} needs a CUDA GPU and this machine shows none ({device['name']}). Refresh on a GPU machine,"
                " choose other experiments (make refresh ONLY=<globs>), or leave REFRESH unset to show the records"
            )
        if device["memory_gib"] < experiment.memory_gib:
            raise RunError(
                f"{id} needs {experiment.memory_gib} GiB of device memory, {device['name']} has"
                f" {device['memory_gib']}; refresh it on a larger GPU"
            )
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        file = Path(folder) / "payload.json"
        command = [sys.executable, "-m", f"{experiments.PACKAGE}.{id}", "--json", str(file)]
        _child(command + (["--smoke"] if mode == "smoke" else []), experiment.limit_seconds, id)
        try:
            payload = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{id}: ended without a readable result ({error}); its module must end with cli()") from error
    if not isinstance(payload, dict) or set(payload) != set(_PAYLOAD):
        got = sorted(payload) if isinstance(payload, dict) else type(payload).__name__
        raise RunError(f"{id}: the result has fields {got}, expected {sorted(_PAYLOAD)}")
    asked = {"experiment": id, "mode": mode, "settings": experiment.full if mode == "full" else experiment.smoke}
    for key, value in asked.items():
        if payload[key] != value:
            raise RunError(f"{id}: the result says {key}={payload[key]!r}, asked was {value!r}")
    if experiments.find(id).digest != digest:
        raise RunError(f"{id}: its code was edited while it ran; run it again")
    commit, dirty = revision()
    try:
        path = records.store(
            {"schema": records.SCHEMA, **payload, "commit": commit, "dirty": dirty, "digest": digest}
        )
    except records.RecordError as error:
        raise RunError(str(error)) from error
    _say(id, payload["seconds"], f"recorded in {records.relative(path)}")
    return path


def revision() -> tuple[str, bool]:
    """(commit, whether the measured code differs from it); ("", True) where git cannot tell.

    Only what can change a number counts: a refresh itself changes records/, and prose is no code.
    """
    if named := os.environ.get("RECORD_COMMIT", "").strip():
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    try:
        commit = _git("rev-parse", "--verify", "HEAD").strip()
        return commit, bool(_git("status", "--porcelain", "--", experiments.PACKAGE, "requirements.txt").strip())
    except (OSError, subprocess.SubprocessError):
        return "", True


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=hooks.root(), capture_output=True, text=True, timeout=60, check=True
    ).stdout


def _say(id: str, seconds: float, text: str) -> None:
    print(f"[{id} {seconds:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminable(id: str) -> Iterator[None]:
    """A cancelled job (SIGTERM) and a lost terminal (SIGHUP) end a run as Ctrl-C does.

    By default they would end this process at once, and leave the child running on the GPU.
    """

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    ours = [s for s in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(s) == signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, stop)
        yield
    except KeyboardInterrupt:
        print(f"\n[{id}] interrupted; nothing was stored", file=sys.stderr, flush=True)
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _pieces(stream: IO[str]) -> Iterator[str]:
    """Lines of a child's output; a line of any length comes in pieces."""
    return iter(lambda: stream.readline(1000), "")


def _child(command: list[str], limit: float, id: str, *, quiet: bool = False) -> str:
    with _terminable(id):
        return _watched(command, limit, id, quiet)


def _watched(command: list[str], limit: float, id: str, quiet: bool) -> str:
    """Run a command in its own process group; return its stdout (the last megabyte).

    stderr is forwarded line by line with the elapsed time. Whatever ends the call, the whole
    group is killed: a compile worker or server left behind would keep the GPU's memory.

    Raises:
        RunError: it cannot start, exceeds `limit` seconds, or ends with another status than 0.
    """
    start = time.monotonic()
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    tail: collections.deque[str] = collections.deque(maxlen=30)
    output: collections.deque[str] = collections.deque(maxlen=1000)
    last = [start]

    def forward() -> None:
        for line in _pieces(process.stderr):
            last[0] = time.monotonic()
            tail.append(line.rstrip("\n"))
            if not quiet:
                _say(id, time.monotonic() - start, line.rstrip())

    process: Any = None
    threads = [
        threading.Thread(target=forward, daemon=True),
        threading.Thread(target=lambda: output.extend(_pieces(process.stdout)), daemon=True),
    ]
    expired = False
    try:
        try:
            process = subprocess.Popen(
                command, cwd=hooks.root(), env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise RunError(f"{id}: cannot start {command[0]} ({error.strerror or error})") from error
        for thread in threads:
            thread.start()
        while True:
            left = start + limit - time.monotonic()
            if left <= 0:
                expired = True
                break
            try:
                process.wait(min(left, 15))
                break
            except subprocess.TimeoutExpired:
                if not quiet and time.monotonic() - last[0] > 14:
                    _say(id, time.monotonic() - start, f"still running (limit {limit:.0f} s)")
                    last[0] = time.monotonic()
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for thread in threads:
                with contextlib.suppress(RuntimeError):  # interrupted before it was started
                    thread.join(5)
    said = "\n".join(tail)
    if expired:
        raise RunError(
            f"{id}: killed after its time limit of {limit:.0f} s; make it smaller or raise `minutes`"
            f" (the limit is 3 × minutes, 10 min at most). Its last words:\n{said}"
        )
    if process.returncode != 0:
        if "No module named 'torch'" in said:
            raise RunError(
                f"{id}: torch is not installed in {sys.executable}. Install requirements.txt to refresh,"
                " or leave REFRESH unset to show the records"
            )
        code = process.returncode
        how = f"was killed by signal {-code}{' (out of memory?)' if code == -9 else ''}" if code < 0 else f"failed with exit status {code}"
        raise RunError(f"{id}: `python {' '.join(command[1:3])}` {how}; nothing was stored. Its last words:\n{said}")
    return "".join(output)
