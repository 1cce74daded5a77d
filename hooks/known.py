"""known.yml: experiments whose results are published although they are missing, stale or smoke, each with its reason.

    stale:
      gpu_tests: 测量之后改了测试代码；等待下一次刷新

A reason covers one state: what is known to be missing may not become stale unnoticed. One that is no longer needed
stands in the way of a release, like a missing one; `python -m hooks.known` takes those out. Nothing excuses a file that
cannot be read. (Claims that fail have their reasons in claims.yml, key ``known``.)
"""

from __future__ import annotations

import re
import sys

import yaml

import hooks
from hooks import claims

FILE = "known.yml"
STATES = ("missing", "stale", "smoke")

Reasons = dict[tuple[str, str], str]  # (state, experiment) → why


class KnownError(ValueError):
    """known.yml is wrong; the message lists every fault."""


def load() -> Reasons:
    """The reasons, checked. A project without the file has none.

    Raises:
        KnownError: unreadable YAML, unknown state, a reason that is no text, or a key given twice.
    """
    path = hooks.root() / FILE
    if not path.exists():
        return {}
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=claims.Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KnownError(f"{FILE}: cannot be read: {error}") from error
    if value is None:  # nothing but comments
        return {}
    if not isinstance(value, dict):
        raise KnownError(f"{FILE}: must map {', '.join(STATES)} to experiments with their reasons")
    out, faults = {}, []
    for state, reasons in value.items():
        if state not in STATES:
            faults.append(f"{FILE}: unknown state {state!r}; write {', '.join(STATES)}")
        elif not isinstance(reasons, dict):
            faults.append(f"{FILE}, {state}: must map experiments to reasons; delete the line if there are none")
        else:
            for id, reason in reasons.items():
                if isinstance(reason, str) and reason.strip():
                    out[state, id] = " ".join(reason.split())
                else:
                    faults.append(f"{FILE}, {state}: {id} has no reason; say in a sentence why its result may be published")
    if faults:
        raise KnownError("\n".join(faults))
    return out


def judge(found: list[tuple[str, str, str, str]], reasons: Reasons) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]:
    """What of hooks.check's states is (excused, not excused, excused without need), each as (state, experiment).

    A record that is both smoke and stale needs both reasons; an unreadable one has none.
    """
    bad = {(state, row[0]) for row in found if row[2] not in ("ok", "-") for state in row[2].split(", ")}
    return sorted(bad & reasons.keys()), sorted(bad - reasons.keys()), sorted(reasons.keys() - bad)


def prune(unneeded: list[tuple[str, str]]) -> None:
    """Take entries out of known.yml, and states that hold no other; comments and all other lines stay.

    Raises:
        KnownError: the file is not written one entry a line; it stays as it was.
    """
    path = hooks.root() / FILE
    text = path.read_text(encoding="utf-8")
    kept = {key: reason for key, reason in load().items() if key not in unneeded}
    state, indent, dropping, out = "", 0, False, []
    for line in text.splitlines(keepends=True):
        if head := re.match(r"(\w+):\s*(#.*)?$", line):
            state, indent = head[1], 0
            dropping = state not in {s for s, _ in kept}
        elif (entry := re.match(r"( +)([\w.]+):", line)) and (not indent or len(entry[1]) <= indent):
            indent = len(entry[1])
            dropping = (state, entry[2]) in unneeded
        elif not line.startswith(" "):
            dropping = False  # a comment, or an empty line
        if not dropping:
            out.append(line)
    path.write_text("".join(out), encoding="utf-8")
    if load() != kept:
        path.write_text(text, encoding="utf-8")
        raise KnownError(f"{FILE}: cannot be edited line by line; delete {', '.join(id for _, id in unneeded)} by hand")


def main() -> int:
    """Command line: take out what is no longer needed. Returns the exit status."""
    from hooks import check, experiments

    try:
        *_, unneeded = judge(check.states(), load())
        if unneeded:
            prune(unneeded)
    except (KnownError, experiments.ExperimentError) as error:
        print(f"known: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"taken out: {state}: {id}" for state, id in unneeded) or "every reason is still needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
