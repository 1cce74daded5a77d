"""Eight working habits for swapping kernels, each as code that runs on a reduced-depth Qwen3.

The pieces between the markers are meant to be copied. ``measure`` runs each on one model, with
faults planted where a habit is supposed to find one, and returns what came out.

    python -m snippets.precision.techniques            # a CUDA GPU: Qwen3-8B layers in bf16
    python -m snippets.precision.techniques --smoke    # CPU: a tiny model in fp32, Triton interpreted
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snippets import measure as measure_module
from snippets import qwen3
from snippets.kernels.patch import Patch, patch
from snippets.precision.liger_ci import WrongSiLU

EXPERIMENT = {
    "title": "八个实用技巧，逐个跑给你看",
    "needs": "cuda",
    "memory_gib": 60,
    "minutes": 3,
    "full": {"size": "8b", "layers": 4, "batch": 2, "sequence": 512, "plant": 2},
    "smoke": {"size": "tiny", "layers": 3, "batch": 1, "sequence": 12, "plant": 1},
    "tables": {
        "techniques": {"name": "", "metric": "", "value": "1", "unit": "", "note": ""},
        "layers": {
            "fault": "", "direction": "", "layer": "", "rel_err": "1", "own_err": "1", "planted": "", "found": "",
        },
        "progressive": {"step": "", "replaced": "", "changed": "1", "logit_max_diff": "1", "loss_diff": "1", "ratio": "1"},
        "liger": {"scope": "", "module": "", "patched": "", "total": ""},
    },
}  # fmt: skip

KINDS = ("rms_norm", "swiglu", "rope", "cross_entropy")
Measured = Iterator[tuple[str, float | None, str, str]]  # metric, value, unit, note


def rms(x: Tensor) -> float:
    """Root mean square of all elements, in fp64."""
    return x.double().pow(2).mean().sqrt().item()


def relative(got: Tensor, want: Tensor) -> float:
    """rms(got - want) / rms(want)."""
    return rms(got.double() - want.double()) / max(rms(want), 1e-300)


def forward(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] in the model's dtype and the mean next-token loss of one batch, without a graph."""
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids, use_cache=False)
    return out.logits, out.loss.double()


