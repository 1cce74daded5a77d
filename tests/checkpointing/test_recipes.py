"""Recipes: each computes the model's gradients, leaves the model as it was, and says what it cannot do."""

import pytest
import torch

from snippets import qwen3
from snippets.checkpointing import agreement, layers, lengths, long_16k, long_32k, pareto, recipes
from snippets.checkpointing.plan import Costs
from snippets.measure import check_tables

IDS = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(0))
NAMES = ["hf none", "hf full", "hf every2", "hf attention", "hf mlp", "hf selective", "ours none", "ours full", "ours keep", "ours keep q+gate", "ours keep offload gate", "ours keep up offload q+gate", "ours plan 1"]


def state(model):
    # HF leaves gradient_checkpointing = False and a function that is then never called; both are its own.
    return [(n, type(m), m.__dict__.get("gradient_checkpointing", False), m._compiled_call_impl, len(m._forward_hooks), len(m._forward_pre_hooks))
            for n, m in model.named_modules()]  # fmt: skip


@pytest.fixture(scope="module")
def costs(smoke_costs):
    return Costs.read(smoke_costs, 2, 16, 2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_model_s_and_the_model_is_restored(name, costs):
    model = qwen3.tiny()
    before = state(model)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with recipes.recipe(name, model, costs) as ready:
        got = ready.step(IDS)
    torch.testing.assert_close(got, loss.detach(), rtol=1e-5, atol=0)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[n], rtol=1e-4, atol=1e-6)
    assert state(model) == before
    assert (ready.predicted_bytes is not None) == ("plan" in name)


def test_compiled_layers_compute_the_same_and_are_restored():
    from torch._functorch import config

    model = qwen3.tiny()
    before, budget = state(model), config.activation_memory_budget
    loss = model(IDS, labels=IDS, use_cache=False).loss
    seen = []
    with recipes.layers_compiled(model, 0.3, "flops"):
        seen.append(config.activation_memory_budget)
        torch.testing.assert_close(model(IDS, labels=IDS, use_cache=False, attention_mask=recipes.MASK).loss, loss, rtol=1e-4, atol=0)
        assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    assert seen == [0.3] and config.activation_memory_budget == budget and state(model) == before


@pytest.mark.parametrize("name", ["hf", "hf all", "theirs none", "ours plan", "ours keep gate+x", "ours keep gate offload gate", "ours keep offload x", "compiled 0.3"])
def test_unknown_names_are_refused(name):
    model = qwen3.tiny()
    before = state(model)
    with pytest.raises(ValueError), recipes.recipe(name, model):
        pass
    assert state(model) == before


@pytest.mark.parametrize(("name", "says"), [
    ("ours plan", "give a budget in GiB"), ("ours plan 1 hots", "give a budget in GiB"), ("ours plan 1 host 2", "give a budget in GiB"),
    ("ours none gate", "takes nothing behind it, got 'gate'"), ("ours plan 1", "no costs"), ("ours plan x host", "give a budget in GiB"),
    ("ours keep offload", "unknown tensors offload"), ("ours keep up offload", "give names joined by"), ("ours keep up offloadgate", "give names joined by"),
    ("ours keep gate up", "give names joined by"), ("ours keep gate+", r"unknown tensors \(no name\)"), ("ours keep q offload k host", "give names joined by"),
])  # fmt: skip
def test_what_stands_behind_a_name_is_read_or_refused(name, says):
    with pytest.raises(ValueError, match=says), recipes.recipe(name, qwen3.tiny()):
        pass


def test_what_runs_out_of_memory_is_a_row_and_the_others_go_on(monkeypatch):
    model = qwen3.tiny()
    before = state(model)

    def step(model, ids):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    with monkeypatch.context() as m:
        m.setattr(recipes, "_backward", step)
        rows, visits = pareto.compare(model, 1, 8, ["hf none", "ours none", "hf none"], 5, None)
    assert state(model) == before
    assert [r["failed"] for r in rows] == ["CUDA out of memory. Tried to allocate 1 GiB.", ""]
    assert rows[0]["median_ms"] is None and rows[1]["median_ms"] > 0 and rows[1]["time_ratio"] is None
    assert [v["recipe"] for v in visits] == ["ours none"]


