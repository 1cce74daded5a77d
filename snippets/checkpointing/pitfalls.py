"""Pitfalls of gradient checkpointing, each as code that fails, the fix, and what both really did.

The pieces between the markers are what the article shows: ``NAME_wrong`` is what people write, ``NAME_fixed`` what
works. ``measure`` runs both on a small Qwen3 and counts: operators that ran again, parameters without a gradient,
bits that differ, exceptions raised. A pitfall that this torch or this device doesn't have gets ``ok`` = False.

    python -m snippets.checkpointing.pitfalls            # a CUDA GPU: two of Qwen3-8B's layers, bf16
    python -m snippets.checkpointing.pitfalls --smoke    # CPU: a tiny model, bf16
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing import policies

EXPERIMENT = {
    "title": "梯度检查点的陷阱：错误写法、真实结果与修复",
    "needs": "cuda",
    "memory_gib": 20,
    "minutes": 2,
    "full": {"size": "8b", "layers": 2, "batch": 2, "sequence": 1024},
    "smoke": {"size": "tiny", "layers": 2, "batch": 2, "sequence": 24},
    "tables": {
        "pitfalls": {
            "name": "", "title": "", "symptom": "", "outcome": "", "metric": "", "wrong": "1", "fixed": "1", "expected": "1",
            "ok": "",
        },
    },
}  # fmt: skip

# In every section: model is a Qwen3ForCausalLM in train mode, ids are token ids [B, S].


# --8<-- [start:rng_dropout]
def rng_dropout_wrong(model, ids):
    """Skips saving the RNG state, to be faster, in a model with attention_dropout > 0."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()  # the recompute draws another dropout mask
    return loss


def rng_dropout_fixed(model, ids):
    """preserve_rng_state defaults to True; turn it off only where nothing is random, as in Qwen3-8B itself."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": True})
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss
# --8<-- [end:rng_dropout]


# --8<-- [start:keyword_trap]
def keyword_trap_wrong(model, ids):
    """Any dictionary replaces transformers' default {"use_reentrant": False} as a whole."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"preserve_rng_state": False})
    model(ids, labels=ids, use_cache=False).loss.backward()


def keyword_trap_fixed(model, ids):
    """Say use_reentrant too."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
    model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:keyword_trap]


# --8<-- [start:reentrant_frozen]
def reentrant_frozen_wrong(model, ids):
    """Embeddings are frozen and computed beforehand: no input of the first layer requires a gradient."""
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    embeddings = model.model.embed_tokens(ids).detach()
    model(inputs_embeds=embeddings, labels=ids, use_cache=False).loss.backward()  # no error: lm_head has its gradient


def reentrant_frozen_fixed(model, ids):
    """The non-reentrant variant needs no input that requires a gradient."""
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    embeddings = model.model.embed_tokens(ids).detach()
    model(inputs_embeds=embeddings, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:reentrant_frozen]


# --8<-- [start:op_packet]
def op_packet_wrong(model, ids):
    """aten.mm is a packet of overloads; the policy gets the overload aten.mm.default, which is never equal to it."""
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in [torch.ops.aten.mm] else CheckpointPolicy.PREFER_RECOMPUTE
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model(ids, labels=ids, use_cache=False).loss.backward()


def op_packet_fixed(model, ids):
    """Name the overload. (A list instead of a function is checked by torch: a packet in it is a ValueError.)"""
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in [torch.ops.aten.mm.default] else CheckpointPolicy.PREFER_RECOMPUTE
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:op_packet]


# --8<-- [start:cpu_offload_policy]
def cpu_offload_policy_wrong(model, ids):
    """Wants the matmul outputs in host memory; outside torch.compile these policies recompute."""
    def policy(context, op, *args, **kwargs):
        mm = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_CPU_OFFLOAD if mm else CheckpointPolicy.PREFER_RECOMPUTE
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model(ids, labels=ids, use_cache=False).loss.backward()


def cpu_offload_policy_fixed(model, ids):
    """In eager, offloading is autograd's hook for saved tensors. It sees no tensor that SAC has cached."""
    with save_on_cpu(pin_memory=True):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
# --8<-- [end:cpu_offload_policy]


# --8<-- [start:missing_attention]
def missing_attention_wrong(model, ids):
    """torch's own list of expensive operators doesn't hold every attention that may run."""
    from torch._functorch.partitioners import get_default_op_list

    save = [op.default for op in get_default_op_list().compute_intensive_ops]
    contexts = functools.partial(create_selective_checkpoint_contexts, save)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model(ids, labels=ids, use_cache=False).loss.backward()


