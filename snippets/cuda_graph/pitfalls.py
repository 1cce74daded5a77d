"""Pitfalls of CUDA graphs, each as code that fails, the fix, and what both really did.

The pieces between the markers are what the article shows: ``NAME_wrong`` is what people write, ``NAME_fixed`` what
works. Each returns a number that tells whether it worked. A capture that fails leaves its process broken, so each runs in a process of
its own, and an exception counts as what happened.

    python -m snippets.cuda_graph.pitfalls                    # a CUDA GPU; on a CPU every row says that it needs one
    python -m snippets.cuda_graph.pitfalls lr_baked wrong     # one of them
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from snippets import measure as measure_module
from snippets.cuda_graph.graphed import Graphed, GraphError, first_cause

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120  # for one process
AT_ONCE = 4  # processes

EXPERIMENT = {
    "title": "CUDA Graph 的陷阱：错误写法、真实结果与修复",
    "needs": "cuda",
    "memory_gib": 20,
    "minutes": 4,
    "full": {"names": None},
    "smoke": {"names": ["stale_input"]},
    "tables": {
        "pitfalls": {
            "name": "", "title": "", "symptom": "", "outcome": "", "metric": "", "wrong": "1", "fixed": "1", "expected": "1", "ok": "",
        },
    },
}  # fmt: skip


def capture(function, *, warm=3, generators=()):
    """The usual recipe: a few runs on a side stream, then the capture. Returns the graph and what the function returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


# --8<-- [start:stale_input]
def stale_input_wrong():
    """Gives the name to a new tensor; the graph goes on reading the old one."""
    x = torch.zeros(4, device="cuda")
    graph, y = capture(lambda: x * 2)
    x = torch.ones(4, device="cuda")  # noqa: F841
    graph.replay()
    return y.sum().item()


def stale_input_fixed():
    """Copies into the tensor that was captured."""
    x = torch.zeros(4, device="cuda")
    graph, y = capture(lambda: x * 2)
    x.copy_(torch.ones(4, device="cuda"))
    graph.replay()
    return y.sum().item()
# --8<-- [end:stale_input]


# --8<-- [start:shape]
def shape_wrong():
    """A last batch of 5 goes into a graph for 8: three rows of the batch before are still there."""
    x = torch.full((8,), 100.0, device="cuda")
    graph, mean = capture(lambda: x.mean())
    x[:5].copy_(torch.ones(5, device="cuda"))
    graph.replay()
    return mean.item()


def shape_fixed():
    """One graph for each shape; a shape without one is an error."""
    mean = Graphed(lambda x: x.mean())
    for n in (8, 5):
        mean.capture(torch.full((n,), 100.0, device="cuda"))
    return mean(torch.ones(5, device="cuda")).item()
# --8<-- [end:shape]


# --8<-- [start:host_sync]
def host_sync_wrong():
    """Asks the host for a number in the middle."""
    x = torch.ones(4, device="cuda")

    def scaled():
        return x * 3 if x.sum().item() > 0 else x

    graph, y = capture(scaled)
    graph.replay()
    return y.sum().item()


def host_sync_fixed():
    """Keeps the number on the device."""
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: torch.where(x.sum() > 0, x * 3, x))
    graph.replay()
    return y.sum().item()
# --8<-- [end:host_sync]


# --8<-- [start:new_constant]
def new_constant_wrong():
    """Makes a tensor from a Python number: a copy from memory that is not pinned."""
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: x * torch.tensor(3.0, device="cuda"))
    graph.replay()
    return y.sum().item()


def new_constant_fixed():
    """Makes it before, or on the device."""
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: x * torch.full((), 3.0, device="cuda"))
    graph.replay()
    return y.sum().item()
# --8<-- [end:new_constant]


# --8<-- [start:output]
def output_wrong():
    """Collects the outputs of three replays: three names for one tensor."""
    x = torch.zeros(1, device="cuda")
    graph, y = capture(lambda: x + 1)
    seen = []
    for i in range(3):
        x.fill_(i)
        graph.replay()
        seen.append(y)
    return len({t.item() for t in seen})


def output_fixed():
    """Copies what is to stay."""
    x = torch.zeros(1, device="cuda")
    graph, y = capture(lambda: x + 1)
    seen = []
    for i in range(3):
        x.fill_(i)
        graph.replay()
        seen.append(y.clone())
    return len({t.item() for t in seen})
