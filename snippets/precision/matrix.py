"""Proof of the gates: every mutant and every control against every gate.

A gate that accepts everything also accepts correct kernels, and one that rejects everything also
rejects broken ones; only both lists together say something. ``caught_by`` is the first gate that
rejects. A mutant is as expected when that is the gate built for its kind of fault; a control when
no gate rejects it.

Gate 3 trains a small Qwen3 (2 layers) with the kernel in place, on the article's corpus, against
several seeds of the reference. It is run for the mutants and controls named in ``trained``: it
sees what moves a loss, which is less than the other two see.

    python -m snippets.precision.matrix [--smoke] [--json FILE]
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from snippets import qwen3
from snippets.measure import MeasureError, Tables, cli, device, progress, seeded
from snippets.precision import corpus, gate1, gate2, gate3
from snippets.precision.cases import OPS, adapt
from snippets.precision.controls import Control, all_controls, public_faults
from snippets.precision.judge import forget
from snippets.precision.mutants import MUTANTS, Mutant
from snippets.precision.verdict import Finding, Verdict

EXPERIMENT = {
    "title": "变异 × 关卡：每个故意写错的 kernel 被哪一关拒绝",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 5,
    "full": {
        "only": [],
        "controls": True,
        "trained": ["rms_eps_outside", "rms_no_weight_grad", "swiglu_wrong_derivative", "swiglu_gelu",
                    "rope_backward_sign", "ce_mean_over_all", "loss_without_shift", "rms_one_rounding",
                    "swiglu_no_middle_rounding", "rope_one_rounding"],
        "seeds": [0, 1, 2, 3],
        "steps": 300,
        "tokens": 128,
        "sizes": "",
    },
    "smoke": {
        "only": ["swiglu_wrong_derivative", "swiglu_sigmoid_bf16", "rope_ignores_batch", "ce_mean_over_all",
                 "loss_without_shift", "swiglu_no_middle_rounding", "rope_one_rounding", "ce_online"],
        "controls": True,
        "trained": ["loss_without_shift", "rope_one_rounding"],
        "seeds": [0, 1, 2],
        "steps": 12,
        "tokens": 24,
        "sizes": "tiny",
    },
    "tables": {
        "matrix": {
            "kind": "", "id": "", "op": "", "what": "", "source": "", "expected": "", "gate1": "", "gate2": "",
            "gate3": "", "caught_by": "", "ok": "", "worst": "", "ratio": "1", "checks": "1", "seconds": "s",
        },
        "summary": {"kind": "", "count": "1", "as_expected": "1", "caught": "1", "accepted": "1"},
    },
    "data": ["snippets/precision/data/tokens.npy.xz"],
}  # fmt: skip

NAMES = {"gate1": "Gate 1", "gate2": "Gate 2", "gate3": "Gate 3", "": "无"}
MODEL = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
RATE, WARMUP = 1e-3, 20
NUDGES, NUDGED = 4, 1e-2  # nudged runs, and the share of weights flipped: the model is small


# ---------------------------------------------------------------------- Gate 3: training


@contextlib.contextmanager
def fitted(op: str, kernel: Callable[..., Any], model: torch.nn.Module) -> Iterator[None]:
    """Run the body with ``kernel`` as this model's operator; the model is left as it was.

    Raises:
        ValueError: an operator that the model does not have.
    """
    fn, _, _ = adapt(OPS[op], kernel)
    undo: list[Callable[[], None]] = []

    def put(module: torch.nn.Module, name: str, value: Any) -> None:
        module.__dict__[name] = value
        undo.append(lambda: module.__dict__.pop(name, None))

    for m in model.modules():
        kind = type(m).__name__
        if op in ("rms_norm", "head_norm") and kind == "Qwen3RMSNorm":
            put(m, "forward", functools.partial(lambda m, x: fn(x, m.weight, eps=m.variance_epsilon), m))
        elif op == "swiglu" and kind == "Qwen3MLP":
            put(m, "forward", functools.partial(lambda m, x: m.down_proj(fn(m.gate_proj(x), m.up_proj(x))), m))
        elif op == "rope" and kind == "Qwen3Attention":
            # The attention takes the function from its module's globals; give this object's copy another.
            plain = type(m).forward
            scope = {**plain.__globals__, "apply_rotary_pos_emb": lambda q, k, c, s, **_: fn(q, k, c, s)}
            own = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
            own.__kwdefaults__ = plain.__kwdefaults__
            put(m, "forward", types.MethodType(own, m))
    if op in ("cross_entropy", "causal_lm_loss"):

        def loss(logits, labels, vocab_size, **_):
            if op == "causal_lm_loss":
                return fn(logits, labels)
            shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
            return fn(logits.reshape(-1, vocab_size), shifted.reshape(-1), ignore_index=-100)

        old = model.__dict__.get("_loss_function")
        model.__dict__["_loss_function"] = loss
        undo.append(lambda: model.__dict__.pop("_loss_function") if old is None else model.__dict__.update(_loss_function=old))
    if not undo:
        raise ValueError(f"the model has no place for {op!r}")
    try:
        yield
    finally:
        for step in undo:
            step()


class Trainer:
    """Trains the small model; baselines are trained once and remembered."""

    def __init__(self, seeds: list[int], steps: int, tokens: int) -> None:
        self.seeds, self.steps, self.tokens = seeds, steps, tokens
        self.dtype = torch.bfloat16 if device().type == "cuda" else torch.float32

    def run(self, seed: int, install: Callable[[torch.nn.Module], Any] = lambda m: contextlib.nullcontext(), nudge: int | None = None) -> list[float]:
        """One run: losses per step. Same seed, same initial weights and same data; ``nudge`` seeds flipped last bits."""
        seeded(seed)
        dev = device()
        model = qwen3.tiny(dtype=self.dtype, device=dev, seed=seed, **MODEL)
        if nudge is not None:
            gate3.nudge(model, nudge, NUDGED)
        rows = corpus.sequences("train", self.steps, self.tokens, seed=seed, vocab=MODEL["vocab_size"]).to(dev)
        labels = rows.clone()
        labels[:, : self.tokens // 7] = -100  # as a prompt's: without ignored labels a wrong denominator is invisible
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
        losses = torch.empty(self.steps, device=dev)
        with install(model):
            for i in range(self.steps):
                for group in optimizer.param_groups:
                    group["lr"] = RATE * min(1.0, (i + 1) / WARMUP)
                loss = model(input_ids=rows[i : i + 1], labels=labels[i : i + 1], use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses[i] = loss.detach()
        return losses.float().cpu().tolist()

    @functools.cached_property
    def baselines(self) -> list[list[float]]:
        return [self.run(s) for s in self.seeds]

    @functools.cached_property
    def nudged(self) -> list[list[float]]:
        return [self.run(self.seeds[0], nudge=k) for k in range(NUDGES)]

    def verdict(self, op: str, kernel: Callable[..., Any]) -> Verdict:
        """Gate 3 on one kernel."""
        try:
            curve = self.run(self.seeds[0], lambda m: fitted(op, kernel, m))
        except RuntimeError as e:
            return Verdict("gate3", [Finding("训练能跑", False, f"{type(e).__name__}: {str(e)[:120]}")])
        return gate3.judge(curve, self.baselines[0], self.baselines, nudged=self.nudged, window=20)


# ---------------------------------------------------------------------------- experiment


def row(entry: Mutant | Control, trainer: Trainer | None, dev: torch.device, sizes: str = "") -> dict[str, Any]:
    """One line of the matrix."""
    start = time.perf_counter()
    op, allow = OPS[entry.op], getattr(entry, "allow", ())
    installed = entry.installed() if isinstance(entry, Control) else contextlib.nullcontext()
    with installed:
        verdicts = {g.__name__.rsplit(".", 1)[-1]: g.check(op, entry.kernel, dev, allow=allow, level=sizes or None) for g in (gate1, gate2)}
        if trainer is not None:
            verdicts["gate3"] = trainer.verdict(entry.op, entry.kernel)
    caught = next((n for n, v in verdicts.items() if not v.ok), "")
    # The clearest sign: the failure furthest over its limit, or for an accepted kernel the closest call.
    shown = verdicts[caught] if caught else verdicts["gate2"]
    worst = shown.worst()
    ratio = worst.value / worst.limit if worst and worst.value is not None and worst.limit else None
    mutant = isinstance(entry, Mutant)
    return {
        "kind": "变异" if mutant else "对照",
        "id": entry.id,
        "op": entry.op,
        "what": entry.what,
        "source": entry.source if mutant else "",
        "expected": NAMES[entry.expected] if mutant else "全部通过",
        **{g: ("通过" if verdicts[g].ok else "拒绝") if g in verdicts else "未跑" for g in ("gate1", "gate2", "gate3")},
        "caught_by": NAMES[caught],
        "ok": caught == (entry.expected if mutant else ""),
        "worst": f"{worst.check}：{worst.text}" + (f"（{worst.case}）" if worst.case else "") if worst else "",
        "ratio": ratio if ratio is not None and ratio < 1e300 else None,
        "checks": sum(len(v.findings) for v in verdicts.values()),
        "seconds": round(time.perf_counter() - start, 2),
    }


def measure(
    *, only: list[str], controls: bool, trained: list[str], seeds: list[int], steps: int, tokens: int, sizes: str
) -> Tables:
    """Run the matrix.

    Args:
        only: ids to run; empty for all that this device can run.
        controls: whether controls are run besides mutants.
        sizes: "tiny" for the small inputs of a smoke run (fp32 and fp64 only); "" for the device's own.
        trained: ids that also get Gate 3; ``seeds``, ``steps``, ``tokens``: its training runs.

    Returns:
        "matrix", one row per kernel, and "summary", counts per kind.
    """
    dev = device()
    entries: list[Mutant | Control] = [*MUTANTS, *public_faults(), *(all_controls() if controls else [])]
    unknown = (set(only) | set(trained)) - {e.id for e in entries}
    if unknown:
        raise MeasureError(f"unknown mutants or controls: {', '.join(sorted(unknown))}")
    entries = sorted((e for e in entries if not only or e.id in only), key=lambda e: isinstance(e, Control))
    trainer = Trainer(seeds, steps, tokens)
    rows = []
    for i, entry in enumerate(entries):
        progress(entry.id, i + 1, len(entries))
        rows.append(row(entry, trainer if entry.id in trained else None, dev, sizes))
    forget()
    summary = []
    for kind in ("变异", "对照"):
        mine = [r for r in rows if r["kind"] == kind]
        accepted = sum(r["caught_by"] == NAMES[""] for r in mine)
        summary.append({"kind": kind, "count": len(mine), "as_expected": sum(r["ok"] for r in mine),
                        "caught": len(mine) - accepted, "accepted": accepted})  # fmt: skip
    return {"matrix": rows, "summary": summary}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
