"""The claims ledger: claims.yml, and whether each claim holds on each device.

    - id: rms-norm-forward-bandwidth
      page: precision-alignment.md
      text: RMSNorm 前向达到拷贝带宽的 90% 以上
      source: spec                      # "spec", "project" (a target of our own) or a URL
      expr: one("kernels.bench", "speed", kernel="rms_norm", impl="ours").ratio
      accept: [0.9, null]               # closed band; null = no bound on that side
      known: 第二次归约的启动开销……       # optional: why it is missed; `make check` then lets it pass

``expr`` is the language of hooks.inline and gives a number. A claim holds on a device when its
value there lies in the band.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import hooks
from hooks import inline

FILE = "claims.yml"
KEYS = ("id", "page", "text", "source", "expr", "accept")
OPTIONAL = ("known",)
HOLDS, FAILS, UNMEASURED = "成立", "不成立", "未测"


class ClaimError(ValueError):
    """claims.yml is wrong; the message lists every fault with its claim."""


@dataclass(frozen=True)
class Claim:
    """One claim. low and high are the closed accepted band, None where open; known: why it fails, if that is accepted."""

    id: str
    page: str
    text: str
    source: str
    expr: str
    low: float | None
    high: float | None
    known: str = ""

    def accepts(self, value: float) -> bool:
        """Whether a value lies in the band."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def band(self) -> str:
        """The band for readers: ≥ 0.9, ≤ 2, 0.8 至 1.2."""
        if self.low is None:
            return f"≤ {self.high:g}"
        return f"≥ {self.low:g}" if self.high is None else f"{self.low:g} 至 {self.high:g}"


@dataclass(frozen=True)
class State:
    """A claim on one device: HOLDS, FAILS or UNMEASURED; value None where unmeasured.

    device: name for readers; slug: file-name form ("" where no device has a record).
    weak: "" or why the value cannot carry a claim yet (stale or smoke records).
    """

    claim: Claim
    slug: str
    device: str
    state: str
    value: float | None = None
    weak: str = ""


def load(path: Path | None = None) -> list[Claim]:
    """The ledger, checked. A project without the file has no claims.

    Raises:
        ClaimError: unreadable YAML, unknown or missing key, duplicate id, unknown page, bad
            expression or unknown experiment in it, bad band.
    """
    path = path or hooks.root() / FILE
    if not path.exists():
        return []
    try:
        items = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClaimError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(items, list):
        raise ClaimError(f"{path.name}: must be a list of claims, each a mapping with {', '.join(KEYS)}")
    claims, faults, seen = [], [], set()
    for number, item in enumerate(items, 1):
        name = f"claim {number}" + (f" ({item['id']})" if isinstance(item, dict) and item.get("id") else "")
        found = _faults(item, path.parent)
        if not found and item["id"] in seen:
            found = ["this id is used before; ids are unique"]
        faults += [f"{path.name}, {name}: {fault}" for fault in found]
        if not found:
            seen.add(item["id"])
            low, high = item["accept"]
            claims.append(Claim(*(item[k].strip() for k in KEYS[:5]), low, high, item.get("known", "").strip()))
    if faults:
        raise ClaimError("\n".join(faults))
    return claims


class Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML's own loader overwrites in silence."""


def _mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str) or key in out:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no text or is given twice", key_node.start_mark)
        out[key] = loader.construct_object(value_node, deep=True)
    return out


Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _faults(item: Any, root: Path) -> list[str]:
    if not isinstance(item, dict):
        return [f"must be a mapping with {', '.join(KEYS)}"]
    out = []
    if unknown := [k for k in item if k not in (*KEYS, *OPTIONAL)]:
        out.append(f"unknown keys {', '.join(unknown)}; allowed: {', '.join((*KEYS, *OPTIONAL))}")
    if absent := [k for k in KEYS if k not in item]:
        out.append(f"lacks {', '.join(absent)}")
    if wrong := [k for k in (*KEYS[:5], *OPTIONAL) if k in item and not (isinstance(item[k], str) and item[k].strip())]:
        out.append(f"{', '.join(wrong)} must be text")
    if out:
        return out
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", item["id"]):
        out.append("the id must consist of a-z, 0-9 and '-', because it becomes an anchor")
    if not re.fullmatch(r"[\w-]+(/[\w-]+)*\.md", item["page"]) or not (root / "docs" / item["page"]).is_file():
        out.append(f"page {item['page']!r} does not exist in docs/")
    if item["source"] not in ("spec", "project") and not re.match(r"https?://", item["source"]):
        out.append(f"source {item['source']!r} must be 'spec', 'project' or a URL")
    band = item["accept"]
    numbers = [v for v in band if v is not None] if isinstance(band, list) and len(band) == 2 else []
    if not numbers or any(isinstance(v, bool) or not isinstance(v, (int, float)) or v - v != 0 for v in numbers):
        out.append(f"accept is {band!r}; write [low, high], null for an open side (not both)")
    elif len(numbers) == 2 and numbers[0] > numbers[1]:
        out.append(f"accept is {band!r}; low is above high")
    try:
        if not inline.experiments_in(item["expr"]):
            out.append("expr reads no experiment; a claim rests on a record")
        # Evaluated with no record at all: this finds unknown names, experiments, tables and columns.
        inline.evaluate(item["expr"], inline.Lookup(lambda id: {}))
    except inline.Unmeasured:
        pass
    except inline.InlineError as error:
        out.append(f"expr: {error}")
    return out


def states(claim: Claim, load: Callable[[str], dict[str, Any]] | None = None) -> list[State]:
    """The claim on every device that has a record of an experiment it reads; one UNMEASURED state if none.

    Args:
        load: experiment id → {slug: Record}; default hooks.records.load.

    Raises:
        ClaimError: the expression fails on a record, or gives no number.
    """
    if load is None:
        from hooks import records

        load = records.load
    devices: dict[str, str] = {}
    for id in inline.experiments_in(claim.expr):
        devices |= {slug: record.device["name"] for slug, record in load(id).items()}
    out = []
    for slug in sorted(devices, key=lambda s: (s == "cpu", s)):
        lookup = inline.Lookup(load, device=slug)
        try:
            value = inline.evaluate(claim.expr, lookup)
        except inline.Unmeasured:
            out.append(State(claim, slug, devices[slug], UNMEASURED))
            continue
        except inline.InlineError as error:
            if any(r.mode == "smoke" for r in lookup.used):  # it has other rows than a full run
                out.append(State(claim, slug, devices[slug], UNMEASURED, weak="冒烟"))
                continue
            raise ClaimError(f"{FILE}, {claim.id}, on {slug}: {error}") from error
        if isinstance(value, (bool, str)):
            raise ClaimError(f"{FILE}, {claim.id}: expr gives {value!r}; it must give a number (without a format filter)")
        weak = "冒烟" if any(r.mode == "smoke" for r in lookup.used) else "过期" if any(r.stale for r in lookup.used) else ""
        # Smoke settings show that code runs, nothing more; they neither prove nor refute.
        state = UNMEASURED if weak == "冒烟" else HOLDS if claim.accepts(value) else FAILS
        out.append(State(claim, slug, devices[slug], state, value, weak))
    return out or [State(claim, "", "", UNMEASURED)]