def missing_attention_fixed(model, ids):
    """Add the missing ones; which attention runs depends on device, version, dtype and shape, so list them all."""
    from torch._functorch.partitioners import get_default_op_list

    save = [op.default for op in get_default_op_list().compute_intensive_ops]
    for name in ("cudnn_attention", "fused_attention_overrideable", "flash_attention_for_cpu"):
        save.append(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default)
    contexts = functools.partial(create_selective_checkpoint_contexts, save)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:missing_attention]


# --8<-- [start:kv_cache]
def heads(attention, hidden):
    """Query, key and value [B, heads, S, head_dim] of a Qwen3Attention."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return [p(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for p in projections]


def kv_cache_wrong(attention, hidden, cache):
    """The region appends to the cache that it reads: in the recompute the same tokens are in there twice."""
    def region(hidden):
        q, k, v = heads(attention, hidden)
        return F.scaled_dot_product_attention(q, *cache.update(k, v, layer_idx=0), is_causal=True, enable_gqa=True)
    checkpoint(region, hidden, use_reentrant=False).float().square().mean().backward()


def kv_cache_fixed(attention, hidden, cache):
    """A region changes nothing that it reads. Training needs no cache; transformers' own switch drops it."""
    def region(hidden):
        q, k, v = heads(attention, hidden)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    checkpoint(region, hidden, use_reentrant=False).float().square().mean().backward()
# --8<-- [end:kv_cache]


# --8<-- [start:sdpa_context]
def sdpa_context_wrong(model, ids):
    """The choice of an attention backend is not replayed: the recompute runs another one."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()


def sdpa_context_fixed(model, ids):
    """The backward, where the recompute happens, belongs into the context too."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
# --8<-- [end:sdpa_context]


# --8<-- [start:second_backward]
def second_backward_wrong(model, ids):
    """Two losses, one backward each: what SAC has stored is handed out once."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    out = model(ids, labels=ids, use_cache=False)
    z_loss = 1e-4 * out.logits.float().logsumexp(-1).square().mean()
    out.loss.backward(retain_graph=True)
    z_loss.backward()


def second_backward_fixed(model, ids):
    """Add the losses up: the same gradient, one backward, one recompute."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    out = model(ids, labels=ids, use_cache=False)
    z_loss = 1e-4 * out.logits.float().logsumexp(-1).square().mean()
    (out.loss + z_loss).backward()
# --8<-- [end:second_backward]


# --8<-- [start:eval_off]
def eval_off_wrong(model, ids):
    """eval() to switch dropout off, say; transformers checkpoints a layer only if it is in train mode."""
    model.gradient_checkpointing_enable()
    model.eval()
    model(ids, labels=ids, use_cache=False).loss.backward()


def eval_off_fixed(model, ids):
    """Stay in train mode and set the dropout itself to 0 (in Qwen3 there is one, and it is 0 already)."""
    model.gradient_checkpointing_enable()
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:eval_off]


# --8<-- [start:bf16_deterministic]
def bf16_deterministic_wrong(block, hidden, document):
    """Sums the hidden states [N, H] of each document. On a GPU index_add adds atomically, in no fixed order."""
    def region(hidden):
        pooled = hidden.new_zeros(4, hidden.shape[-1]).index_add(0, document, block(hidden))
        seen.append(pooled.detach())  # once in the forward, once in the recompute
        return pooled.float().square().mean()
    seen = []
    checkpoint(region, hidden, use_reentrant=False).backward()
    return seen


def bf16_deterministic_fixed(block, hidden, document):
    """Stores what cannot be repeated. Or torch.use_deterministic_algorithms(True), on in the backward as well."""
    def region(hidden):
        pooled = hidden.new_zeros(4, hidden.shape[-1]).index_add(0, document, block(hidden))
        seen.append(pooled.detach())
        return pooled.float().square().mean()
    seen, save = [], [torch.ops.aten.index_add.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, save)
    checkpoint(region, hidden, use_reentrant=False, context_fn=contexts).backward()
    return seen
# --8<-- [end:bf16_deterministic]


