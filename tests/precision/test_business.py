"""Standard errors against known values; the lm-eval path on a tiny checkpoint and a local task."""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from snippets import qwen3
from snippets.measure import check_tables
from snippets.precision import business


def test_standard_errors_of_the_two_benchmarks():
    assert business.standard_error(0.75, 14042) * 100 == pytest.approx(0.365, abs=1e-3)
    assert business.standard_error(0.88, 1319) * 100 == pytest.approx(0.895, abs=1e-3)
    assert business.smallest_unpaired(0.75, 14042) * 100 == pytest.approx(1.01, abs=0.01)
    assert business.smallest_unpaired(0.88, 1319) * 100 == pytest.approx(2.48, abs=0.01)


def test_standard_error_is_the_spread_of_simulated_accuracies():
    numpy = pytest.importorskip("numpy")
    drawn = numpy.random.default_rng(0).binomial(1319, 0.88, 20000) / 1319
    assert business.standard_error(0.88, 1319) == pytest.approx(drawn.std(), rel=0.03)


def test_paired_threshold_is_where_mcnemar_turns_significant():
    n, q = 14042, 0.02
    b_plus_c = round(q * n)
    excess = business.smallest_paired(q, n) * n
    above = business.mcnemar(round((b_plus_c + excess * 1.1) / 2), round((b_plus_c - excess * 1.1) / 2))
    below = business.mcnemar(round((b_plus_c + excess * 0.8) / 2), round((b_plus_c - excess * 0.8) / 2))
    assert above < 0.05 < below
    assert business.smallest_paired(q, n) < business.smallest_unpaired(0.75, n)


def test_mcnemar_known_values():
    assert business.mcnemar(0, 0) == 1.0 and business.mcnemar(7, 7) == 1.0
    assert business.mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert business.mcnemar(9, 1) == business.mcnemar(1, 9)
    assert 0 <= business.mcnemar(3000, 3500) < 1e-8  # large counts neither overflow nor underflow


@pytest.mark.parametrize("bad", [(-0.1, 10), (1.1, 10), (0.5, 0)])
def test_impossible_input_is_refused(bad):
    for function in (business.standard_error, business.smallest_paired):
        with pytest.raises(ValueError):
            function(*bad)
    with pytest.raises(ValueError):
        business.mcnemar(-1, 3)


def test_measure_full_settings():
    tables = business.measure(**business.EXPERIMENT["full"])
    check_tables(business.EXPERIMENT["tables"], tables)
    assert len(tables["standard_error"]) == 2 and len(tables["paired"]) == 8


def results(samples, groups=None):
    return {"samples": samples, "group_subtasks": groups or {}}


def test_compare_pairs_items_over_the_subtasks_of_a_group():
    def sample(i, acc):
        return {"doc_id": i, "acc": acc, "filter": "none"}

    groups = {"all": ["x", "y"], "x": [], "y": []}
    a = results({"x": [sample(0, 1.0), sample(1, 0.0)], "y": [sample(0, 1.0)]}, groups)
    b = results({"x": [sample(0, 0.0), sample(1, 0.0)], "y": [sample(0, 1.0)]}, groups)
    (row,) = business.compare("all", a, b)
    assert (row["items"], row["only_hf"], row["only_ours"], row["p"]) == (3, 1, 0, 1.0)
    assert row["hf"] == pytest.approx(2 / 3) and row["ours"] == pytest.approx(1 / 3)
    short = results({"x": [sample(0, 1.0)], "y": [sample(0, 1.0)]}, groups)
    with pytest.raises(ValueError, match="different items"):
        business.compare("all", a, short)
    with pytest.raises(business.Missing, match="no item"):
        business.compare("all", results({"x": [{"doc_id": 0, "bleu": 3.0}]}, groups), a)


def test_each_filter_is_its_own_row():
    a = results({"g": [{"doc_id": 0, "exact_match": 1.0, "filter": f} for f in ("strict", "flexible")]})
    assert [r["metric"] for r in business.compare("g", a, a)] == ["exact_match,strict", "exact_match,flexible"]


def test_without_weights_it_says_so_and_fails():
    env = {k: v for k, v in os.environ.items() if k != qwen3.WEIGHTS}
    done = subprocess.run(
        [sys.executable, "-m", "snippets.precision.business", "--tasks", "mmlu"],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "QWEN3_8B is not set" in done.stderr and not done.stdout


def test_without_the_package_it_names_the_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(qwen3.WEIGHTS, str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "lm_eval" else find(n, *a))
    assert business.main(["--tasks", "mmlu"]) == 2
    assert "requirements-eval.txt" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3 with a byte-level tokenizer, as a directory that from_pretrained reads."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    where = tmp_path_factory.mktemp("tiny")
    qwen3.tiny(seed=1).save_pretrained(where)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i + 3 for i, c in enumerate(alphabet)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<pad>").save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def local_task(tmp_path_factory):
    """A multiple-choice task on a local JSON file."""
    where = tmp_path_factory.mktemp("task")
    data = where / "items.json"
    items = [{"q": f"{i} + 1 =", "choices": [str(i + 1), str(i + 2)], "answer": 0} for i in range(12)]
    data.write_text("\n".join(json.dumps(i) for i in items), encoding="utf-8")
    (where / "plus_one.yaml").write_text(
        f"""task: plus_one
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
""",
        encoding="utf-8",
    )
    return where


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="requirements-eval.txt is not installed")
def test_lm_eval_runs_both_variants_on_a_local_task(checkpoint, local_task, monkeypatch, tmp_path, capsys):
    from snippets import variants

    used = []
    plain = variants.variant

    @contextlib.contextmanager
    def spoiled(name, model):
        """The candidate is deliberately wrong: negated logits turn every preference around."""
        used.append(name)
        if name == "hf":
            yield
            return
        handle = model.lm_head.register_forward_hook(lambda _m, _i, out: -out)
        try:
            yield
        finally:
            handle.remove()

    monkeypatch.setenv(qwen3.WEIGHTS, str(checkpoint))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(variants, "variant", spoiled)
    (row,) = business.run(["plus_one"], include=str(local_task), batch=4)
    assert used == ["hf", "ours"] and row["items"] == 12 and row["metric"] == "acc,none"
    assert row["only_hf"] + row["only_ours"] >= 6  # turned-around preferences must show, item by item
    assert row["hf"] - row["ours"] == pytest.approx((row["only_hf"] - row["only_ours"]) / 12)

    monkeypatch.setattr(variants, "variant", lambda name, model: plain("hf", model))
    out = tmp_path / "rows.json"
    assert business.main(["--tasks", "plus_one", "--include", str(local_task), "--limit", "5", "--out", str(out)]) == 0
    assert "no significant difference" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())
    assert row["items"] == 5 and row["only_hf"] == row["only_ours"] == 0 and math.isclose(row["p"], 1.0)