# --8<-- [end:output]


def _train(optimizer, weight):
    def step():
        weight.grad.fill_(1.0)
        optimizer.step()
    return step


# --8<-- [start:lr_baked]
def lr_baked_wrong():
    """A learning rate that is a number becomes part of the graph: set to 0, the weights go on moving."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1, capturable=True)
    graph, _ = capture(_train(optimizer, weight))
    optimizer.param_groups[0]["lr"] = 0.0
    before = weight.clone()
    graph.replay()
    return (weight != before).sum().item()


def lr_baked_fixed():
    """A tensor; schedulers write into it."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1, device="cuda"), capturable=True)
    graph, _ = capture(_train(optimizer, weight))
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = weight.clone()
    graph.replay()
    return (weight != before).sum().item()
# --8<-- [end:lr_baked]


# --8<-- [start:not_capturable]
def not_capturable_wrong():
    """AdamW counts its steps on the host unless told otherwise, fused or not."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    graph, _ = capture(_train(optimizer, weight))
    return 1.0


def not_capturable_fixed():
    """capturable=True counts on the device."""
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True, capturable=True)
    graph, _ = capture(_train(optimizer, weight))
    return 1.0
# --8<-- [end:not_capturable]


# --8<-- [start:generator]
def generator_wrong():
    """Draws from a generator of its own, which the graph doesn't know."""
    own = torch.Generator(device="cuda")
    graph, drawn = capture(lambda: torch.empty(1000, device="cuda").bernoulli_(0.5, generator=own))
    graph.replay()
    first = drawn.clone()
    graph.replay()
    return float(not torch.equal(first, drawn))


def generator_fixed():
    """Registers it. Then each replay goes on in its sequence, as it does in the default one's: dropout has another mask every time."""
    own, ones = torch.Generator(device="cuda"), torch.ones(1000, device="cuda")
    graph, (drawn, dropped) = capture(lambda: (torch.empty_like(ones).bernoulli_(0.5, generator=own), F.dropout(ones, 0.5)), generators=[own])
    graph.replay()
    first = drawn.clone(), dropped.clone()
    graph.replay()
    return float(not torch.equal(first[0], drawn) and not torch.equal(first[1], dropped))
# --8<-- [end:generator]


def _loss_of_half(loss, labels, truth):
    """Replays ``loss``, captured with all labels, with every other one taken out; 1 where that is what ``truth`` says then."""
    graph, captured = capture(loss)
    labels[::2] = -100
    graph.replay()
    return float(abs(captured.item() / truth().item() - 1) < 0.01)


def _hidden_weight_labels():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 128, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for n in (64, 1024))
    return hidden, weight, torch.randint(0, 1024, (64,), generator=generator).to("cuda")


# --8<-- [start:liger_loss]
def liger_loss_wrong():
    """Liger's fused linear cross entropy reads the number of valid labels on the host."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight, labels = _hidden_weight_labels()
    fused = LigerFusedLinearCrossEntropyLoss()
    return _loss_of_half(lambda: fused(weight, hidden, labels), labels, lambda: F.cross_entropy((hidden @ weight.T).float(), labels))


def liger_loss_fixed():
    """This project's counts them on the device, so a replay counts again."""
    from snippets.checkpointing.chunked_loss import head_backward

    hidden, weight, labels = _hidden_weight_labels()
    return _loss_of_half(lambda: head_backward(hidden, weight, labels)[0], labels, lambda: F.cross_entropy((hidden @ weight.T).float(), labels))
# --8<-- [end:liger_loss]


def _accumulated(model, *micro_batches):
    for x in micro_batches:
        model(x).sum().backward()
    return model.weight.grad.sum().item()


# --8<-- [start:accumulation]
def accumulation_wrong():
    """make_graphed_callables returns gradients in its own static memory; the second backward writes over the first."""
    model = torch.nn.Linear(4, 4, bias=False, device="cuda")
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros_like(x, requires_grad=True),))
    return _accumulated(graphed, x, 3 * x)


def accumulation_fixed():
    """Gives the parameters gradients of their own before: then backward adds to those."""
    model = torch.nn.Linear(4, 4, bias=False, device="cuda")
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (torch.zeros_like(x, requires_grad=True),))
    model.weight.grad = torch.zeros_like(model.weight)
    return _accumulated(graphed, x, 3 * x)
