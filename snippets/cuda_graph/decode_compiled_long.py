"""The ladder of ``decode`` with ``reduce-overhead`` in it, at contexts of 4096 and 16384.

    python -m snippets.cuda_graph.decode_compiled_long            # a CUDA GPU with 130 GiB
    python -m snippets.cuda_graph.decode_compiled_long --smoke
"""

from __future__ import annotations

from snippets.cuda_graph import decode
from snippets.measure import Tables, cli

EXPERIMENT = {
    "title": "decode 与 reduce-overhead，上下文 4096 与 16384",
    "needs": "cuda",
    "memory_gib": 130,
    "minutes": 8,
    "full": {
        "size": "8b", "layers": 36, "tokens": 24,
        "cases": [
            [1, 4096, ["hf graph", "hf reduce-overhead", "ours graph"]],
            [8, 4096, ["hf graph", "hf reduce-overhead", "ours graph"]],
            [32, 4096, ["hf graph", "hf reduce-overhead", "ours graph"]],
            [1, 16384, ["hf graph", "hf reduce-overhead", "ours graph"]],
            [8, 16384, ["hf graph", "hf reduce-overhead", "ours graph"]],
            [32, 16384, ["hf graph", "hf reduce-overhead", "ours graph"]],
        ],
    },
    "smoke": {"size": "tiny", "layers": 1, "tokens": 3, "cases": [[1, 6, ["hf eager", "hf reduce-overhead", "ours eager"]]]},
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
