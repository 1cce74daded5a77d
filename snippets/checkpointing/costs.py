"""What one decoder layer stores, and what each part costs to make again.

A layer with this project's kernels runs once with everything dropped; each recipe that it leaves behind
(see ``on_demand``) is timed by itself, on the tensors of that run. Beside them stand the
attention, which the on-demand policies always store, the whole layer, the loss, and what lies before the first
layer and after the last. Gradients exist and are added to, as in a micro-step of gradient accumulation.

A training step holds a GPU at its power limit, where the clock is lower than in a benchmark of single kernels; times of
single kernels added up would promise an eighth less than a step takes. So between any two samples matrix
products run, as they would in the step.

    python -m snippets.checkpointing.costs [--smoke] [--json FILE]
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.accumulate import accumulate
from snippets.checkpointing.chunked_loss import head_backward
from snippets.checkpointing.on_demand import TENSORS, LayerHooks
from snippets.checkpointing.policies import Block
from snippets.kernels import patch
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "一层 decoder 存什么，重算要多久",
    "needs": "cuda",
    "memory_gib": 40,
    "minutes": 2,
    "full": {"size": "8b", "shapes": [[1, 4096], [2, 4096], [1, 16384], [1, 32768]], "rounds": 30},
    "smoke": {"size": "tiny", "shapes": [[2, 16]], "rounds": 5},
    "tables": {
        "tensors": {
            "batch": "1", "sequence": "1", "tensor": "", "makes": "", "stored_bytes": "B", "median_us": "µs", "p20_us": "µs",
            "p80_us": "µs", "flop": "FLOP", "flop_per_byte": "FLOP/B", "ps_per_byte": "ps/B",
        },
        "parts": {
            "batch": "1", "sequence": "1", "part": "", "median_us": "µs", "p20_us": "µs", "p80_us": "µs", "peak_bytes": "B",
        },
        "attention": {"batch": "1", "sequence": "1", "operator": ""},
        "host": {"direction": "", "bytes": "B", "median_us": "µs", "p20_us": "µs", "p80_us": "µs", "gb_per_s": "GB/s", "lost_us": "µs"},
    },
}  # fmt: skip

# Some 20 ms of them on an H200. The host gets ahead meanwhile, which it is in a training step too.
HEAT_PRODUCTS, HEAT_SIZE = 28, 8192
HOST_BYTES = 96 << 20  # gate of one layer at 1×4096
# What a policy names, and the recipes that making it again runs besides its inputs' own.
HELPERS = {"rope": ("qn", "kn"), "h2": ("o",)}


class _Recorded(LayerHooks):
    """Keeps the last forward's nodes, which otherwise go when the layer ends."""

    @contextlib.contextmanager
    def _frame(self, *call):
        with super()._frame(*call):
            self.last = self._frames[-1]
            yield


