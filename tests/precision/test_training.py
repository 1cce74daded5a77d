"""Training with and without the kernels, and the business comparison, on the tiny model on the CPU."""

import pytest
import torch

from snippets import qwen3
from snippets.measure import MeasureError, check_tables
from snippets.precision import corpus, loop, training


@pytest.fixture(scope="module")
def rows():
    return corpus.sequences("train", 6, 24, seed=0, vocab=qwen3.TINY["vocab_size"])


def silent(*_):
    pass


def test_evaluate_is_the_models_log_probability(rows):
    model = qwen3.tiny(seed=4).eval()
    got = training.evaluate(model, rows, batch=4)
    with torch.no_grad():
        logprob = model(rows).logits[:, :-1].double().log_softmax(-1)
    true = logprob.gather(-1, rows[:, 1:, None])[..., 0]
    assert got.logprob.shape == got.top1.shape == (6, 23)
    assert torch.allclose(got.logprob.double(), true, atol=1e-5)
    assert torch.equal(got.top1, logprob.argmax(-1))
    assert got.loss == pytest.approx(-float(true.mean()), rel=1e-5)


def test_business_row_reports_the_differences():
    a = training.Evaluation(2.0, torch.tensor([[-1.0, -2.0]]), torch.tensor([[3, 4]]))
    b = training.Evaluation(2.5, torch.tensor([[-1.5, -1.9]]), torch.tensor([[3, 5]]))
    row = training.business_row("x", a, b)
    assert row["tokens"] == 2 and row["top1_agreement"] == 0.5
    assert row["loss_difference"] == 0.5
    assert row["logprob_mean_difference"] == pytest.approx(-0.2)
    assert row["logprob_mean_abs_difference"] == pytest.approx(0.3)
    assert row["logprob_max_abs_difference"] == pytest.approx(0.5)


def test_greedy_with_cache_equals_greedy_without(rows):
    model = qwen3.tiny(seed=5)
    prompts = rows[:3, :8]
    got = training.greedy(model, prompts, 6, batch=2)
    text = prompts
    with torch.no_grad():
        for _ in range(6):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, text[:, 8:])


def test_first_divergence():
    assert training.first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert training.first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert training.first_divergence([5], [6]) == 0


def test_generation_gap_is_the_reference_models_preference(rows):
    model = qwen3.tiny(seed=6)
    prompts = rows[:2, :8]
    text = training.greedy(model, prompts, 4, batch=2)
    other = text.clone()
    other[1, 2] = (other[1, 2] + 7) % 512
    same, parted = training.generation_rows("x", model, prompts, text, other)
    assert (same["first_divergence"], same["gap"]) == (None, None) and same["verdict"]
    prefix = torch.cat([prompts[1], text[1, :2]])[None]
    with torch.no_grad():
        p = model(prefix).logits[0, -1].log_softmax(-1)
    assert parted["first_divergence"] == 2
    assert parted["gap"] == pytest.approx(float(p[text[1, 2]] - p[other[1, 2]]), abs=1e-4) and parted["gap"] > 0


def test_measure_pairs_the_variants_and_fills_every_table(monkeypatch):
    """The whole experiment; transformers' own kernels stand in for ours, so every difference must be 0."""
    plain = training.variant
    monkeypatch.setattr(training, "variant", lambda name, model: plain("hf", model))
    tables = training.measure(**training.EXPERIMENT["smoke"])
    check_tables(training.EXPERIMENT["tables"], tables)
    summary = {r["variant"]: r for r in tables["summary"]}
    assert summary["ours"]["paired_max_abs"] == 0.0 and summary["hf"]["paired_mean"] == 0.0
    assert [r["step"] for r in tables["loss"] if r["variant"] == "hf"] == [1, 2, 3, 4]
    kernels, batch = tables["business"]
    assert kernels["logprob_max_abs_difference"] == 0.0 and kernels["top1_agreement"] == 1.0
    assert batch["tokens"] == 4 * 15
    assert {r["pair"] for r in tables["generation"]} == {kernels["pair"], batch["pair"]}


def test_measure_notices_a_kernel_that_differs(monkeypatch):
    """The comparison must not be able to pass by comparing a run with itself."""
    import contextlib

    @contextlib.contextmanager
    def doubled(name, model):
        norm = model.model.norm
        if name != "hf":
            norm.variance_epsilon, eps = 1e-1, norm.variance_epsilon
        yield
        if name != "hf":
            norm.variance_epsilon = eps

    monkeypatch.setattr(training, "variant", doubled)
    tables = training.measure(**training.EXPERIMENT["smoke"])
    summary = {r["variant"]: r for r in tables["summary"]}
    assert abs(summary["ours"]["paired_first"]) > 1e-6
    assert tables["business"][0]["logprob_max_abs_difference"] > 1e-4


@pytest.mark.parametrize("change", [{"variants": ["hf", "ours"]}, {"variants": ["hf"]}, {"other_batch": 1}])
def test_measure_refuses_settings_that_compare_nothing(change):
    with pytest.raises(MeasureError):
        training.measure(**(training.EXPERIMENT["smoke"] | change))


def test_full_model_with_a_checkpoint_uses_it(tmp_path, monkeypatch):
    qwen3.tiny(seed=9).save_pretrained(tmp_path)
    monkeypatch.setenv(qwen3.WEIGHTS, str(tmp_path))
    model, vocab = loop.make("8b", 36, 0)
    assert model.config.hidden_size == 64 and vocab is None
