"""Does checkpointing change the gradients? Each recipe against the same kernels with everything stored.

Recompute runs the same kernels on the same bits, so the gradients must have the same bits, as long as every kernel
gives the same result twice. Where one doesn't (atomic additions), the un-checkpointed step differs from
itself too; that repetition is the control, and a recipe may differ by no more. Run once in each mode of
``determinism``.

    python -m snippets.checkpointing.agreement            # a CUDA GPU with 100 GiB, about two minutes
    python -m snippets.checkpointing.agreement --smoke
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from snippets.checkpointing.determinism import MODES, algorithms
from snippets.checkpointing.pareto import batches_of, prepare
from snippets.checkpointing.recipes import clean, fixed_bytes, recipe
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "checkpoint 前后的梯度是否逐位相同",
    "needs": "cuda",
    "memory_gib": 100,
    "minutes": 4,
    "full": {
        "size": "8b", "layers": 36, "batch": 1, "sequence": 4096,
        "recipes": {
            "hf": ["full", "every2", "selective"],
            "liger": ["full", "selective"],
            "ours": ["full", "keep", "keep gate+up", "keep q+k+v+h2", "keep ln1+ln2+rope+product", "keep up offload q+gate"],
        },
    },
    "smoke": {
        "size": "tiny", "layers": 2, "batch": 1, "sequence": 8,
        "recipes": {"hf": ["full", "selective"], "ours": ["full", "keep", "keep up offload q+gate"]},
    },
    "tables": {
        "agreement": {
            "kernels": "", "policy": "", "deterministic": "", "parameters": "1", "differing": "1", "difference": "1",
            "control_differing": "1", "control_difference": "1", "loss_equal": "", "ok": "",
        },
    },
}  # fmt: skip

SLACK = 1.5  # of Gate 2: how far an rms may exceed the control's where nothing is deterministic


def gradients(model: torch.nn.Module, name: str, ids: torch.Tensor) -> torch.Tensor:
    """Loss of one step from zero gradients, which are left in the model."""
    clean()
    fixed_bytes(model)
    for p in model.parameters():
        p.grad.zero_()
    with recipe(name, model) as ready:
        return ready.step(ids).clone()


def difference(model: torch.nn.Module, reference: list[torch.Tensor]) -> tuple[int, float]:
    """Number of parameters whose gradient has other bits, and the largest rms(difference) / rms(reference)."""
    count, worst = 0, 0.0
    for p, want in zip(model.parameters(), reference, strict=True):
        if not torch.equal(p.grad, want):
            count += 1
            # In slices: a whole fp32 copy of the embedding's gradient would take 2.3 GiB.
            pairs = list(zip(p.grad.flatten().split(1 << 26), want.flatten().split(1 << 26), strict=True))
            wrong = sum((a.float() - b.float()).square().sum().item() for a, b in pairs)
            size = sum(b.float().square().sum().item() for _, b in pairs)
            ratio = (wrong / max(size, 1e-300)) ** 0.5
            worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return count, worst


def measure(*, size: str, layers: int, batch: int, sequence: int, recipes: dict[str, list[str]]) -> Tables:
    """Compare every policy with "none" under the same kernels.

    Args:
        recipes: kernels → policies, as in ``recipes``.

    Returns:
        ``agreement``: parameters whose gradient differs in any bit, the largest relative rms difference, the same two for
        the un-checkpointed step against its own repetition, and the verdict.
    """
    if not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    model = prepare(size, layers)
    (ids,) = batches_of(model, batch, sequence, 1)
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        for kernels, policies in recipes.items():
            with algorithms(mode):
                progress(f"{kernels}, deterministic: {mode}")
                loss = gradients(model, f"{kernels} none", ids)
                reference = [p.grad.clone() for p in model.parameters()]
                control = []
                for _ in range(3):
                    gradients(model, f"{kernels} none", ids)
                    control.append(difference(model, reference))
                control_count, control_worst = max(c for c, _ in control), max(w for _, w in control)
                for policy in policies:
                    got = gradients(model, f"{kernels} {policy}", ids)
                    count, worst = difference(model, reference)
                    rows.append({
                        "kernels": kernels, "policy": policy, "deterministic": mode, "parameters": len(reference),
                        "differing": count, "difference": worst if math.isfinite(worst) else None, "control_differing": control_count,
                        "control_difference": control_worst, "loss_equal": bool(got == loss),
                        "ok": bool(got == loss) and (count == 0 if control_count == 0 else worst <= SLACK * control_worst),
                    })  # fmt: skip
                del reference
    return {"agreement": rows}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
