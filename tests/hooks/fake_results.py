"""A small project and records for the tests of what the pages call."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

BENCH = '''
EXPERIMENT = {
    "title": "算子带宽 <A>", "needs": "cuda", "memory_gib": 8, "minutes": 2,
    "full": {"rows": [4096]}, "smoke": {"rows": [64]},
    "tables": {
        "speed": {"kernel": "", "impl": "", "rows": "行", "gbps": "GB/s", "ratio": "1", "ok": ""},
        "log": {"text": ""},
    },
}

def measure(*, rows):
    return {}
'''

SPEED = [
    {"kernel": "rms_norm", "impl": "ours", "rows": 4096, "gbps": 3911.26, "ratio": 0.942, "ok": True},
    {"kernel": "rms_norm", "impl": "eager", "rows": 4096, "gbps": 1204.5, "ratio": 0.29, "ok": True},
    {"kernel": "swiglu", "impl": "ours", "rows": 4096, "gbps": 4001.0, "ratio": 0.964, "ok": False},
    {"kernel": "swiglu", "impl": "eager", "rows": 4096, "gbps": None, "ratio": None, "ok": False},
]


@dataclass
class FakeRecord:
    """The attributes of hooks.records.Record that rendering reads."""

    experiment: str = "kernels.bench"
    mode: str = "full"
    settings: dict[str, Any] = field(default_factory=lambda: {"rows": [4096]})
    device: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = "0123456789abcdef"
    dirty: bool = False
    started: datetime = datetime(2026, 11, 30, 8, 0, tzinfo=UTC)
    seconds: float = 75.2
    digest: str = "sha256:" + "ab" * 32
    stale: bool = False
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def path(self):
        return f"records/{self.device['slug']}/{self.experiment}.json"


def record(slug="nvidia-h200", name="NVIDIA H200", **changes) -> FakeRecord:
    device = {"name": name, "slug": slug, "memory_gib": 139.8, "capability": "9.0", "sm_count": 132, "driver": "570.1"}
    versions = {"python": "3.12.3", "torch": "2.11.0", "cuda": "12.9", "triton": "3.6.0", "transformers": "5.17.0",
                "liger-kernel": "0.8.5"}  # fmt: skip
    tables = {"speed": [dict(r) for r in SPEED], "log": [{"text": "a <b>"}, {"text": "--8<-- \"x\"\n\n[[ y ]]"}]}
    return FakeRecord(**({"device": device, "versions": versions, "tables": tables} | changes))


def project(path):
    """Write the project below `path`: one experiment, two pages."""
    (path / "snippets/kernels").mkdir(parents=True)
    (path / "snippets/kernels/bench.py").write_text(BENCH, encoding="utf-8")
    (path / "docs").mkdir()
    (path / "docs/index.md").write_text("# x\n", encoding="utf-8")
    (path / "docs/precision-alignment.md").write_text("# y\n", encoding="utf-8")
    return path