# --8<-- [end:accumulation]


def _reserved_mib():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


# --8<-- [start:static_pool]
def static_pool_wrong():
    """Deletes the outputs and empties the cache; the graph still holds what it once allocated."""
    graph, y = capture(lambda: torch.ones(256, 2**20, device="cuda") * 2)  # two tensors of 1 GiB
    del y
    return _reserved_mib()


def static_pool_fixed():
    """Deletes the graph too."""
    graph, y = capture(lambda: torch.ones(256, 2**20, device="cuda") * 2)
    del y, graph
    return _reserved_mib()
# --8<-- [end:static_pool]


# --8<-- [start:failed_capture]
def failed_capture_wrong():
    """A wait in the middle ends the capture; what it had allocated stays, for nobody."""
    def function():
        y = torch.ones(256, 2**20, device="cuda")
        return y * y[0, 0].item()

    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            function()
    except RuntimeError:
        pass
    return _reserved_mib()


def failed_capture_fixed():
    """Runs once with waits made errors: nothing has been captured when it fails."""
    def function():
        y = torch.ones(256, 2**20, device="cuda")
        return y * y[0, 0].item()

    try:
        Graphed(function).capture()
    except GraphError:
        pass
    return _reserved_mib()
# --8<-- [end:failed_capture]


# --8<-- [start:empty]
def empty_wrong():
    """Launches on a stream that the capture doesn't know of: the graph is empty."""
    x, other = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        with torch.cuda.stream(other):
            x.add_(1)
    torch.cuda.synchronize()
    x.zero_()
    graph.replay()
    return x.sum().item()


def empty_fixed():
    """Lets the other stream wait for the capturing one, and joins it before the end."""
    x, other = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(other)
    x.zero_()
    graph.replay()
    return x.sum().item()
# --8<-- [end:empty]


def _tuned():
    import triton
    import triton.language as tl

    @triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
    @triton.jit
    def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

    def run(x):
        y = torch.empty_like(x)
        double[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](x, y, x.numel())
        return y

    return run


# --8<-- [start:autotune]
def autotune_wrong():
    """Captures a Triton kernel at its first call, when the autotuner measures."""
    double, x = _tuned(), torch.ones(1000, device="cuda")
    graph, y = capture(lambda: double(x), warm=0)
    graph.replay()
    return y.sum().item()


def autotune_fixed():
    """Warms up with the same shapes."""
    double, x = _tuned(), torch.ones(1000, device="cuda")
    graph, y = capture(lambda: double(x), warm=1)
    graph.replay()
    return y.sum().item()
# --8<-- [end:autotune]


def _layers():
    from snippets import qwen3

    model = qwen3.build(2, vocab_size=1024).eval()
    return model, torch.randint(0, 1024, (1, 2048), device="cuda")


def _attention_operators(model, ids, mask):
    """How many copies of K and V for the query heads a captured forward makes."""
    from snippets.cuda_graph.graphed import _Operators

    with torch.no_grad():
        for _ in range(2):
            model(ids, attention_mask=mask, use_cache=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), _Operators() as seen:
            model(ids, attention_mask=mask, use_cache=False)
    return float(sum("expand" in n and "attention" not in n for n in seen.names))


# --8<-- [start:mask]
def mask_wrong():
    """Under a capture transformers builds the whole mask, so K and V are copied for each query head."""
    model, ids = _layers()
    return _attention_operators(model, ids, None)


def mask_fixed():
    """A mask that is given, even None, is left alone."""
    model, ids = _layers()
    return _attention_operators(model, ids, {"full_attention": None})
# --8<-- [end:mask]


@dataclass(frozen=True)
class Case:
    """One pitfall as readers see it; ``expected`` None means: less than the wrong way gives."""

    name: str
    title: str
    symptom: str
    metric: str
    expected: float | None


