"""The ladder of ``decode`` with ``max-autotune`` in it, whose tuning takes minutes: one sequence at a context of 512.

    python -m snippets.cuda_graph.decode_autotune            # a CUDA GPU with 40 GiB
    python -m snippets.cuda_graph.decode_autotune --smoke
"""

from __future__ import annotations

from snippets.cuda_graph import decode
from snippets.measure import Tables, cli

EXPERIMENT = {
    "title": "decode 与 max-autotune，batch 1、上下文 512",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 6,
    "full": {
        "size": "8b", "layers": 36, "tokens": 24,
        "cases": [
            [1, 512, ["hf graph", "hf max-autotune", "ours graph"]],
        ],
    },
    "smoke": {"size": "tiny", "layers": 1, "tokens": 3, "cases": [[1, 6, ["hf eager", "hf max-autotune", "ours eager"]]]},
    "tables": {
        "steps": {
            "batch": "1", "context": "1", "path": "", "median_ms": "ms", "p20_ms": "ms", "p80_ms": "ms", "tokens_per_s": "1/s", "needed_gb": "GB",
            "tb_per_s": "TB/s", "of_copy": "1", "prepare_s": "s", "failed": "",
        },
        "memory": {"what": "", "tb_per_s": "TB/s", "ms": "ms"},
    },
}  # fmt: skip


def measure(**settings) -> Tables:
    """Settings and tables are those of ``decode.measure``."""
    return decode.measure(**settings)


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
