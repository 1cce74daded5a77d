"""What a gate says: findings, and the verdict that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Finding:
    """One check. ``value``/``limit`` are ratios or errors; ``text`` (Chinese) says what happened."""

    check: str
    ok: bool
    text: str
    case: str = ""
    value: float | None = None
    limit: float | None = None


@dataclass
class Verdict:
    """What a gate says: passed when no finding failed and something was checked."""

    gate: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gradcheck: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(f.ok for f in self.findings)

    @property
    def failed(self) -> list[Finding]:
        return [f for f in self.findings if not f.ok]

    def worst(self) -> Finding | None:
        """The failing finding furthest over its limit, or the passing one nearest to it."""

        def over(f: Finding) -> tuple[bool, float]:
            r = f.value / f.limit if f.value is not None and f.limit else 0.0
            return (not f.ok, r if math.isfinite(r) else math.inf)

        return max(self.findings, key=over, default=None)