def gradients(model: nn.Module, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and a copy of every parameter's gradient after one backward."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


# --8<-- [start:ab_switch]
def kernels_on(model: nn.Module, *kinds: str) -> Patch:
    """The A/B switch, as a context: inside it, this one model uses the fused kernels of these kinds only."""
    return patch(model, **{kind: kind in kinds for kind in KINDS})


def ab_switch(model: nn.Module, ids: Tensor) -> Measured:
    """A switch is one only if switching back gives the very same bits."""
    before, _ = forward(model, ids)
    with kernels_on(model, *KINDS):
        inside, _ = forward(model, ids)
    after, _ = forward(model, ids)
    yield "打开后不同的 logits", share_different(inside, before), "占比", "确实换掉了"
    yield "关回去后不同的 logits", share_different(after, before), "占比", "逐位还原才算开关"
# --8<-- [end:ab_switch]


# --8<-- [start:golden]
def fingerprint(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    h = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def save_golden(path: Path, fn: Callable[..., Tensor], **inputs: Tensor) -> None:
    """Store inputs and outputs of today's code."""
    tensors = inputs | {"output": fn(**inputs)}
    torch.save({"tensors": tensors, "sha256": fingerprint(tensors)}, path)


def check_golden(path: Path, fn: Callable[..., Tensor]) -> float:
    """Relative rms drift of ``fn`` since the file was written; 0.0 means the same bits."""
    saved = torch.load(path, weights_only=True)
    if fingerprint(saved["tensors"]) != saved["sha256"]:
        raise ValueError(f"{path}: contents and hash differ; the file was damaged or edited, record it again")
    inputs = {name: t for name, t in saved["tensors"].items() if name != "output"}
    output, golden = fn(**inputs), saved["tensors"]["output"]
    return 0.0 if torch.equal(output, golden) else relative(output, golden)
# --8<-- [end:golden]


def golden(model: nn.Module, ids: Tensor) -> Measured:
    """Record a norm's answer, then change its eps, then damage the file."""
    norm, file = model.model.layers[0].input_layernorm, "golden.pt"
    # Rows of rms 1e-3: eps is invisible on ordinary rows, and a golden file sees only what it holds.
    x = 1e-3 * torch.randn(64, norm.weight.numel(), device=ids.device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / file
        save_golden(path, norm.forward, hidden_states=x.to(norm.weight.dtype))
        yield "代码没变时的漂移", check_golden(path, norm.forward), "相对 rms", "0 表示逐位相同"
        eps, norm.variance_epsilon = norm.variance_epsilon, 1e-5
        drift = check_golden(path, norm.forward)
        norm.variance_epsilon = eps
        yield "ε 从 1e-6 改成 1e-5", drift, "相对 rms", "行 rms = 1e-3 的输入"
        saved = torch.load(path, weights_only=True)
        saved["tensors"]["output"].flatten()[0] += 1
        torch.save(saved, path)
        try:
            check_golden(path, norm.forward)
            refused = 0.0
        except ValueError:
            refused = 1.0
        yield "被改过的文件遭拒", refused, "1 = 是", "哈希与内容不符"


# --8<-- [start:layer_hooks]
@contextlib.contextmanager
def layer_trace(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Hooks on every decoder layer: input x, output y, and the gradients dx and dy that pass there."""
    traces, handles = [{} for _ in model.model.layers], []

    def keep(trace: dict[str, Any], name: str) -> Callable[[Tensor], None]:
        return lambda gradient: trace.__setitem__(name, gradient.detach().clone())

    def watch(trace: dict[str, Any], layer: nn.Module) -> None:
        def entering(module, args, kwargs):
            trace["x"], trace["kwargs"] = args[0].detach().clone(), kwargs
            args[0].register_hook(keep(trace, "dx"))

        def leaving(module, args, output):
            trace["y"] = output.detach().clone()
            output.register_hook(keep(trace, "dy"))

        handles.append(layer.register_forward_pre_hook(entering, with_kwargs=True))
        handles.append(layer.register_forward_hook(leaving))

    for trace, layer in zip(traces, model.model.layers, strict=True):
        watch(trace, layer)
    try:
        yield traces
    finally:
        for handle in handles:
            handle.remove()


def replay(layer: nn.Module, trace: dict[str, Any]) -> tuple[float, float]:
    """Forward and backward error of one layer alone, on the input and the gradient of the plain run."""
    x = trace["x"].requires_grad_()
    y = layer(x, **trace["kwargs"])
    (dx,) = torch.autograd.grad(y, x, trace["dy"].clone())
    return relative(y.detach(), trace["y"]), relative(dx, trace["dx"])


def outliers(errors: list[float], noise: float, factor: float = 4.0) -> set[int]:
    """Layers whose own error is ``factor`` times the typical one (the median, or the rounding noise)."""
    typical = max(statistics.median(errors), noise)
    return {i for i, error in enumerate(errors) if error > factor * typical}
# --8<-- [end:layer_hooks]


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {"GELU 冒充 SiLU": F.gelu, "SiLU 导数少一项": WrongSiLU.apply}


@contextlib.contextmanager
def broken_mlp(mlp: nn.Module, activation: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block this one MLP uses ``activation``, whatever kernels the model uses elsewhere."""
    had = vars(mlp).get("forward")
    mlp.forward = lambda x: mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))
    try:
        yield
    finally:
        del mlp.forward
        if had is not None:
            mlp.forward = had


def trace(model: nn.Module, ids: Tensor) -> list[dict[str, Any]]:
    """x, y, dx, dy of all layers for one batch, [B, S, H] each."""
    model.zero_grad(set_to_none=True)
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()
    with layer_trace(model) as traces:
        model(inputs_embeds=embedded, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    return traces


def layers_table(model: nn.Module, ids: Tensor, plant: int) -> list[dict[str, Any]]:
    """Per-layer error of the patched model against the plain one: unharmed, and with each fault in layer ``plant``.

    ``rel_err`` is what two full runs differ by at that layer, everything upstream included;
    ``own_err`` is the layer's own share. Only the second one points at the culprit.
    """
    plain = trace(model, ids)
    noise = torch.finfo(next(model.parameters()).dtype).eps / 2  # unit roundoff
    rows = []
    for fault, activation in {"无": None, **FAULTS}.items():
        with contextlib.ExitStack() as stack:
            stack.enter_context(kernels_on(model, "rms_norm", "swiglu", "rope"))
            if activation is not None:
                stack.enter_context(broken_mlp(model.model.layers[plant].mlp, activation))
            full = trace(model, ids)
            own = [replay(layer, t) for layer, t in zip(model.model.layers, plain, strict=True)]
        for column, (direction, name) in enumerate({"前向": "y", "反向": "dx"}.items()):
            found = outliers([errors[column] for errors in own], noise)
            rows += [
                {"fault": fault, "direction": direction, "layer": i,
                 "rel_err": relative(full[i][name], plain[i][name]), "own_err": own[i][column],
                 "planted": activation is not None and i == plant, "found": i in found}
                for i in range(len(plain))
            ]  # fmt: skip
    return rows


def layer_hooks(rows: list[dict[str, Any]]) -> Measured:
    """Which faults did the traces find, in which pass?"""
    for fault in ("无", *FAULTS):
        for direction in ("前向", "反向"):
            mine = [r for r in rows if r["fault"] == fault and r["direction"] == direction]
            found = [str(r["layer"]) for r in mine if r["found"]]
            planted = [r["layer"] for r in mine if r["planted"]]
            note = f"埋在第 {planted[0]} 层" if planted else "对照：没有埋错"
            note += f"；指向第 {'、'.join(found)} 层" if found else "；没有指向任何层"
            yield f"{fault}：{direction} hook 指出的层数", float(len(found)), "层", note


# --8<-- [start:progressive]
def progressive(model: nn.Module, ids: Tensor) -> Iterator[dict]:
    """Replace one more kind of operator at a time; the step at which ``changed`` jumps names the culprit."""
    logits, loss = forward(model, ids)
    with in_fp64(model) as exact:
        truth, _ = forward(exact, ids)
    own_error, before = rms(logits.double() - truth), logits
    for step in range(len(KINDS) + 1):
        with kernels_on(model, *KINDS[:step]):
            new_logits, new_loss = forward(model, ids)
        yield {
            "step": step,
            "replaced": " + ".join(KINDS[:step]) or "（未替换）",
            "changed": (new_logits != before).double().mean().item(),
            "logit_max_diff": (new_logits.double() - logits.double()).abs().max().item(),
            "loss_diff": (new_loss - loss).item(),
            "ratio": rms(new_logits.double() - truth) / own_error if own_error else None,
        }
        before = new_logits
# --8<-- [end:progressive]


# --8<-- [start:liger]
def patched_modules(model: nn.Module) -> dict[str, list[int]]:
    """{module name: [patched, total]}: an instance patch leaves a bound ``forward`` on the module itself."""
    seen: dict[str, list[int]] = {}
    for path, module in model.named_modules():
        name = path.rsplit(".", 1)[-1]
        if name.endswith("norm") or name == "mlp":
            count = seen.setdefault(name, [0, 0])
            count[0] += "forward" in vars(module) or type(module).__name__.startswith("Liger")
            count[1] += 1
    return seen


@contextlib.contextmanager
def liger_on(model: nn.Module) -> Iterator[None]:
    """Liger's own patch for one instance, undone afterwards, its side effects on the module included."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers.models.qwen3 import modeling_qwen3

    kept_globals = dict(vars(modeling_qwen3))
    kept_instance = {m: dict(vars(m)) for m in model.modules()}
    apply_liger_kernel_to_qwen3(model=model, fused_linear_cross_entropy=False)
    try:
        yield
    finally:
        vars(modeling_qwen3).update(kept_globals)
        for module, attributes in kept_instance.items():
            vars(module).clear()
            vars(module).update(attributes)
# --8<-- [end:liger]


def liger_table(model: nn.Module, rebuild: Callable[[], nn.Module]) -> list[dict[str, Any]]:
    """Which modules Liger replaces on an existing instance, and in a model that is built afterwards."""
    rows = []
    with liger_on(model):
        for scope, which in {"实例：apply(model=…)": model, "此后新建的模型": rebuild()}.items():
            rows += [
                {"scope": scope, "module": name, "patched": patched, "total": total}
                for name, (patched, total) in patched_modules(which).items()
            ]
    return rows


def align_liger(model: nn.Module, ids: Tensor, rows: list[dict[str, Any]]) -> Measured:
    """Liger as a second implementation: does it agree with ours where Hugging Face differs from both?"""
    version = importlib.metadata.version("liger-kernel")
    instance = [r for r in rows if r["scope"].startswith("实例")]
    for name in ("input_layernorm", "q_norm", "k_norm", "mlp"):
        row = next(r for r in instance if r["module"] == name)
        yield f"{name} 已替换", row["patched"] / row["total"], "占比", f"liger-kernel {version}，model=实例"
    later = [r for r in rows if not r["scope"].startswith("实例")]
    leaked = sum(r["patched"] for r in later) / sum(r["total"] for r in later)
    yield "此后新建的“基线”模型也被替换", leaked, "占比", "实例补丁改了 modeling_qwen3 的全局名字"
    with liger_on(model):
        from transformers.models.qwen3 import modeling_qwen3

        shared = modeling_qwen3.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    yield "早先建好、没打补丁的模型也用 Liger 的 RoPE", float(shared), "1 = 是", "A/B 的 A 侧被悄悄换掉"
    if ids.device.type != "cuda":  # Liger's kernels call libdevice, which the interpreter lacks
        yield "logits：本项目对 Liger", None, "相对 rms", "需要 CUDA"
        return
    plain, _ = forward(model, ids)
    with kernels_on(model, "rms_norm", "swiglu", "rope"):
        ours, _ = forward(model, ids)
    with liger_on(model):
        liger, _ = forward(model, ids)
    yield "logits：本项目对 HF", relative(ours, plain), "相对 rms", ""
    yield "logits：Liger 对 HF", relative(liger, plain), "相对 rms", ""
    yield "logits：本项目对 Liger", relative(ours, liger), "相对 rms", "与 HF 自身的 bf16 误差同量级才算印证，见 fp64 真值"


# --8<-- [start:determinism]
def determinism(model: nn.Module, ids: Tensor) -> Measured:
    """Run twice, compare bits. A race or an atomic add shows here and in no tolerance test."""
    for name, kinds in {"HF": (), "融合 kernel": KINDS}.items():
        for strict in (False, True):
            with measure_module.deterministic(strict), kernels_on(model, *kinds):
                (loss, first), (again, second) = gradients(model, ids), gradients(model, ids)
            moved = sum(not torch.equal(first[n], second[n]) for n in first)
            note = f"{len(first)} 个参数；loss 逐位{'相同' if loss == again else '不同'}"
            mode = "use_deterministic_algorithms" if strict else "默认设置"
            yield f"{name}，{mode}：两次梯度不同的参数", float(moved), "个", note
# --8<-- [end:determinism]


# --8<-- [start:fp64]
@contextlib.contextmanager
def in_fp64(model: nn.Module, fix_norms: bool = True) -> Iterator[nn.Module]:
    """The same rounded weights in fp64: the truth that both candidates are measured against.

    ``model.double()`` is not enough: Qwen3RMSNorm casts to fp32 whatever it is given.
    """
    dtype = next(model.parameters()).dtype
    norms = [m for m in model.modules() if type(m).__name__ == "Qwen3RMSNorm"] if fix_norms else []
    buffers = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items()]
    model.double()
    for owner, name, buffer in buffers:  # RoPE's frequencies are part of the definition: they stay fp32
        owner[name] = buffer
    for norm in norms:
        norm.forward = MethodType(lambda m, x: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon), norm)
    try:
        yield model
    finally:
        for norm in norms:
            del norm.forward
        model.to(dtype)
        for owner, name, buffer in buffers:
            owner[name] = buffer


def error_ratio(model: nn.Module, ids: Tensor) -> Measured:
    """Error of the fused model over error of the plain one: near 1 means as good as what it replaces."""
    plain, _ = forward(model, ids)
    with kernels_on(model, *KINDS):
        fused, _ = forward(model, ids)
    with in_fp64(model) as exact:
        truth, _ = forward(exact, ids)
    with in_fp64(model, fix_norms=False) as naive:
        shortcut, _ = forward(naive, ids)
    mine, theirs = fused.double() - truth, plain.double() - truth
    yield "HF 自身误差", relative(plain, truth), "相对 rms", "对 fp64 真值"
    yield "融合 kernel 误差", relative(fused, truth), "相对 rms", "对 fp64 真值"
    yield "误差比（rms）", rms(mine) / rms(theirs), "1", "Gate 2 的上限是 1.5"
    yield "误差比（最大）", (mine.abs().max() / theirs.abs().max()).item(), "1", "Gate 2 的上限是 2"
    yield "只用 model.double() 的“真值”", relative(shortcut, truth), "相对 rms", "RMSNorm 内部仍是 fp32"
# --8<-- [end:fp64]


# --8<-- [start:bisect]
def step_zero(model: nn.Module, ids: Tensor, reference: dict[str, Tensor]) -> dict[str, float]:
    """Loss, global gradient norm and the worst parameter's gradient error before the first update."""
    loss, grads = gradients(model, ids)
    norm = torch.stack([g.double().norm() for g in grads.values()]).norm().item()
    return {"loss": loss, "norm": norm, "worst": max(relative(grads[n], reference[n]) for n in reference)}


def bisect(count: int, is_bad: Callable[[int], bool]) -> tuple[int, int]:
    """Which of ``count`` replacements is the culprit, and how many runs it took.

    ``is_bad(m)`` runs with the first m replacements; it must be False for 0 and True for ``count``.
    """
    good, bad, runs = 0, count, 0
    while bad - good > 1:
        middle = (good + bad) // 2
        runs += 1
        good, bad = (good, middle) if is_bad(middle) else (middle, bad)
    return bad - 1, runs
# --8<-- [end:bisect]


def loss_and_bisect(model: nn.Module, ids: Tensor, plant: int) -> Measured:
    """Step-0 numbers of three variants, then the broken MLP found among all MLPs by bisection."""
    layers, (_, reference) = model.model.layers, gradients(model, ids)
    plain = step_zero(model, ids, reference)
    with kernels_on(model, *KINDS):
        fused = step_zero(model, ids, reference)
    with broken_mlp(layers[plant].mlp, WrongSiLU.apply):
        wrong = step_zero(model, ids, reference)
    for name, got in {"融合 kernel": fused, "SiLU 导数少一项": wrong}.items():
        yield f"{name}：第 0 步 loss 差", abs(got["loss"] - plain["loss"]) / plain["loss"], "相对", ""
        yield f"{name}：全局梯度范数差", abs(got["norm"] - plain["norm"]) / plain["norm"], "相对", "一个数，误差会互相淹没"
        yield f"{name}：梯度差最大的参数", got["worst"], "相对 rms", "逐参数比"

    def is_bad(replaced: int) -> bool:
        """Layers below ``replaced`` get the new MLP, which is broken in layer ``plant`` only."""
        with contextlib.ExitStack() as stack:
            for i in range(replaced):
                stack.enter_context(broken_mlp(layers[i].mlp, WrongSiLU.apply if i == plant else F.silu))
            return step_zero(model, ids, reference)["worst"] > wrong["worst"] / 2

    culprit, runs = bisect(len(layers), is_bad)
    yield "二分定位到的层", float(culprit), "层号", f"埋在第 {plant} 层，共 {len(layers)} 层"
    yield "二分用的运行次数", float(runs), "次", ""


def share_different(a: Tensor, b: Tensor) -> float:
    """Share of elements that are not equal."""
    return (a != b).double().mean().item()


def measure(*, size: str, layers: int, batch: int, sequence: int, plant: int) -> measure_module.Tables:
    """Run all eight on one model.

    Args:
        size: "8b" (Qwen3-8B's layers, bf16) or "tiny" (fp32, for a CPU).
        layers: decoder layers.
        batch, sequence: tokens per row and rows of the random batch.
        plant: layer that gets the planted faults.

    Raises:
        ValueError: unknown size, or ``plant`` names no layer.
    """
    if size not in ("8b", "tiny") or not 0 <= plant < layers:
        raise ValueError(f"size={size!r}, plant={plant}, layers={layers}: size is '8b' or 'tiny', plant a layer")
    device = measure_module.device()

    def build() -> nn.Module:
        return qwen3.build(layers, device=device) if size == "8b" else qwen3.tiny(layers, device=device)

    model = build()
    ids = torch.randint(model.config.vocab_size, (batch, sequence), device=device)
    names = iter(range(8))

    def rows(name: str, measured: Measured) -> list[dict[str, Any]]:
        measure_module.progress(name, next(names), 8)
        return [
            {"name": name, "metric": metric, "value": value, "unit": unit, "note": note}
            for metric, value, unit, note in measured
        ]

    table = rows("A/B 开关", ab_switch(model, ids)) + rows("Golden 输入", golden(model, ids))
    per_layer = layers_table(model, ids, plant)
    table += rows("层级 hook", layer_hooks(per_layer))
    steps = list(progressive(model, ids))
    table += rows(
        "渐进替换",
        ((f"第 {s['step']} 步：与上一步不同的 logits", s["changed"], "占比", s["replaced"]) for s in steps[1:]),
    )
    patched = liger_table(model, lambda: qwen3.tiny(1, device=device))
    table += rows("对齐 Liger", align_liger(model, ids, patched))
    table += rows("确定性与重复运行", determinism(model, ids))
    table += rows("fp64 真值与误差比", error_ratio(model, ids))
    table += rows("第 0 步对照与二分", loss_and_bisect(model, ids, plant))
    return {"techniques": table, "layers": per_layer, "progressive": steps, "liger": patched}


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