# --8<-- [start:bf16_autocast]
class Recompute(torch.autograd.Function):
    """A checkpoint written by hand. The forward ran under autocast, backward() is called outside of it."""

    @staticmethod
    def forward(ctx, block, hidden):
        ctx.block = block
        ctx.save_for_backward(hidden)
        return block(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(hidden)  # fp32: nothing has switched autocast on again
        torch.autograd.backward(out, gradient)
        return None, hidden.grad


def bf16_autocast_wrong(block, hidden):
    with torch.autocast(hidden.device.type, torch.bfloat16):
        out = Recompute.apply(block, hidden)
    out.float().square().mean().backward()


def bf16_autocast_fixed(block, hidden):
    with torch.autocast(hidden.device.type, torch.bfloat16):
        out = checkpoint(block, hidden, use_reentrant=False)  # replays autocast, and so repeats the same bits
    out.float().square().mean().backward()
# --8<-- [end:bf16_autocast]


# --8<-- [start:liger_double]
def liger_double_wrong(weight, hidden, labels):
    """This loss computes its gradients in the forward already; in a region it does all of that twice."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    checkpoint(loss, weight, hidden, labels, use_reentrant=False).backward()


def liger_double_fixed(weight, hidden, labels):
    """The logits are never stored: there is nothing to checkpoint."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels).backward()
# --8<-- [end:liger_double]


# --8<-- [start:liger_tiled]
def tiled(mlp):
    """Liger's tiled MLP with the projections of a Qwen3MLP; it keeps its input only and runs again in its backward."""
    from liger_kernel.transformers import LigerTiledSwiGLUMLP

    new = LigerTiledSwiGLUMLP(mlp.config, num_shards=4)
    new.gate_proj, new.up_proj, new.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return new


def liger_tiled_wrong(model, ids):
    """The MLP runs in the forward, in the recompute of its layer and in its own backward."""
    for layer in model.model.layers:
        layer.mlp = tiled(layer.mlp)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, labels=ids, use_cache=False).loss.backward()


def liger_tiled_fixed(model, ids):
    """Checkpoint only what the tiling doesn't cover: the attention."""
    for layer in model.model.layers:
        layer.mlp = tiled(layer.mlp)
        layer.self_attn.forward = functools.partial(checkpoint, layer.self_attn.forward, use_reentrant=False)
    model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:liger_tiled]


# ------------------------------------------------------------------------------- measuring


class Unavailable(RuntimeError):
    """This pitfall needs something that isn't here; the message, for readers, says what."""


class Count(TorchDispatchMode):
    """How often each operator ran, the backward and its recompute included."""

    def __init__(self):
        super().__init__()
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.runs[function] += 1
        return function(*args, **(kwargs or {}))

    def matmuls(self) -> int:
        """Matrix products of linear layers, forms that write into a given output included."""
        return sum(n for op, n in self.runs.items() if op._schema.name in ("aten::mm", "aten::addmm"))

    def attentions(self) -> Counter[Any]:
        """Attention forwards."""
        return Counter({op: n for op, n in self.runs.items() if policies.is_attention(op)})


class AnyOrder(TorchDispatchMode):
    """For a CPU, whose index_add is deterministic: adds the rows one by one in another order at each call.

    As atomics do on a GPU: every sum is rounded, and torch.use_deterministic_algorithms ends it.
    """

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)  # one that no checkpoint replays

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function != torch.ops.aten.index_add.default or torch.are_deterministic_algorithms_enabled():
            return function(*args, **(kwargs or {}))
        out, dim, index, rows = args
        out = out.clone()
        for i in torch.randperm(len(index), generator=self.generator).tolist():
            out.select(dim, index[i].item()).add_(rows.select(dim, i))
        return out


