"""The seed band: faults are what their names say and leave no trace; the verdicts separate them."""

import pytest
import torch

from snippets import qwen3
from snippets.measure import check_tables
from snippets.precision import band, corpus, loop

FAULTS = ["eps_outside", "gain_frozen", "ce_denominator", "label_shift", "gelu"]


@pytest.fixture(scope="module")
def rows():
    return corpus.sequences("train", 4, 24, seed=0, vocab=qwen3.TINY["vocab_size"])


def labelled(rows, ignored):
    labels = rows.clone()
    labels[:, :ignored] = -100
    return labels


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_undone_even_after_an_error(name, rows):
    model = qwen3.tiny()
    before = loop.forward(model, rows, rows)
    with pytest.raises(RuntimeError, match="inside"), band.fault(name, model):
        raise RuntimeError("inside")
    after = loop.forward(model, rows, rows)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss.detach())


@pytest.mark.parametrize("name", ["eps_outside", "ce_denominator", "label_shift", "gelu"])
def test_fault_changes_the_loss(name, rows):
    model = qwen3.tiny()
    labels = labelled(rows, 6)
    right = float(loop.forward(model, rows, labels).loss.detach())
    with band.fault(name, model):
        wrong = float(loop.forward(model, rows, labels).loss.detach())
    assert wrong != right


def test_gain_frozen_keeps_the_forward_and_loses_the_gradient(rows):
    model = qwen3.tiny()
    right = loop.forward(model, rows, rows)
    right.loss.backward()
    assert model.model.norm.weight.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)
    with band.fault("gain_frozen", model):
        wrong = loop.forward(model, rows, rows)
        wrong.loss.backward()
    assert torch.allclose(wrong.logits, right.logits, atol=1e-6)
    assert model.model.norm.weight.grad is None and model.model.layers[0].self_attn.q_norm.weight.grad is None
    assert model.lm_head.weight.grad is not None


def test_ce_denominator_divides_by_every_label(rows):
    model = qwen3.tiny()
    labels = labelled(rows, 7)
    right = float(loop.forward(model, rows, labels).loss.detach())
    with band.fault("ce_denominator", model):
        wrong = float(loop.forward(model, rows, labels).loss.detach())
    # 24 positions, of which 24 - 7 have a label that counts
    assert wrong == pytest.approx(right * 17 / 24, rel=1e-5)


def test_label_shift_predicts_the_token_after_next(rows):
    model = qwen3.tiny()
    with band.fault("label_shift", model):
        wrong = float(loop.forward(model, rows, rows).loss.detach())
    with torch.no_grad():
        logits = model(rows).logits[:, :-2]
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 512), rows[:, 2:].reshape(-1))
    assert wrong == pytest.approx(float(expected), rel=1e-5)


def test_eps_outside_is_invisible_at_normal_scale_and_large_on_tiny_rows():
    model = qwen3.tiny()
    norm = model.model.norm
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with band.fault("eps_outside", model):
        wrong = [norm(x * scale) for scale in (1.0, 1e-3)]
    right = [norm(x * scale) for scale in (1.0, 1e-3)]
    relative = [float(((w - r) / r).detach().abs().max()) for w, r in zip(wrong, right, strict=True)]
    assert relative[0] < 2e-3 and relative[1] > 0.2


def test_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="typo"), band.fault("typo", qwen3.tiny()):
        pass


def test_curve_keeps_the_mean_and_the_last_step():
    points = band.curve_rows("hf", "baseline", 0, torch.arange(1000.0))
    assert len(points) == 100 and points[-1]["step"] == 1000
    assert points[0]["loss"] == pytest.approx(4.5)
    short = band.curve_rows("hf", "baseline", 0, torch.tensor([1.0, 2.0, 3.0]))
    assert [(p["step"], p["loss"]) for p in short] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def noisy(count, steps=200, seed=0):
    """Baseline-like curves: a common decay, seed noise, and per-step noise."""
    g = torch.Generator().manual_seed(seed)
    decay = 6 + 6 * torch.exp(-torch.arange(steps) / 60.0)
    return decay + 0.02 * torch.randn(count, 1, generator=g) + 0.1 * torch.randn(count, steps, generator=g)


def judged(candidate, seeds, nudged):
    return band.verdict_row("run", "control", candidate.tolist(), seeds.tolist(), [n.tolist() for n in nudged], 20)


def test_verdict_accepts_rounding_noise_and_names_each_reason():
    seeds = noisy(5)
    g = torch.Generator().manual_seed(1)
    *nudged, candidate = (seeds[0] + 2e-3 * torch.randn(200, generator=g) for _ in range(5))
    for run in (*nudged, candidate):
        run[0] = seeds[0, 0]
    good = judged(candidate, seeds, nudged)
    assert good["accepted"] and good["outside"] == 0 and 0.8 < good["paired_ratio"] < 1.25
    assert abs(good["paired_mean"]) < good["drift_limit"]

    first = candidate.clone()
    first[0] *= 1.002
    assert "首步" in judged(first, seeds, nudged)["reason"]

    drift = judged(candidate + torch.linspace(0, 0.05, 200), seeds, nudged)
    assert not drift["accepted"] and "平均 |差|" in drift["reason"] and "首步" not in drift["reason"]
    assert drift["outside"] == 0  # inside the band all the same: only the paired difference sees it

    far = judged(candidate * 0.9, seeds, nudged)
    assert far["outside"] > 0.5 and "窗口" in far["reason"]

    broken = candidate.clone()
    broken[50:] = float("nan")
    nan = judged(broken, seeds, nudged)
    assert not nan["accepted"] and "NaN" in nan["reason"] and nan["paired_mean"] is None and nan["outside"] is None


def test_measure_accepts_the_control_and_rejects_both_faults():
    tables = band.measure(**band.EXPERIMENT["smoke"])
    check_tables(band.EXPERIMENT["tables"], tables)
    verdicts = {r["run"]: r for r in tables["verdict"]}
    assert all(verdicts[f"hf_nudged_{k}"]["accepted"] for k in range(3))
    assert not verdicts["ce_denominator"]["accepted"] and "首步" in verdicts["ce_denominator"]["reason"]
    assert not verdicts["label_shift"]["accepted"]
    assert {(r["run"], r["seed"]) for r in tables["curve"] if r["kind"] == "baseline"} == {("hf", s) for s in (0, 1, 2)}
    assert [r["step"] for r in tables["band"]] == [4, 8]
    assert all(r["low"] < r["mean"] < r["high"] for r in tables["band"])