CASES = (
    Case("stale_input", "换了输入张量，没有写进原来的地址", "静默", "四个 1 乘 2 之和", 8.0),
    Case("shape", "小一号的 batch 放进大一号的图", "静默", "五个 1 的均值", 1.0),
    Case("output", "收集几次回放的输出", "静默", "三次回放得到的不同值", 3.0),
    Case("lr_baked", "学习率是 Python 数", "静默", "学习率改为 0 后仍在变的权重", 0.0),
    Case("accumulation", "make_graphed_callables 之后累积梯度", "静默", "两次反向后的梯度之和", 128.0),
    Case("mask", "capture 时 transformers 换了 attention 路径", "静默", "复制 K、V 等的 expand 次数", None),
    Case("empty", "在别的流上 launch，没有汇合", "仅警告", "回放后的和", 4.0),
    Case("host_sync", "区间里有 .item()", "报错", "四个 1 乘 3 之和", 12.0),
    Case("new_constant", "区间里由 Python 数造张量", "报错", "四个 1 乘 3 之和", 12.0),
    Case("not_capturable", "AdamW 没有 capturable", "报错", "capture 成功", 1.0),
    Case("generator", "自带的随机数生成器", "报错", "两次回放的随机数不同", 1.0),
    Case("liger_loss", "Liger 的 fused linear cross entropy", "报错", "标签去掉一半后 loss 对", 1.0),
    Case("autotune", "第一次调用就 capture，autotune 在其中", "报错", "1000 个 1 乘 2 之和", 2000.0),
    Case("static_pool", "删掉输出、清空缓存，显存不还", "静默", "仍占的显存（MiB）", 0.0),
    Case("failed_capture", "capture 失败之后", "静默", "仍占的显存（MiB）", 0.0),
)


def run(name: str, way: str) -> dict[str, Any]:
    """In this process: the number, the exception or None, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value, error = float(globals()[f"{name}_{way}"]()), None
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is the result
            value, error = None, first_cause(raised)
            last = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
            if last != error:  # the end of a broken capture fails once more, and its message is the one that people see
                error = f"{error}；最后报 {last}"
    return {"value": value, "error": error, "warnings": [f"{w.category.__name__}: {str(w.message).splitlines()[0]}" for w in caught]}


def apart(name: str, way: str) -> dict[str, Any]:
    """The same in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "snippets.cuda_graph.pitfalls", name, way], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"value": None, "error": f"没有在 {LIMIT_S} 秒内结束", "warnings": []}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["没有输出"])[-1]
        return {"value": None, "error": f"进程以 {done.returncode} 结束：{last}", "warnings": []}


def row(case: Case) -> dict[str, Any]:
    """Run one pitfall and its fix."""
    return judged(case, apart(case.name, "wrong"), apart(case.name, "fixed"))


def judged(case: Case, wrong: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """The row of a pitfall: ``ok`` where the wrong way went wrong and the fix gives what is expected."""
    expected = fixed["value"] if case.expected is None else case.expected
    told = wrong["error"] or "没有报错"
    if graph_warnings := [w for w in wrong["warnings"] if "graph" in w.lower()]:
        told += f"；警告：{graph_warnings[0]}"
    if wrong["value"] is not None:
        told += f"；{case.metric}：{wrong['value']:g}，应为 {expected:g}" if expected is not None else ""
    if fixed["error"]:
        told += f"；修好后的写法报错：{fixed['error']}"
    ok = fixed["value"] is not None and fixed["value"] == expected and wrong["value"] != expected
    if case.expected is None:
        ok = ok and wrong["value"] is not None and wrong["value"] > fixed["value"]
    return {
        "name": case.name, "title": case.title, "symptom": case.symptom, "outcome": told, "metric": case.metric, "wrong": wrong["value"],
        "fixed": fixed["value"], "expected": expected, "ok": ok,
    }  # fmt: skip


def measure(*, names: list[str] | None) -> measure_module.Tables:
    """Run the pitfalls with these names, or all.

    Raises:
        ValueError: an unknown name.
    """
    known = {c.name: c for c in CASES}
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"unknown pitfalls {sorted(unknown)}; known: {', '.join(known)}")
    cases = CASES if names is None else [known[n] for n in names]
    measure_module.progress(f"{len(cases)} pitfalls, {AT_ONCE} processes at once")
    with ThreadPoolExecutor(AT_ONCE) as workers:  # each runs a pitfall, then its fix
        return {"pitfalls": list(workers.map(row, cases))}


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        print(json.dumps(run(*sys.argv[1:]), ensure_ascii=False))
    else:
        measure_module.cli(EXPERIMENT, measure)
