"""The planner: exact against brute force, monotonic, honest where nothing fits, and its lines run."""

import dataclasses
import itertools
import json
import math
import random
import re

import pytest
import torch

from snippets import qwen3
from snippets.checkpointing import costs as costs_module
from snippets.checkpointing import offload
from snippets.checkpointing import plan as planner
from snippets.checkpointing.on_demand import TENSORS
from snippets.checkpointing.plan import Costs, Option, PlanError, options, plan, predict
from snippets.checkpointing.policies import Keep
from snippets.measure import check_tables


def some(seed=0, layers=3):
    r = random.Random(seed)
    tensors = {t: (r.choice([2, 8, 24]) * 128, r.uniform(1, 100)) for t in TENSORS}
    return Costs(
        layers=layers, input_bytes=1024, attention_bytes=1040, tensors=tensors, layer_us=1000.0, block_us=1000.0 + r.uniform(150, 400),
        loss_us=50.0, workspace_bytes=r.randint(0, 9000), block_workspace_bytes=r.randint(9000, 20000), loss_bytes=r.randint(0, 20000),
        ends_us=10.0, ends_bytes=r.randint(0, 9000),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_it_is_exact(seed):
    costs = some(seed)
    choices = options(costs)
    low = min(predict(costs, [o] * 3).peak_bytes for o in choices)
    high = predict(costs, [choices[-1]] * 3).peak_bytes
    every = [predict(costs, c) for c in itertools.product(choices[:: max(1, len(choices) // 12)], repeat=3)]
    for budget in (low + (high - low) * i // 5 for i in range(6)):
        best = plan(costs, budget)
        assert best.peak_bytes <= budget
        # The product runs over some of the choices only: none of those may be faster.
        assert best.step_us <= min((p.step_us for p in every if p.peak_bytes <= budget), default=float("inf")) + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_it_is_exact_over_all_choices_of_two_layers(seed):
    costs = some(seed, layers=2)
    every = [predict(costs, c) for c in itertools.product(options(costs), repeat=2)]
    for budget in sorted({p.peak_bytes for p in every})[::40]:
        assert plan(costs, budget).step_us == pytest.approx(min(p.step_us for p in every if p.peak_bytes <= budget))


@pytest.mark.parametrize("seed", range(4))
def test_equal_layers_stand_together_in_the_order_of_the_lowest_peak(seed):
    costs = some(seed, layers=4)
    low = min(predict(costs, [o] * 4).peak_bytes for o in options(costs))
    for budget in range(low, low + 60_000, 7_000):
        best = plan(costs, budget)
        assert len(list(itertools.groupby(best.policies))) == len(set(best.policies))
        assert best.peak_bytes == min(predict(costs, order).peak_bytes for order in itertools.permutations(best.options))


def test_no_option_is_beaten_by_another():
    found = options(some(layers=1))
    for a, b in itertools.permutations(found, 2):
        assert not (b.stored <= a.stored and b.workspace <= a.workspace and b.extra_us <= a.extra_us)
    assert found[-1].policy.name == "none" and found[-1].extra_us == 0


@pytest.mark.parametrize("budget", [float("nan"), float("inf")])
def test_a_budget_that_is_no_number(budget):
    with pytest.raises(PlanError, match="finite number"):
        plan(some(), budget)


def test_a_budget_with_a_fraction_is_cut_to_bytes():
    costs = some(1)
    least = min(predict(costs, [o] * 3).peak_bytes for o in options(costs))
    assert plan(costs, least + 0.5) == plan(costs, least)


def test_more_memory_is_never_slower_and_too_little_is_refused():
    costs = some(1, layers=5)
    times = []
    for budget in range(15_000, 200_000, 5_000):
        try:
            times.append(plan(costs, budget).step_us)
        except PlanError as error:
            assert not times and "smallest configuration" in str(error)
    assert times == sorted(times, reverse=True) and times[-1] == pytest.approx(5 * 1000 + 50 + 10)


@pytest.mark.parametrize("seed", range(4))
def test_with_host_memory(seed):
    """Within the budget, with no layer over the bus's share, never slower than without, and the best of the uniform bounds."""
    costs = dataclasses.replace(some(seed), send_bytes=40 * 128, sent_us_per_byte=1e-4)
    low = min(predict(costs, [o] * 3).peak_bytes for o in options(costs))
    for budget in range(low, low + 40_000, 8_000):
        best, without = plan(costs, budget, math.inf), plan(costs, budget)
        assert best.peak_bytes <= budget and best.step_us <= without.step_us and without.host_bytes == 0
        assert all(o.sent <= costs.send_bytes for o in best.options)
        assert plan(costs, budget, best.host_bytes - 1 if best.host_bytes else 0).host_bytes <= max(0, best.host_bytes - 1)
        for o in options(costs, costs.send_bytes):
            uniform = predict(costs, [o] * 3)
            assert uniform.peak_bytes > budget or best.step_us <= uniform.step_us + 1e-6


@pytest.mark.parametrize("host", [0, math.inf], ids=["device only", "with host memory"])
@pytest.mark.parametrize("seed", range(4))
def test_the_need_that_a_refusal_states_is_the_least(seed, host):
    costs = some(seed)
    scale = 2**20  # so that the message's hundredths of a GiB tell something
    tensors = {t: (n * scale, us) for t, (n, us) in costs.tensors.items()}
    grown = {f.name: getattr(costs, f.name) * scale for f in dataclasses.fields(costs) if f.name.endswith("_bytes")}
    costs = dataclasses.replace(costs, **grown | {"tensors": tensors, "send_bytes": 40 * 128 * scale, "sent_us_per_byte": 1e-10})
    with pytest.raises(PlanError) as refusal:
        plan(costs, 1, host)
    need = float(re.search(r"needs ([\d.]+) GiB", str(refusal.value))[1])
    assert plan(costs, need * planner.GIB, host).peak_bytes <= need * planner.GIB
    with pytest.raises(PlanError):
        plan(costs, (need - 0.01) * planner.GIB, host)


def test_limited_host_memory_is_used_and_never_exceeded():
    tensors = {t: (3072, 500.0) if t == "gate" else (256, 1.0) for t in TENSORS}
    costs = dataclasses.replace(
        some(layers=6), tensors=tensors, block_us=9000.0, workspace_bytes=0, block_workspace_bytes=50_000, loss_bytes=0, ends_bytes=0,
        send_bytes=3072, sent_us_per_byte=1e-6,
    )  # fmt: skip
    budget = 6 * (costs.input_bytes + costs.attention_bytes) + 8000
    one = offload.pinned_bytes(tensors["gate"][0])
    times = []
    for held in (0, one, 3 * one, 5 * one, math.inf):
        best = plan(costs, budget, held)
        assert best.host_bytes <= held and best.peak_bytes <= budget
        times.append(best.step_us)
    # Room for the gate of one layer is worth having, though it is far below the gate of each layer.
    assert times == sorted(times, reverse=True) and times[-1] < times[2] < times[1] < times[0]


def test_what_was_sent_stays_on_the_device_until_another_layer_sends():
    costs = dataclasses.replace(some(), send_bytes=1 << 30)
    plain, sender = Option(Keep(), 1000, 0, 0.0), Option(Keep((), ("gate",)), 1000, 0, 0.0, sent=70, pinned=128)
    # As the engine does: see test_offload's test of the same name.
    assert predict(costs, [sender, plain, plain]).peak_bytes - predict(costs, [plain] * 3).peak_bytes == 70
    assert predict(costs, [plain, sender, plain]).peak_bytes - predict(costs, [plain] * 3).peak_bytes == 70


def test_with_enough_memory_nothing_is_sent():
    costs = dataclasses.replace(some(), send_bytes=1 << 40, sent_us_per_byte=0.0)
    best = plan(costs, 1 << 40, math.inf)
    assert best.host_bytes == 0 and {o.policy.name for o in best.options} == {"none"}


@pytest.mark.parametrize("host", [-1, float("nan")])
def test_host_memory_that_is_no_number(host):
    with pytest.raises(PlanError, match="give a number, 0 for none"):
        plan(dataclasses.replace(some(), send_bytes=1), 1e6, host)


def test_host_memory_whose_bus_was_not_measured():
    with pytest.raises(PlanError, match="no copies to the host; measure them again"):
        plan(some(), 1e6, 1e6)


@pytest.fixture(scope="module")
def measured(smoke_costs, tmp_path_factory):
    tables = smoke_costs
    check_tables(costs_module.EXPERIMENT["tables"], tables)
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    file.write_text(json.dumps({"tables": tables, "device": {"name": "this CPU"}}))
    return tables, file


def test_bytes_are_those_of_the_layer(measured):
    rows = {r["tensor"]: r for r in measured[0]["tensors"]}
    tokens, itemsize = 2 * 16, 4
    tiny = qwen3.TINY
    heads, kv, d = tiny["num_attention_heads"], tiny["num_key_value_heads"], tiny["head_dim"]
    width = {"ln1": 64, "q": heads * d, "k": kv * d, "v": kv * d, "rope": (heads + kv) * d, "h2": 64, "ln2": 64} | dict.fromkeys(
        ("gate", "up", "product"), tiny["intermediate_size"]
    )
    assert {n: rows[n]["stored_bytes"] for n in TENSORS} == {n: w * tokens * itemsize for n, w in width.items()}
    assert rows["attention"]["stored_bytes"] == tokens * heads * (d * itemsize + 4)
    assert rows["q"]["flop"] == 2 * tokens * 64 * heads * d and rows["ln1"]["flop"] == 0
    assert rows["h2"]["flop"] == rows["q"]["flop"] and rows["h2"]["makes"] == "o+h2"
    assert "flash" in measured[0]["attention"][0]["operator"]


def test_the_command_line_and_the_lines_it_prints(measured, capsys):
    assert planner.main(["--budget-gib", "0.0003", "--batch", "2", "--seq", "16", "--layers", "2", "--costs", str(measured[1])]) == 0
    out = capsys.readouterr().out
    assert "2×16, 2 layers" in out and "this CPU" in out
    code = out[out.index("from snippets.checkpointing") :]
    model = qwen3.tiny(layers=2)
    ids = torch.randint(0, 512, (1, 5))
    scope = {"model": model, "ids": ids, "labels": ids}
    exec(code, scope)
    assert scope["loss"].isfinite() and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget-gib", "1", "--seq", "17"], "no costs for 1×17; measured are 2×16"),
        (["--budget-gib", "1e-9", "--batch", "2", "--seq", "16"], "nothing fits"),
        (["--budget-gib", "1e-9", "--batch", "2", "--seq", "16", "--layers", "1"], "nothing fits"),
        (["--budget-gib", "1", "--costs", "nowhere.json"], "nowhere.json holds no costs"),
    ],
)
def test_the_command_line_refuses(measured, capsys, arguments, says):
    if "--costs" not in arguments:
        arguments = [*arguments, "--costs", str(measured[1])]
    assert planner.main(arguments) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("argument", [["--budget-gib", "1e300"], ["--budget-gib", "nan"], ["--budget-gib", "1", "--host-gib", "nan"]])
def test_arguments_that_are_no_numbers(argument, capsys):
    with pytest.raises(SystemExit):
        planner.main(argument)
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("host", "median_us", 0), ("host", "bytes", 0), ("host", "median_us", math.nan), ("host", "lost_us", -1.0), ("host", "lost_us", math.nan),
     ("tensors", "stored_bytes", 0), ("tensors", "stored_bytes", math.nan), ("host", "median_us", "5"), ("parts", "median_us", None)],
)  # fmt: skip
def test_costs_with_odd_values(measured, tmp_path, capsys, table, column, value):
    tables = json.loads(json.dumps(measured[0]))
    for row in tables[table]:
        row[column] = value
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"tables": tables, "device": {"name": "odd"}}))
    assert planner.main(["--budget-gib", "0.0003", "--host-gib", "1", "--batch", "2", "--seq", "16", "--costs", str(file)]) == 1
    assert "easure" in capsys.readouterr().err


def test_lines_of_a_mixture():
    from snippets.checkpointing.policies import Block, Keep

    model = qwen3.tiny(layers=4)
    each = [Keep(("q",)), Keep(("q",)), Block(), Keep((), offload=("gate",))]
    ids = torch.randint(0, 512, (1, 5))
    exec(planner.lines(each), {"model": model, "ids": ids, "labels": ids})
    assert "[Keep(('q',))] * 2 + [Block()] * 1 + [Keep((), offload=('gate',))] * 1" in planner.lines(each)
