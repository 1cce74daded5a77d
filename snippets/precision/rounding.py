"""The yardstick at full depth: how far does mere rounding drive two runs of Qwen3-8B apart?

transformers' own modules are trained twice with the set-up of ``loop`` (same data, order and
optimiser, 36 layers), the second time from weights of which a random thousandth has its last bit
flipped. What their losses differ by is what no kernel can be blamed for; beside it stands the
difference that our kernels make, from ``training``. A third, shorter run repeats the first one and
has to give the same bits: else the order of the runs, or another process on the device, would be in
the numbers too.

    python -m snippets.precision.rounding [--smoke] [--json FILE]
"""

from __future__ import annotations

from typing import Any

from snippets import qwen3
from snippets.measure import MeasureError, Tables, cli
from snippets.precision import corpus, gate3
from snippets.precision.loop import Run, make, summary_rows, train

EXPERIMENT = {
    "title": "末位扰动能把两次训练推开多远：Qwen3-8B 全 36 层",
    "needs": "cuda",
    "memory_gib": 79,
    "minutes": 7,
    "full": {"model": "8b", "layers": 36, "steps": 1000, "repeated": 50, "tokens": 512, "rate": 1e-4, "warmup": 100, "seed": 0},
    "smoke": {"model": "tiny", "layers": 2, "steps": 20, "repeated": 2, "tokens": 16, "rate": 1e-2, "warmup": 2, "seed": 0},
    "tables": {
        "loss": {"variant": "", "step": "1", "loss": "nat"},
        "summary": {
            "variant": "",
            "first_loss": "nat",
            "last_mean_loss": "nat",
            "paired_first": "nat",
            "paired_mean": "nat",
            "paired_mean_abs": "nat",
            "paired_max_abs": "nat",
            "peak_gib": "GiB",
            "weights": "",
        },
        "repeat": {"steps": "1", "different": "1"},
    },
    "data": ["snippets/precision/data/tokens.npy.xz"],
}  # fmt: skip


def measure(
    *, model: str, layers: int, steps: int, repeated: int, tokens: int, rate: float, warmup: int, seed: int
) -> Tables:
    """Train the baseline, its nudged twin, and the first ``repeated`` steps of the baseline again.

    Returns:
        ``loss`` per step; ``summary`` as in ``training``, paired with "hf"; ``repeat``: of the
        repeated steps, how many losses differ in any bit.
    """
    if not 0 < repeated <= steps:
        raise MeasureError(f"repeated {repeated} must lie between 1 and steps ({steps})")
    net, vocab = make(model, layers, seed, pretrained=False)
    rows = corpus.sequences("train", steps, tokens, seed=seed, vocab=vocab)

    def run(name: str, count: int, nudged: bool = False) -> Run:
        qwen3.initialize(net, seed)
        if nudged:
            gate3.nudge(net, seed)
        out = train(net, rows[:count], rate=rate, warmup=warmup, name=name)
        if not out.losses.isfinite().all():
            raise MeasureError(f"{name}: the loss became NaN or infinite; lower the rate ({rate})")
        return out

    runs = {"hf": run("hf", steps), "hf_nudged": run("hf_nudged", steps, nudged=True)}
    again = run("hf，重复", repeated)
    different = int((again.losses != runs["hf"].losses[:repeated]).sum())
    loss: list[dict[str, Any]] = [
        {"variant": n, "step": i, "loss": float(x)} for n, r in runs.items() for i, x in enumerate(r.losses, 1)
    ]
    return {
        "loss": loss,
        "summary": summary_rows(runs, "hf", f"随机初始化（seed {seed}）"),
        "repeat": [{"steps": repeated, "different": different}],
    }


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
