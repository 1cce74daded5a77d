"""Gate 3 on synthetic curves with known faults, and on a real small training."""

import random

import pytest
import torch

from snippets import qwen3
from snippets.precision import gate3, matrix, mutants, references

STEPS = 600


def curve(seed, drift=0.0, noise=0.02, start=0.0, twin=None):
    """An exponential decay with data noise per seed; ``twin`` adds tiny noise of its own, as rounding does."""
    rng, own = random.Random(seed), random.Random(twin)
    out = []
    for t in range(STEPS):
        x = 2 + 4 * 0.99**t + rng.gauss(0, noise) + drift * t / STEPS + (start if t == 0 else 0)
        out.append(x + (own.gauss(0, 2e-4) if twin is not None and t else 0))
    return out


SEEDS = [curve(s) for s in range(4)]
NUDGED = [curve(0, twin=t) for t in (100, 101, 102)]


def judge(candidate, **options):
    return gate3.judge(candidate, SEEDS[0], SEEDS, nudged=NUDGED, **options)


@pytest.mark.parametrize("twin", range(2, 12))
def test_a_run_that_differs_by_rounding_is_accepted(twin):
    v = judge(curve(0, twin=twin))
    assert v.ok, v.failed


@pytest.mark.parametrize("check, candidate", [
    ("第 0 步", curve(0, start=0.02, twin=2)),
    ("配对差的大小", curve(0, drift=0.01, twin=2)),
    ("配对差的漂移", curve(0, drift=0.2, twin=2)),
    ("种子带", curve(0, drift=0.2, twin=2)),
])  # fmt: skip
def test_each_question_sees_its_fault(check, candidate):
    v = judge(candidate)
    assert check in [f.check for f in v.failed]


def wander(seed, sd=3e-4):
    """SEEDS[0] plus a random walk: how a run moves away from its twin once rounding has parted them."""
    own, at, out = random.Random(seed), 0.0, []
    for t, x in enumerate(SEEDS[0]):
        at += own.gauss(0, sd) if t else 0.0
        out.append(x + at)
    return out


def test_wandering_differences_are_no_drift_by_the_yardstick_of_nudged_runs():
    def drifts(nudged):
        verdicts = [gate3.judge(wander(s), SEEDS[0], SEEDS, nudged=nudged) for s in range(10, 50)]
        return sum("配对差的漂移" in [f.check for f in v.failed] for v in verdicts)

    # Windows of a wandering difference are correlated, so their standard error is too small a limit.
    assert drifts([wander(s) for s in range(1, 5)]) <= 2 < drifts(())


def test_a_nan_names_its_step():
    bad = curve(0)
    bad[123] = float("nan")
    v = judge(bad)
    assert not v.ok and "123" in v.failed[0].text


@pytest.mark.parametrize("call, said", [
    (lambda: gate3.judge(SEEDS[0][:5], SEEDS[0], SEEDS), "equal lengths"),
    (lambda: gate3.judge(SEEDS[0], SEEDS[0], SEEDS[:2]), "at least 3"),
    (lambda: gate3.judge([], SEEDS[0], SEEDS), "empty"),
    (lambda: gate3.judge(SEEDS[0], SEEDS[0], SEEDS, nudged=NUDGED[:2]), "at least 3 nudged"),
    (lambda: gate3.judge(SEEDS[0], SEEDS[0], SEEDS, nudged=[SEEDS[0]] * 3), "equal the baseline"),
    (lambda: gate3.windows([1.0], 5), "fewer than one window"),
])  # fmt: skip
def test_unusable_input_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_judge_runs_trains_the_candidate_with_the_first_seed():
    asked = []

    def run(variant, seed):
        asked.append((variant, seed))
        return curve(seed, twin={"baseline": None, "candidate": 3}.get(variant, variant))

    assert gate3.judge_runs(run, [0, 1, 2]).ok
    assert ("candidate", 0) in asked and ("nudged 2", 0) in asked and ("baseline", 2) in asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nudge_moves_a_thousandth_of_the_weights_by_one_bit(dtype):
    model, plain = qwen3.tiny(dtype=dtype), qwen3.tiny(dtype=dtype)
    gate3.nudge(model, 0)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    changed = sum(int((a != b).sum()) for a, b in pairs)
    total = sum(a.numel() for a, _ in pairs)
    assert 0.5e-3 < changed / total < 2e-3
    for a, b in pairs:
        assert ((a - b).abs() <= torch.finfo(dtype).eps * b.abs()).all()


def test_a_small_model_trained_with_a_wrong_loss_is_rejected_at_step_0_and_left_as_it_was():
    trainer = matrix.Trainer([0, 1, 2], steps=10, tokens=24)
    good = trainer.verdict("rope", references.rope)
    assert good.ok, good.failed
    bad = trainer.verdict("causal_lm_loss", mutants.loss_without_shift)
    assert "第 0 步" in [f.check for f in bad.failed]
    assert trainer.run(0) == trainer.baselines[0]
