"""`python -m hooks.check`: may this state of the records be published?

Prints one line per experiment and device, then what stands in the way. Exit status 1 if any record
is stale or smoke, or an experiment has a current full record on no device, and known.yml gives no reason;
if it gives one that is not needed; if a record is unusable or a file below records/ belongs to nothing;
if a claim fails and claims.yml gives no reason, or if a diagram is not drawn. Differences between a record's versions and
requirements.txt are information: numbers of another torch are still what they say they are.
"""

from __future__ import annotations

import argparse
import re
import sys
import unicodedata

import hooks
from hooks import claims, diagrams, experiments, known, records

_NOTED = ("torch", "triton", "transformers", "liger-kernel")


def states() -> list[tuple[str, str, str, str]]:
    """(experiment, device, state, detail) for every experiment and every device that has records.

    State: ``ok``, ``stale``, ``smoke``, ``smoke, stale``, ``unreadable``, ``missing`` (no device has
    a record), or ``-`` (another device has one).

    Raises:
        ExperimentError: an experiment's module is malformed.
    """
    out = []
    for experiment in experiments.all().values():
        found = []
        for device in records.devices():
            path = records.path_of(device, experiment.id)
            if not path.exists():
                continue
            try:
                record = records.read(path, experiment)
            except records.RecordError as error:
                found.append((experiment.id, device, "unreadable", str(error)))
                continue
            state = ", ".join(n for n, on in (("smoke", record.smoke), ("stale", record.stale)) if on) or "ok"
            detail = f"{record.started:%Y-%m-%d}  {record.seconds:g} s" + ("  uncommitted code" if record.dirty else "")
            found.append((experiment.id, device, state, detail))
        if not found:
            found.append((experiment.id, "", "missing", f"needs {experiment.needs}, about {experiment.minutes:g} min"))
        elif all(device == "cpu" for _, device, _, _ in found) and experiment.needs == "cuda":
            found.append((experiment.id, "", "missing", "only a CPU record, but it needs cuda"))
        else:
            have = {device for _, device, _, _ in found}
            absent = [d for d in records.devices() if d not in have and not (d == "cpu" and experiment.needs == "cuda")]
            found += [(experiment.id, device, "-", "not measured here") for device in absent]
        out += found
    return out


def version_notes() -> list[str]:
    """One line for each package whose recorded versions differ from requirements.txt."""
    path = hooks.root() / "requirements.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    pinned = dict(re.findall(r"(?m)^\s*([\w.-]+)==([^\s;#]+)", text))
    seen: dict[tuple[str, str, str], list[str]] = {}
    for id in experiments.all():
        try:
            found = records.load(id)
        except records.RecordError:
            continue  # listed as unreadable
        for device, record in found.items():
            for package in _NOTED:
                version = record.versions.get(package, "").partition("+")[0]  # 2.13.0+cu130 is 2.13.0
                if version and package in pinned and version != pinned[package]:
                    seen.setdefault((device, package, version), []).append(id)
    return [
        f"{device}: {package} {version} recorded, requirements.txt pins {pinned[package]}"
        f" ({len(ids)} experiment{'s' if len(ids) > 1 else ''}: {', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})"
        for (device, package, version), ids in sorted(seen.items())
    ]


def claim_notes() -> tuple[list[str], list[str]]:
    """Claims that fail: (with a reason in the ledger, without one). A reason that is not needed counts as the latter.

    Raises:
        ClaimError: claims.yml is wrong.
    """
    known, unexplained = [], []
    for claim in claims.load():
        try:
            all_states = claims.states(claim)
        except records.RecordError:
            continue  # listed as unreadable
        found = [s for s in all_states if s.state == claims.FAILS]
        said = [f"claim {claim.id} on {s.slug}: {s.value:.4g}, accepted {claim.band}" for s in found]
        if not claim.known:
            unexplained += said
        elif said:
            known += [f"{line}; known: {claim.known}" for line in said]
        elif any(s.state == claims.HOLDS for s in all_states):
            unexplained.append(f"claim {claim.id} holds; remove its known: from {claims.FILE}")
    return known, unexplained


def diagram_notes() -> list[str]:
    """Diagrams that a reader's browser has to draw, and drawings that no page shows."""
    try:
        found = diagrams.collect()
    except diagrams.DiagramError as error:
        return [f"diagrams: {error}"]
    return [
        f"diagram at {d.where}: new or changed, and not drawn; every reader loads Mermaid (3.5 MB) for it\n    make diagrams"
        for d in diagrams.undrawn(found)
    ] + [f"{path.relative_to(hooks.root())}: no page shows this diagram\n    make diagrams" for path in diagrams.orphans(found)]


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(_width(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c + " " * (w - _width(c)) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hooks.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", help="the project to check (default: the one that holds this package)")
    options = parser.parse_args(arguments)
    if options.root:
        hooks.use_root(options.root)
    try:
        found, strays, notes = states(), records.strays(), version_notes()
        reasons = known.load()
        failing, unexplained = claim_notes()
        undrawn = diagram_notes()
    except (experiments.ExperimentError, claims.ClaimError, known.KnownError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    if found:
        heads = ("experiment", "device", "state", "")
        print(_table([heads, *((*row[:3], row[3].partition(";")[0][:100]) for row in found)]))
    excused, bad, unneeded = known.judge(found, reasons)
    by_reason = {}
    for state, id in excused:
        by_reason.setdefault((state, reasons[state, id]), []).append(id)
    notes += [f"{state}: {', '.join(ids)}; known: {reason}" for (state, reason), ids in by_reason.items()] + failing
    if notes:
        print("\nNote:\n" + "\n".join(f"  {note}" for note in notes))
    complaints = [row[3] for row in found if row[2] == "unreadable"] + strays + unexplained + undrawn
    if unneeded:
        ids = ", ".join(f"{id} ({state})" for state, id in unneeded)
        complaints.append(f"{known.FILE}: no longer so, and needs no reason: {ids}\n    python -m hooks.known takes them out")
    if not bad and not complaints:
        rest = f" but for the {len({id for _, id in excused})} in {known.FILE}" if excused else ""
        print(f"\nAll {len({row[0] for row in found})} experiments have current full records{rest}, and all diagrams are drawn.")
        return 0
    print("\nIn the way of a release:")
    for complaint in complaints:
        print(f"  {complaint}")
    for state in sorted({state for state, _ in bad} - {"unreadable"}):
        ids = sorted(id for s, id in bad if s == state)
        print(f"  {state}: {', '.join(ids)}\n    make refresh ONLY={','.join(ids)}\n    or give a reason in {known.FILE}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