@dataclass(frozen=True)
class Lab:
    """What the cases run on. Every run gets a new model with the same weights, so that none inherits another's state."""

    size: str
    layers: int
    ids: Tensor
    device: torch.device

    def model(self, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> nn.Module:
        """Layers of Qwen3-8B behind a small vocabulary, or of the tiny model."""
        if self.size == "tiny":
            return qwen3.tiny(self.layers, dtype, self.device, **overrides)
        small = {"vocab_size": qwen3.TINY["vocab_size"], "bos_token_id": 1, "eos_token_id": 2}
        return qwen3.build(self.layers, dtype, self.device, **(small | overrides))

    def inputs(self) -> tuple[nn.Module, Tensor]:
        """What most steps take."""
        return self.model(), self.ids

    def count(self, step: Callable[..., Any]) -> Count:
        """Operators that one step runs."""
        with Count() as count, quiet():
            step(*self.inputs())
        return count

    @functools.cached_property
    def matmuls(self) -> int:
        """Matrix products of a step without checkpointing."""
        return self.count(plain).matmuls()

    def recomputed(self, step: Callable[..., Any]) -> float:
        """Matrix products per layer that a step runs more often than one without checkpointing."""
        return (self.count(step).matmuls() - self.matmuls) / self.layers

    def stored(self, step: Callable[..., Any]) -> int:
        """Bytes that a step's forward stores for its backward, each storage once, parameters left out."""
        model, kept = self.model(), {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage  # held, so that no address comes up twice
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), quiet():
            step(model, self.ids)
        return sum(storage.nbytes() for storage in kept.values())

    def hidden(self, dtype: torch.dtype, width: int) -> Tensor:
        """Random hidden states, a row for each token."""
        return torch.randn(self.ids.numel(), width, device=self.device).to(dtype).requires_grad_()


@dataclass(frozen=True)
class Result:
    """What came out: the counted values, and in words what the wrong code did."""

    wrong: float
    fixed: float
    expected: float
    outcome: str


def plain(model: nn.Module, ids: Tensor) -> Tensor:
    """A step without checkpointing."""
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def default(model: nn.Module, ids: Tensor) -> Tensor:
    """A step with every layer checkpointed, as transformers does it by default."""
    model.gradient_checkpointing_enable()
    return plain(model, ids)


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collects the warnings of the body instead of printing them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that repeat their bits where there is a choice: otherwise a difference might not be the checkpoint's."""
    # MATH: cuDNN's attention disregards the flag where the flag only warns.
    with measure_module.deterministic(), sdpa_kernel(SDPBackend.MATH), quiet():
        yield


def said(caught: Iterable[warnings.WarningMessage], about: str) -> str:
    """The first warning that mentions ``about``, its first sentence if it is long; "没有警告" where none does."""
    for warning in caught:
        if about in (text := str(warning.message).strip()):
            return f"{warning.category.__name__}: " + (text if len(text) < 100 else re.split(r"(?<=\.)\s", text)[0])
    return "没有警告"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """rms(got - want) / rms(want) over all elements of all gradients."""
    error = sum((got[n].double() - want[n].double()).square().sum() for n in want)
    return float((error / sum(want[n].double().square().sum() for n in want)).sqrt())


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> int:
    """Gradients that are not the same bits."""
    return sum(n not in got or not torch.equal(got[n], want[n]) for n in want)


def attempt(step: Callable[..., Any], *arguments: Any) -> tuple[int, str]:
    """Run a step: 1 and what the exception says, or 0. Memory that runs out is no pitfall and is raised."""
    try:
        with quiet():
            step(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return 1, _message(error)
    return 0, "没有报错"


def _message(error: RuntimeError) -> str:
    """Type and first line as a traceback prints them, and the numbers of the lines below."""
    first = "".join(traceback.format_exception_only(error)).splitlines()[0]
    if shapes := re.search(r"saved metadata: .*?Size\((\[.*?\])\).*\n.*?Size\((\[.*?\])\)", str(error)):
        return f"{first}（第一个不同的张量：前向 {shapes[1]}，重算 {shapes[2]}）"
    if counts := re.search(r"during forward: (\d+)\n.*during recomputation: (\d+)", str(error)):
        return f"{first}（前向存了 {counts[1]} 个张量，重算存了 {counts[2]} 个）"
    return first


def _again(lab: Lab, wrong: Callable[..., Any], fixed: Callable[..., Any], expected: float, why: str) -> Result:
    """A case whose symptom is work done again in silence."""
    runs = lab.recomputed(wrong)
    why = f"{why}，" if runs != expected else ""
    return Result(runs, lab.recomputed(fixed), expected, f"没有报错；{why}每层重算 {runs:g} 个矩阵乘")


def _raises(wrong: Callable[..., Any], fixed: Callable[..., Any], inputs: Callable[[], tuple[Any, ...]]) -> Result:
    """A case whose symptom is an exception; ``inputs`` makes new ones for each run."""
    raised, message = attempt(wrong, *inputs())
    raised_again, message_again = attempt(fixed, *inputs())
    return Result(raised, raised_again, 0, message + (f"；修复后仍报 {message_again}" if raised_again else ""))


def rng_dropout(lab: Lab) -> Result:
    """Gradients under the same seed, with dropout in the attention."""

    def run(step):
        model = lab.model(attention_dropout=0.1)
        torch.manual_seed(0)
        with deterministic():
            return step(model, lab.ids).detach(), gradients(model)

    (loss, want), (wrong_loss, wrong), (_, fixed) = run(plain), run(rng_dropout_wrong), run(rng_dropout_fixed)
    same = "逐位相同" if torch.equal(loss, wrong_loss) else "也不同"
    error = relative(wrong, want)
    return Result(error, relative(fixed, want), 0, f"没有报错；与不做检查点相比，loss {same}，梯度的相对 rms 差 {error:.1%}")


def keyword_trap(lab: Lab) -> Result:
    """Full recompute, down_proj included; and does this project's audit see it?"""
    model = lab.model()
    with quiet() as caught:
        keyword_trap_wrong(model, lab.ids)
    try:
        policies.audit(model)
        verdict = "policies.audit 没有发现"
    except policies.PolicyError:
        verdict = "policies.audit 拒绝这个模型"

    expected = lab.recomputed(default)
    result = _again(lab, keyword_trap_wrong, keyword_trap_fixed, expected, "退回 reentrant")
    note = f"（默认设置 {expected:g} 个）；警告：{said(caught, 'use_reentrant')}；{verdict}"
    return Result(result.wrong, result.fixed, expected, result.outcome + note)


def reentrant_frozen(lab: Lab) -> Result:
    """Trainable parameters that got no gradient."""

    def missing(step):
        model, ids = lab.inputs()
        with quiet() as caught:
            step(model, ids)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return trainable, [name for name, p in trainable.items() if p.grad is not None], said(caught, "requires_grad")

    trainable, reached, warning = missing(reentrant_frozen_wrong)
    wrong = len(trainable) - len(reached)
    outcome = f"没有报错；{len(trainable)} 个可训练参数里 {wrong} 个没有梯度，有的只是 {'、'.join(reached)}；警告：{warning}"
    trainable, reached, _ = missing(reentrant_frozen_fixed)
    return Result(wrong, len(trainable) - len(reached), 0, outcome)


def op_packet(lab: Lab) -> Result:
    """Matmuls that a policy was to save."""
    return _again(lab, op_packet_wrong, op_packet_fixed, 0, "torch.ops.aten.mm 一次也没有匹配")


def cpu_offload_policy(lab: Lab) -> Result:
    """Matmuls that a policy was to offload."""
    if not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"):
        raise Unavailable(f"torch {torch.__version__} 没有 MUST_CPU_OFFLOAD")
    return _again(lab, cpu_offload_policy_wrong, cpu_offload_policy_fixed, 0, "没有卸载，按重算处理")


def missing_attention(lab: Lab) -> Result:
    """Attention forwards per layer; the operator that runs is the one that was seen."""
    seen = lab.count(plain).attentions()
    wrong = lab.count(missing_attention_wrong).attentions().total() / lab.layers
    fixed = lab.count(missing_attention_fixed).attentions().total() / lab.layers
    names = "、".join(map(str, seen)) or "不是融合算子"
    known = "在列表里" if wrong == 1 else "不在列表里"
    outcome = f"没有报错；实际运行的 attention 是 {names}，{known}，每层执行 {wrong:g} 次"
    return Result(wrong, fixed, seen.total() / lab.layers, outcome)


def kv_cache(lab: Lab) -> Result:
    """Does the backward raise?"""
    from transformers import DynamicCache

    def inputs():
        attention = lab.model().model.layers[0].self_attn
        return attention, lab.hidden(torch.bfloat16, attention.config.hidden_size)[None], DynamicCache()

    return _raises(kv_cache_wrong, kv_cache_fixed, inputs)


def sdpa_context(lab: Lab) -> Result:
    """Does the backward raise?"""
    return _raises(sdpa_context_wrong, sdpa_context_fixed, lab.inputs)


def second_backward(lab: Lab) -> Result:
    """Does the second backward raise? And where a stored output that early stop has left over fits the next operator?"""
    weights = [torch.randn(64, 64, device=lab.device, requires_grad=True) for _ in range(2)]
    x = torch.randn(8, 64, device=lab.device)

    def two_losses(**how):
        for weight in weights:
            weight.grad = None
        y = checkpoint(lambda x: (x @ weights[0]).relu() @ weights[1], x, use_reentrant=False, **how)
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        return {str(i): weight.grad for i, weight in enumerate(weights)}

    result, want = _raises(second_backward_wrong, second_backward_fixed, lab.inputs), two_losses()
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    if attempt(functools.partial(two_losses, context_fn=contexts))[0]:
        note = "同样报错"
    else:
        error = relative(two_losses(context_fn=contexts), want)
        note = f"没有报错，梯度的相对 rms 差 {error:.1%}（提前停止没取走的输出，被当成下一次重算的结果）"
    return Result(result.wrong, result.fixed, result.expected, f"{result.outcome}；换成只有两个方阵的区间，{note}")


def eval_off(lab: Lab) -> Result:
    """Matmuls that run again: none means that everything was stored."""
    mib = [lab.stored(step) / 2**20 for step in (eval_off_wrong, plain, eval_off_fixed)]
    why = "检查点没有生效，为反向存下 {:.3g} MiB（不做检查点 {:.3g} MiB，检查点生效 {:.3g} MiB）".format(*mib)
    return _again(lab, eval_off_wrong, eval_off_fixed, lab.recomputed(default), why)


def bf16_deterministic(lab: Lab) -> Result:
    """Elements of a recomputed tensor that are not the forward's, and gradients of a region without such operators."""
    emulated = lab.device.type == "cpu"

    def changed(step):
        block = lab.model().model.layers[0].mlp
        torch.manual_seed(0)
        hidden = lab.hidden(torch.bfloat16, block.hidden_size)
        document = torch.arange(len(hidden), device=lab.device) * 4 // len(hidden)
        with AnyOrder() if emulated else contextlib.nullcontext():
            forward, recomputed = step(block, hidden, document)
        return int((forward != recomputed).sum()), forward.numel()

    def whole(step):
        model = lab.model()
        with deterministic():
            step(model, lab.ids)
        return gradients(model)

    wrong, total = changed(bf16_deterministic_wrong)
    with deterministic():
        ordered, _ = changed(bf16_deterministic_wrong)
    want = whole(plain)
    bits = differing(whole(default), want)
    outcome = (
        f"没有报错；{'CPU 上以随机次序逐行相加模拟 GPU 的 atomic add，' if emulated else ''}{total} 个元素里 {wrong} 个与前向不同，"
        f"use_deterministic_algorithms 之下 {ordered} 个。"
        f"算子都确定时，整个 bf16 模型做检查点，{len(want)} 个参数里 {bits} 个梯度与不做时不同"
    )
    return Result(wrong, changed(bf16_deterministic_fixed)[0], 0, outcome)


def bf16_autocast(lab: Lab) -> Result:
    """Gradients of an fp32 block under bf16 autocast that are not the same bits as without checkpointing."""

    def run(step):
        block = lab.model(torch.float32).model.layers[0].mlp
        torch.manual_seed(0)
        hidden = lab.hidden(torch.float32, block.hidden_size)
        with deterministic():
            step(block, hidden)
        return gradients(block) | {"hidden": hidden.grad}

    def stored(block, hidden):
        with torch.autocast(hidden.device.type, torch.bfloat16):
            out = block(hidden)
        out.float().square().mean().backward()

    want, wrong, fixed = run(stored), run(bf16_autocast_wrong), run(bf16_autocast_fixed)
    n = differing(wrong, want)
    outcome = f"没有报错；前向 bf16，重算 fp32，{len(want)} 个梯度里 {n} 个不同，相对 rms 差 {relative(wrong, want):.2%}"
    return Result(n, differing(fixed, want), 0, outcome)


def liger_double(lab: Lab) -> Result:
    """Matrix products of one loss."""

    def run(step):
        model = lab.model()
        torch.manual_seed(0)
        hidden = lab.hidden(torch.bfloat16, model.config.hidden_size)
        with Count() as count:
            step(model.lm_head.weight, hidden, lab.ids.flatten())
        return count.matmuls()

    def forward(weight, hidden, labels):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)

    wrong, fixed, expected = run(liger_double_wrong), run(liger_double_fixed), run(forward)
    return Result(wrong, fixed, expected, f"没有报错；只做前向就有 {expected} 个矩阵乘，放进检查点后一步 {wrong} 个")


def liger_tiled(lab: Lab) -> Result:
    """Times that a layer's MLP runs forward, all of its tiles counted as one."""

    def run(step, layers=True):
        model, calls = lab.model(), 0

        def count(*_):
            nonlocal calls
            calls += 1

        for layer in model.model.layers:
            layer.mlp.gate_proj.register_forward_hook(count)
        with quiet():
            step(model, lab.ids)
        return calls / lab.layers / 4  # tiles

    def alone(model, ids):
        for layer in model.model.layers:
            layer.mlp = tiled(layer.mlp)
        plain(model, ids)

    wrong, expected = run(liger_tiled_wrong), run(alone)
    return Result(wrong, run(liger_tiled_fixed), expected, f"没有报错；MLP 前向每步执行 {wrong:g} 次，不加检查点时 {expected:g} 次")


@dataclass(frozen=True)
class Case:
    """One pitfall as readers see it."""

    measure: Callable[[Lab], Result]
    title: str
    symptom: str
    metric: str

    @property
    def name(self) -> str:
        """Name of its section."""
        return self.measure.__name__


_MATMULS, _RAISED = "每层重算的矩阵乘", "反向抛出的异常"
CASES = (
    Case(rng_dropout, "区间里有 dropout，却关了 RNG 重放", "静默", "梯度对不做检查点时的相对 rms 差"),
    Case(keyword_trap, "参数字典漏写 use_reentrant", "静默", _MATMULS),
    Case(reentrant_frozen, "reentrant 加冻结的 embedding", "静默", "没有梯度的可训练参数"),
    Case(op_packet, "SAC 规则里写的是 OpOverloadPacket", "静默", _MATMULS),
    Case(cpu_offload_policy, "eager 下用 CPU_OFFLOAD 策略", "静默", _MATMULS),
    Case(missing_attention, "内置算子列表里没有实际运行的 attention", "静默", "每层 attention 前向的次数"),
    Case(kv_cache, "区间里写 KV cache", "报错", _RAISED),
    Case(sdpa_context, "sdpa_kernel 只包住前向", "报错", _RAISED),
    Case(second_backward, "SAC 区间反向两次", "报错", _RAISED),
    Case(eval_off, "eval() 连检查点一起关掉", "静默", _MATMULS),
    Case(bf16_deterministic, "区间里有次序不定的 atomic add", "静默", "重算与前向不同的元素"),
    Case(bf16_autocast, "手写的重算不重放 autocast", "静默", "与不做检查点时不同的梯度"),
    Case(liger_double, "Liger 的融合 loss 放进检查点", "静默", "一步 loss 的矩阵乘"),
    Case(liger_tiled, "整层检查点里再用 Liger 的分块 MLP", "静默", "每层 MLP 前向的次数"),
)


def row(case: Case, lab: Lab) -> dict[str, Any]:
    """Run one case."""
    shown = {"name": case.name, "title": case.title, "symptom": case.symptom, "metric": case.metric}
    try:
        result = case.measure(lab)
    except Unavailable as why:
        return shown | {"outcome": str(why), "wrong": None, "fixed": None, "expected": None, "ok": False}
    finally:
        gc.collect()
    ok = result.wrong != result.expected and result.fixed == result.expected
    outcome = result.outcome if result.wrong != result.expected else f"这里没有出现：{result.outcome}"
    return shown | {
        "outcome": outcome, "wrong": float(result.wrong), "fixed": float(result.fixed), "expected": float(result.expected), "ok": ok,
    }  # fmt: skip


def measure(*, size: str, layers: int, batch: int, sequence: int) -> measure_module.Tables:
    """Run every pitfall and its fix.

    Args:
        size: "8b" (Qwen3-8B's layers, a vocabulary of 512) or "tiny"; both in bf16.
        layers: decoder layers.
        batch, sequence: rows and tokens per row.

    Raises:
        ValueError: unknown size.
    """
    if size not in ("8b", "tiny"):
        raise ValueError(f"size={size!r}: give '8b' or 'tiny'")
    device = measure_module.device()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(qwen3.TINY["vocab_size"], (batch, sequence), generator=generator).to(device)
    lab = Lab(size, layers, ids, device)
    # Liger's kernels need a GPU.
    cases = [case for case in CASES if device.type == "cuda" or not case.name.startswith("liger")]
    rows = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for i, case in enumerate(cases):
            measure_module.progress(case.name, i, len(cases))
            rows.append(row(case, lab))
    return {"pitfalls": rows}


if __name__ == "__main__":
    measure_module.cli(EXPERIMENT, measure)