def test_a_budget_that_nothing_fits_is_a_row(costs):
    rows, _ = pareto.compare(qwen3.tiny(), 2, 16, ["ours plan 0.0000001"], 5, costs)
    assert "nothing fits" in rows[0]["failed"]


def test_a_graph_needs_cuda():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "CUDA" in recipes.visit("ours none under graph", qwen3.tiny(), [IDS], 5)["failed"]


def test_who_beats_whom():
    def row(recipe, kernels, ms, gib):
        return {"recipe": recipe, "kernels": kernels, "family": recipes.family(recipe), "median_ms": ms, "activation_gib": gib}

    ours = row("ours full", "ours", 4.0, 2.0)
    assert pareto._dominates(row("hf full", "hf", 3.0, 1.0), ours)
    assert pareto._dominates(row("compiled 0 flops", "compile + liger", 3.0, 1.0), ours)
    for other in (row("hf full", "hf", 3.0, 2.0), row("hf full", "hf", None, None), row("ours none", "ours", 3.0, 1.0),
                  row("hf full under graph", "hf", 3.0, 1.0)):  # fmt: skip
        assert not pareto._dominates(other, ours)


def test_stores_in_words():
    p = pareto.policies
    assert pareto.stores([p.Keep(("q",))] * 2 + [p.Block()]) == "2 × keep q, 1 × block"
    assert pareto.stores(None) == ""


@pytest.mark.parametrize("module", [pareto, layers, lengths, long_16k, long_32k, agreement], ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_smoke(module):
    tables = module.measure(**module.EXPERIMENT["smoke"])
    check_tables(module.EXPERIMENT["tables"], tables)
    if module is agreement:
        assert all(r["ok"] and r["differing"] == 0 and r["loss_equal"] for r in tables["agreement"])


def test_the_other_shapes_are_the_same_comparison():
    for module in (lengths, long_16k, long_32k):
        assert module.EXPERIMENT["tables"] == pareto.EXPERIMENT["tables"]
        assert module.EXPERIMENT["full"].keys() == pareto.EXPERIMENT["full"].keys()


def test_a_gradient_that_differs_is_found(monkeypatch):
    model = qwen3.tiny()
    agreement.gradients(model, "hf none", IDS)
    reference = [p.grad.clone() for p in model.parameters()]
    assert agreement.difference(model, reference) == (0, 0.0)
    model.lm_head.weight.grad[3, 4] += 1e-3
    count, worst = agreement.difference(model, reference)
    assert count == 1 and 0 < worst < 1
    model.lm_head.weight.grad.fill_(float("nan"))
    assert agreement.difference(model, reference) == (1, float("inf"))


@pytest.mark.gpu
def test_a_step_that_waits_for_the_host_is_no_graph_and_says_so():
    """Liger's fused loss reads a count back from the device."""
    pytest.importorskip("liger_kernel")
    model = qwen3.build(2, vocab_size=4096)
    ids = pareto.batches_of(model, 1, 256, 2)
    assert "cannot be captured in a CUDA graph: CUDA error" in recipes.visit("liger none under graph", model, ids, 5)["failed"]
    assert recipes.visit("ours none under graph", model, ids, 5)["loss"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ours none under graph", "ours keep under graph", "hf full under graph"])
def test_a_graph_computes_what_its_recipe_does(name):
    model = qwen3.build(2, vocab_size=4096)
    ids = pareto.batches_of(model, 1, 256, 3)
    want = agreement.gradients(model, name.removesuffix(" under graph"), ids[2])
    reference = [p.grad.clone() for p in model.parameters()]
    recipes.fixed_bytes(model)
    with recipes.recipe(name, model) as ready:
        ready.step(ids[0])
        for p in model.parameters():
            p.grad.zero_()
        got = ready.step(ids[2])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    assert agreement.difference(model, reference)[1] < 1e-2
