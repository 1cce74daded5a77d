"""The comparison of ``pareto`` at 1×16384.

    python -m snippets.checkpointing.long_16k            # a CUDA GPU with 130 GiB, about 8 minutes
    python -m snippets.checkpointing.long_16k --smoke
"""

from __future__ import annotations

from snippets.checkpointing import pareto
from snippets.measure import Tables, cli

EXPERIMENT = {
    "title": "1×16384 的显存与时间",
    "needs": "cuda",
    "memory_gib": 130,
    "minutes": 8,
    "full": {
        "size": "8b", "layers": 36, "cost_rounds": 10,
        "cases": [[1, 16384, 3, [
            "hf none", "hf full", "hf every2", "hf selective", "liger none", "liger full", "liger every2", "liger selective",
            "ours none", "ours full", "ours keep", "ours plan 17", "ours plan 17 host", "ours plan 34",
        ]]],
        "compiled": ["compiled 0.5 flops", "compiled 0 flops"],
    },
    "smoke": {
        "size": "tiny", "layers": 2, "cost_rounds": 5, "cases": [[1, 8, 2, ["hf none", "ours keep"]]], "compiled": [],
    },
    "tables": {
        "runs": {
            "batch": "1", "sequence": "1", "recipe": "", "family": "", "kernels": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms",
            "activation_gib": "GiB", "host_gib": "GiB", "time_ratio": "1", "memory_ratio": "1", "fits_80gb": "", "dominated_by": "", "predicted_ms": "ms", "predicted_gib": "GiB",
            "ms_error": "1", "gib_error": "1", "stores": "", "loss": "1", "failed": "",
        },
        "visits": {"batch": "1", "sequence": "1", "recipe": "", "visit": "1", "median_ms": "ms"},
        "fixed": {"part": "", "gib": "GiB"},
    },
}  # fmt: skip


def measure(**settings) -> Tables:
    """Settings and tables are those of ``pareto.measure``."""
    return pareto.measure(**settings)


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
