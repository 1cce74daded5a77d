"""The comparison of ``pareto`` at 1×1024, eager and under a CUDA graph: where the host is what one waits for.

    python -m snippets.checkpointing.short_sequence            # a CUDA GPU with 80 GiB, about 2 minutes
    python -m snippets.checkpointing.short_sequence --smoke
"""

from __future__ import annotations

from snippets.checkpointing import pareto
from snippets.measure import Tables, cli

EXPERIMENT = {
    "title": "1×1024：eager 与 CUDA Graph",
    "needs": "cuda",
    "memory_gib": 80,
    "minutes": 2,
    "full": {
        "size": "8b", "layers": 36, "shapes": [[1, 1024]], "steps": 10, "cost_rounds": 10,
        "recipes": [
            "hf none", "hf none under graph", "hf full", "hf full under graph", "hf selective", "hf selective under graph",
            "ours none", "ours none under graph", "ours full", "ours full under graph", "ours keep", "ours keep under graph",
        ],
        "compiled": [],
    },
    "smoke": {
        "size": "tiny", "layers": 2, "shapes": [[1, 8]], "steps": 2, "cost_rounds": 5, "recipes": ["hf none", "ours keep"], "compiled": [],
    },
    "tables": {
        "runs": {
            "batch": "1", "sequence": "1", "recipe": "", "family": "", "kernels": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms",
            "activation_gib": "GiB", "time_ratio": "1", "memory_ratio": "1", "fits_80gb": "", "dominated_by": "", "predicted_ms": "ms", "predicted_gib": "GiB",
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