def heat(device: torch.device) -> Callable[[int], None]:
    """What ``side_by_side`` runs before each sample: matrix products on random bf16, nothing on a CPU."""
    if device.type != "cuda":
        return lambda _: None
    a = torch.randn(HEAT_SIZE, HEAT_SIZE // 2, dtype=torch.bfloat16, device=device)
    b, out = torch.randn_like(a).T.contiguous(), torch.empty(HEAT_SIZE, HEAT_SIZE, dtype=a.dtype, device=device)

    def run(_: int) -> None:
        for _ in range(HEAT_PRODUCTS):
            torch.mm(a, b, out=out)

    return run


def _timed(calls: Mapping[str, Callable[[int], Any]], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    return measure_module.side_by_side(calls, prepare=dict.fromkeys(calls, heat(device)), rounds=rounds)


def flop(module: torch.nn.Module | None, tokens: int) -> int:
    """FLOPs of a linear module over ``tokens`` rows (2 per multiply-add); 0 for everything elementwise."""
    return 2 * tokens * module.weight.numel() if isinstance(module, torch.nn.Linear) else 0


def attention_flop(config: Any, batch: int, sequence: int) -> int:
    """FLOPs of causal attention's forward: two products over the lower triangle, diagonal included."""
    pairs = sequence * (sequence + 1) // 2
    return 2 * 2 * batch * config.num_attention_heads * config.head_dim * pairs


def attention_operator(run: Callable[[], Any]) -> str:
    """The operator that torch dispatched a scaled_dot_product_attention to: backends differ by version and shape."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from snippets.checkpointing.policies import is_attention

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if is_attention(function):
                seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        run()
    return ", ".join(dict.fromkeys(seen))


def _peak_bytes(run: Callable[[], Any]) -> int:
    """Peak of ``run`` above what is allocated before it, in bytes (0 without CUDA)."""
    return round(measure_module.peak_memory(run) * 2**30)


def _inputs(model: torch.nn.Module, batch: int, sequence: int) -> tuple[torch.Tensor, dict[str, Any]]:
    weight = model.lm_head.weight
    hidden = torch.randn(batch, sequence, weight.shape[1], dtype=weight.dtype, device=weight.device)
    position = torch.arange(sequence, device=weight.device)[None]
    return hidden, {"attention_mask": None, "position_embeddings": model.model.rotary_emb(hidden, position)}


def _tensors(model: torch.nn.Module, batch: int, sequence: int, rounds: int) -> list[dict[str, Any]]:
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    linear = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj,
              "gate": mlp.gate_proj, "up": mlp.up_proj}  # fmt: skip
    hidden, inputs = _inputs(model, batch, sequence)
    hooks = _Recorded(layer, ())
    try:
        out = layer(hidden.requires_grad_(), **inputs)  # noqa: F841 - its graph holds the notes
        frame = hooks.last
        found: dict[str, tuple[Any, list[Any]]] = {}
        for node in frame.nodes.values():
            if node.recipe is not None:
                found.setdefault(node.name, (node.recipe, []))[1].append(node)
        calls, size = {}, {}
        for name, (recipe, nodes) in found.items():
            arguments = [a.open() if hasattr(a, "open") else a for a in recipe.arguments]
            calls[name] = lambda _, f=recipe.function, a=arguments: f(*a)
            size[name] = sum(n.shape.numel() * hidden.element_size() for n in nodes)
        # The stored ones: attention's output and log-sum-exp, and what it costs to make them.
        head = attention.head_dim
        q, k = (n.get() for n in found["rope"][1])
        v = found["v"][1][0].get().view(batch, sequence, -1, head).transpose(1, 2)
        attend = _attention(attention, q, k, v)
        calls["attention"] = lambda _: attend()
        size["attention"] = batch * sequence * attention.config.num_attention_heads * (head * hidden.element_size() + 4)
        with torch.no_grad():
            times = _timed(calls, hidden.device, rounds)
    finally:
        hooks.off()
    rows = []
    for name in [*TENSORS, "attention", "qn", "kn", "o"]:
        helpers = HELPERS.get(name, ())
        work = sum(flop(linear.get(n), batch * sequence) for n in (*helpers, name))
        if name == "attention":
            work = attention_flop(attention.config, batch, sequence)
        total = times[name]["median_us"] + sum(times[h]["median_us"] for h in helpers)
        rows.append({
            "batch": batch, "sequence": sequence, "tensor": name, "makes": "+".join((*helpers, name)) if name in TENSORS else name,
            "stored_bytes": size[name], **times[name], "flop": work, "flop_per_byte": work / size[name],
            "ps_per_byte": total * 1e6 / size[name],
        })  # fmt: skip
    return rows


def _host(device: torch.device, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Copies between device and pinned host memory, and how much longer products take for each copy that runs beside them."""
    cuda = device.type == "cuda"
    there = torch.randint(-128, 127, (nbytes,), dtype=torch.int8, device=device)
    here = torch.empty(nbytes, dtype=torch.int8, pin_memory=cuda)
    here.copy_(there)
    copies = {"to_host": lambda _=0: here.copy_(there, non_blocking=True), "from_host": lambda _=0: there.copy_(here, non_blocking=True)}
    alone = measure_module.side_by_side(copies, rounds=rounds)
    lost = dict.fromkeys(copies, 0.0)
    if cuda:
        side, products = torch.cuda.Stream(device), heat(device)
        plain = measure_module.side_by_side({"products": products}, rounds=rounds)["products"]["median_us"]
        count = {name: max(1, int(0.7 * plain / alone[name]["median_us"])) for name in copies}  # they end before the products do

        def beside(name: str) -> Callable[[int], None]:
            def run(r: int) -> None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(count[name]):
                        copies[name]()
                products(r)

            return run

        times = measure_module.side_by_side({"products": products} | {name: beside(name) for name in copies}, rounds=rounds)
        lost = {name: max(0.0, times[name]["median_us"] - times["products"]["median_us"]) / count[name] for name in copies}
    return [{"direction": name, "bytes": nbytes, **alone[name], "gb_per_s": nbytes / alone[name]["median_us"] / 1e3, "lost_us": lost[name]}
            for name in copies]  # fmt: skip


def _attention(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return lambda: sdpa_attention_forward(module, q, k, v, None, dropout=0.0, scaling=module.scaling)[0]


def _parts(model: torch.nn.Module, batch: int, sequence: int, rounds: int) -> list[dict[str, Any]]:
    layer = model.model.layers[0]
    hidden, inputs = _inputs(model, batch, sequence)
    hidden.requires_grad_()
    above = torch.randn_like(hidden)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    labels = torch.randint(0, model.lm_head.weight.shape[0], (batch, sequence), device=hidden.device)
    decoder = model.model

    def through(*_):
        layer(hidden, **inputs).backward(above)
        hidden.grad = None

    def loss(*_):
        head_backward(hidden, model.lm_head.weight, labels)

    def ends(*_):
        decoder.norm(decoder.embed_tokens(labels)).backward(above)

    def forward(*_):
        with torch.no_grad():
            layer(hidden, **inputs)

    rows = []
    plain = {"forward": forward, "layer": through, "loss": loss, "ends": ends}
    times = _timed(plain, hidden.device, rounds)
    peaks = {name: _peak_bytes(run) for name, run in plain.items()}
    undo = Block().attach(layer)
    times |= _timed({"block": through}, hidden.device, rounds)
    peaks["block"] = _peak_bytes(through)
    undo()
    for name in ("forward", "layer", "block", "loss", "ends"):
        rows.append({"batch": batch, "sequence": sequence, "part": name, **times[name], "peak_bytes": peaks[name]})
    return rows


def measure(*, size: str, shapes: list[list[int]], rounds: int) -> Tables:
    """Time and size of everything that one layer stores.

    Args:
        size: "8b" or "tiny".
        shapes: [batch, sequence] each.

    Returns:
        ``tensors``: per droppable tensor its bytes and the time to make it from its inputs (``ps_per_byte``
        includes helpers that nothing stores), then the attention and the helpers themselves. ``parts``: the layer's
        forward alone, forward and backward with everything stored and as a block, the loss, and the two ends
        (embedding and last norm); peak above the inputs and the gradients. ``attention``: the operator that ran. ``host``:
        copies to and from pinned memory, alone, and what one costs the computation beside it.
    """
    model = qwen3.build(1) if size == "8b" else qwen3.tiny(1, device=measure_module.device())
    patch(model)
    accumulate(model)
    tensors: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    operators: list[Mapping[str, Any]] = []
    for batch, sequence in shapes:
        progress(f"{batch}×{sequence}")
        tensors += _tensors(model, batch, sequence, rounds)
        parts += _parts(model, batch, sequence, rounds)
        hidden, inputs = _inputs(model, batch, sequence)
        with torch.no_grad():
            name = attention_operator(lambda h=hidden, i=inputs: model.model.layers[0](h, **i))
        operators.append({"batch": batch, "sequence": sequence, "operator": name})
        model.zero_grad(set_to_none=True)
        del hidden, inputs
        gc.collect()
    place = model.lm_head.weight.device
    host = _host(place, HOST_BYTES if place.type == "cuda" else HOST_BYTES >> 10, rounds)
    return {"tensors": tensors, "parts": parts, "attention": operators, "host": host}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
