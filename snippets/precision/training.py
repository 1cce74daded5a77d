"""Gate 3 for real: Qwen3-8B trained for 1000 steps, once with transformers' own modules and once with ours.

Same initial weights, same sequences in the same order, same optimiser; only the kernels differ. The
two runs follow each other in one process and reuse one model's memory, so each run has the device
to itself. Afterwards the weights that the Hugging Face run left are evaluated under both sets of
kernels: held-out loss, teacher-forced log-probability of every token, first divergence of greedy
generation. What "normal" looks like comes from the same model at another batch size, which changes
nothing but the order of additions inside the matrix products.

Set-up: see ``loop``. Weights are random unless QWEN3_8B names a checkpoint.

    python -m snippets.precision.training [--smoke] [--json FILE]
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from snippets import qwen3
from snippets.measure import MeasureError, Tables, cli, progress
from snippets.precision import corpus
from snippets.precision.loop import Run, finite, forward, make, summary_rows, train
from snippets.variants import variant

EXPERIMENT = {
    "title": "1000 步训练与业务指标：Qwen3-8B 全 36 层",
    "needs": "cuda",
    "memory_gib": 79,
    "minutes": 8,
    "full": {
        "model": "8b",
        "layers": 36,
        "variants": ["ours", "hf"],
        "steps": 1000,
        "tokens": 512,
        "rate": 1e-4,
        "warmup": 100,
        "seed": 0,
        "held_out": 32,
        "prompts": 8,
        "prompt_tokens": 64,
        "new_tokens": 512,
        "other_batch": 4,
    },
    "smoke": {
        "model": "tiny",
        "layers": 2,
        "variants": ["ours", "hf"],
        "steps": 4,
        "tokens": 16,
        "rate": 1e-3,
        "warmup": 2,
        "seed": 0,
        "held_out": 4,
        "prompts": 4,
        "prompt_tokens": 8,
        "new_tokens": 6,
        "other_batch": 2,
    },
    "tables": {
        "loss": {"variant": "", "step": "1", "loss": "nat"},
        "grad_norm": {"variant": "", "step": "1", "norm": "1"},
        "summary": {
            "variant": "",
            "first_loss": "nat",
            "last_mean_loss": "nat",
            "paired_first": "nat",
            "paired_mean": "nat",
            "paired_mean_abs": "nat",
            "paired_max_abs": "nat",
            "peak_gib": "GiB",
            "weights": "",
        },
        "business": {
            "pair": "",
            "tokens": "1",
            "loss_reference": "nat",
            "loss_candidate": "nat",
            "loss_difference": "nat",
            "logprob_reference": "nat",
            "logprob_mean_difference": "nat",
            "logprob_mean_abs_difference": "nat",
            "logprob_max_abs_difference": "nat",
            "top1_agreement": "1",
        },
        "generation": {
            "pair": "",
            "prompt": "1",
            "new_tokens": "1",
            "first_divergence": "1",
            "gap": "nat",
            "verdict": "",
        },
    },
    "data": ["snippets/precision/data/tokens.npy.xz"],
}

# ------------------------------------------------------------------------- business gate


@dataclass
class Evaluation:
    """Teacher-forced evaluation: log-probability of every true token and the most likely token.

    ``logprob`` fp32 and ``top1`` int64, both CPU [sequences, tokens - 1]; ``loss`` is the mean of
    the model's own loss (nat), so it runs through the patched cross-entropy.
    """

    loss: float
    logprob: torch.Tensor
    top1: torch.Tensor


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: torch.Tensor, batch: int = 1) -> Evaluation:
    """Evaluate token ids [sequences, tokens] with ``batch`` sequences a call.

    The log-probabilities are computed here, in fp32 from the model's logits, the same way for every
    variant: what differs between two evaluations then comes from the model.
    """
    model.eval()
    where = next(model.parameters()).device
    losses, logprobs, tops = [], [], []
    for chunk in rows.split(batch):
        ids = chunk.to(where)
        # Two passes: a fused cross-entropy may leave its gradient in the logits' memory.
        losses.append(forward(model, ids, ids).loss.float() * len(chunk))
        for logits, true in zip(forward(model, ids).logits, ids, strict=True):  # one by one bounds the fp32 copy
            logits = logits[:-1].float()
            picked = logits.gather(1, true[1:, None])[:, 0]
            logprobs.append(picked - logits.logsumexp(1))
            tops.append(logits.argmax(1))
    return Evaluation(
        float(torch.stack(losses).sum() / len(rows)), torch.stack(logprobs).cpu(), torch.stack(tops).cpu()
    )


def business_row(pair: str, reference: Evaluation, candidate: Evaluation) -> dict[str, Any]:
    """One row of the business table: candidate against reference on the same weights and tokens."""
    difference = candidate.logprob - reference.logprob
    return {
        "pair": pair,
        "tokens": difference.numel(),
        "loss_reference": finite(reference.loss),
        "loss_candidate": finite(candidate.loss),
        "loss_difference": finite(candidate.loss - reference.loss),
        "logprob_reference": finite(reference.logprob.mean()),
        "logprob_mean_difference": finite(difference.mean()),
        "logprob_mean_abs_difference": finite(difference.abs().mean()),
        "logprob_max_abs_difference": finite(difference.abs().max()),
        "top1_agreement": float((candidate.top1 == reference.top1).float().mean()),
    }


@torch.no_grad()
def greedy(model: torch.nn.Module, prompts: torch.Tensor, new_tokens: int, batch: int) -> torch.Tensor:
    """Greedy continuation with a key-value cache; stop tokens are not heeded, so lengths are equal.

    Args:
        prompts: token ids [prompts, prompt tokens], all of one length (no padding, so no mask).
        batch: prompts decoded together.

    Returns:
        Token ids on the CPU, int64 [prompts, new_tokens].
    """
    from transformers import DynamicCache

    model.eval()
    where = next(model.parameters()).device
    texts = []
    for chunk in prompts.split(batch):
        cache = DynamicCache(config=model.config)
        ids, new = chunk.to(where), []
        for _ in range(new_tokens):
            out = model(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                attention_mask={"full_attention": None},
                logits_to_keep=1,
            )
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            new.append(ids)
        texts.append(torch.cat(new, 1))
    return torch.cat(texts).cpu()


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ; None where the shorter is a prefix of the longer."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def generation_rows(
    pair: str, model: torch.nn.Module, prompts: torch.Tensor, reference: torch.Tensor, candidate: torch.Tensor
) -> list[dict[str, Any]]:
    """Where two greedy texts part, and how close the choice was there.

    ``gap`` is log p(reference's token) - log p(candidate's token) under the reference model after
    the common prefix: near zero means that the two texts parted at a tie, which any rounding flips.
    """
    rows = []
    for i, (prompt, a, b) in enumerate(zip(prompts, reference, candidate, strict=True)):
        at = first_divergence(a.tolist(), b.tolist())
        gap = None
        if at is not None:
            prefix = torch.cat([prompt, a[:at]])[None].to(next(model.parameters()).device)
            with torch.no_grad():
                logits = forward(model, prefix, logits_to_keep=1).logits[0, -1].float()
            gap = finite(logits[a[at]] - logits[b[at]])
        verdict = f"{len(a)} 个 token 全同" if at is None else f"第 {at} 个 token 起不同"
        rows.append(
            {"pair": pair, "prompt": i, "new_tokens": len(a), "first_divergence": at, "gap": gap, "verdict": verdict}
        )
    return rows


# ----------------------------------------------------------------------------- experiment


def measure(
    *,
    model: str,
    layers: int,
    variants: list[str],
    steps: int,
    tokens: int,
    rate: float,
    warmup: int,
    seed: int,
    held_out: int,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    other_batch: int,
) -> Tables:
    """Train each variant from the same weights on the same sequences, then compare on the last one's weights.

    Args:
        variants: see ``snippets.variants``; "hf" must be the last, since its weights are the evaluated ones.
        tokens: per step, one sequence. held_out: evaluation sequences of the same length.
        prompts, prompt_tokens, new_tokens: greedy generation from the start of held-out sequences.
        other_batch: batch size of the baseline comparison, different from the usual one
            (1 for evaluation, ``prompts`` for generation).
    """
    if variants[-1] != "hf" or "ours" not in variants:
        raise MeasureError('variants must contain "ours" and end with "hf", whose weights are evaluated')
    if other_batch in (1, prompts):
        raise MeasureError(f"other_batch {other_batch} must differ from 1 and from prompts ({prompts})")
    net, vocab = make(model, layers, seed)
    trained = model == "8b" and layers == qwen3.QWEN3_8B["num_hidden_layers"] and qwen3.weights() is not None
    # A checkpoint cannot be drawn again from a seed: keep it on the host between the runs.
    saved = {n: p.detach().cpu().clone() for n, p in net.named_parameters()} if trained else None
    rows = corpus.sequences("train", steps, tokens, seed=seed, vocab=vocab)

    runs: dict[str, Run] = {}
    for name in variants:
        if saved is None:
            qwen3.initialize(net, seed)
        else:
            with torch.no_grad():
                for key, parameter in net.named_parameters():
                    parameter.copy_(saved[key])
        with variant(name, net):
            runs[name] = train(net, rows, rate=rate, warmup=warmup, name=name)
        if not runs[name].losses.isfinite().all():
            raise MeasureError(f"{name}: the loss became NaN or infinite; lower the rate ({rate})")

    gc.collect()
    progress("业务指标：留出集")
    held = corpus.sequences("held-out", held_out, tokens, vocab=vocab)
    start = held[:prompts, :prompt_tokens]
    usual = evaluate(net, held)
    other = evaluate(net, held, batch=other_batch)
    progress("业务指标：生成（hf）")
    text = greedy(net, start, new_tokens, batch=prompts)
    text_other = greedy(net, start, new_tokens, batch=other_batch)
    progress("业务指标：生成（ours）")
    with variant("ours", net):
        ours = evaluate(net, held)
        text_ours = greedy(net, start, new_tokens, batch=prompts)
    same, kernels = "hf 换批大小 / hf", "ours / hf"
    source = f"{qwen3.weights()}" if trained else f"随机初始化（seed {seed}）"
    return {
        "loss": [
            {"variant": n, "step": i, "loss": float(x)} for n, r in runs.items() for i, x in enumerate(r.losses, 1)
        ],
        "grad_norm": [
            {"variant": n, "step": i, "norm": finite(x)}
            for n, r in runs.items()
            for i, x in enumerate(r.norms, 1)
            if i == 1 or i % 50 == 0
        ],
        "summary": summary_rows(runs, "hf", source),
        "business": [business_row(kernels, usual, ours), business_row(same, usual, other)],
        "generation": generation_rows(kernels, net, start, text, text_ours)
        + generation_rows(same, net, start, text, text_other),
    }


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
