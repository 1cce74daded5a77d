"""Gate 3 on synthetic curves with known faults, and on a real small training."""

import random

import pytest

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
NUDGED = curve(0, twin=1)


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


def test_a_nan_names_its_step():
    bad = curve(0)
    bad[123] = float("nan")
    v = judge(bad)
    assert not v.ok and "123" in v.failed[0].text


@pytest.mark.parametrize("call, said", [
    (lambda: gate3.judge(SEEDS[0][:5], SEEDS[0], SEEDS), "equal lengths"),
    (lambda: gate3.judge(SEEDS[0], SEEDS[0], SEEDS[:2]), "at least 3"),
    (lambda: gate3.judge([], SEEDS[0], SEEDS), "empty"),
    (lambda: gate3.windows([1.0], 5), "fewer than one window"),
])  # fmt: skip
def test_unusable_input_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_judge_runs_trains_the_candidate_with_the_first_seed():
    asked = []

    def run(variant, seed):
        asked.append((variant, seed))
        return curve(seed, twin={"baseline": None, "candidate": 3, "nudged": 1}[variant])

    assert gate3.judge_runs(run, [0, 1, 2]).ok
    assert ("candidate", 0) in asked and ("nudged", 0) in asked and ("baseline", 2) in asked


def test_a_small_model_trained_with_a_wrong_loss_is_rejected_at_step_0_and_left_as_it_was():
    trainer = matrix.Trainer([0, 1, 2], steps=10, tokens=24)
    good = trainer.verdict("rope", references.rope)
    assert good.ok, good.failed
    bad = trainer.verdict("causal_lm_loss", mutants.loss_without_shift)
    assert "第 0 步" in [f.check for f in bad.failed]
    assert trainer.run(0) == trainer.baselines[0]
