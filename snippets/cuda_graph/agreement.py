"""Does a graph give the same results? Fifty training steps against eager, and decoding against transformers.

Training: a graph repeats the kernels of the eager step on the same numbers, so losses, norms and weights have to be equal bit for
bit wherever the kernels are deterministic; learning rate, clipping and accumulation included.

Decoding: this project's decoder rounds at other places than transformers does, so it is judged as Gate 2 judges a kernel: its
log-probabilities may be no further from those in a wider dtype than 1.5 times what transformers' own are. The texts are
prescribed (teacher forcing), since one other token would make all that follow another text. Prompts of different lengths go
through the prefill, and each text is decoded up to the last place of the cache.

    python -m snippets.cuda_graph.agreement            # a CUDA GPU with 80 GiB
    python -m snippets.cuda_graph.agreement --smoke
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing.agreement import SLACK
from snippets.checkpointing.determinism import algorithms
from snippets.checkpointing.recipes import clean, recipe
from snippets.cuda_graph.decoder import Decoder
from snippets.cuda_graph.graphed import GraphError
from snippets.cuda_graph.train_step import TrainStep
from snippets.measure import Tables, cli, progress

EXPERIMENT = {
    "title": "CUDA Graph 的结果与 eager、与 transformers 是否一致",
    "needs": "cuda",
    "memory_gib": 80,
    "minutes": 4,
    "full": {
        "size": "8b",
        "training": {"layers": 4, "steps": 50, "tokens": 512, "recipes": ["hf none", "hf full", "ours none", "ours full"], "micro_batches": [1, 3]},
        "decoding": {"layers": 36, "cases": [[1, 1, 256], [1, 1, 2048], [2, 2, 256], [3, 4, 256], [4, 4, 512], [5, 8, 256], [8, 8, 512], [9, 16, 256], [32, 32, 256]]},
    },
    "smoke": {
        "size": "tiny",
        "training": {"layers": 1, "steps": 2, "tokens": 8, "recipes": ["ours full"], "micro_batches": [1]},
        "decoding": {"layers": 1, "cases": [[2, 2, 9], [1, 2, 9]]},
    },
    "tables": {
        "training": {
            "recipe": "", "micro_batches": "1", "steps": "1", "first_loss": "1", "last_loss": "1", "losses_differing": "1", "norms_differing": "1",
            "parameters": "1", "weights_differing": "1", "ok": "", "failed": "",
        },
        "decoding": {
            "sequences": "1", "bucket": "1", "places": "1", "shortest": "1", "longest": "1", "positions": "1", "rms": "1", "transformers_rms": "1", "ratio": "1",
            "other_tokens": "1", "transformers_other_tokens": "1", "ok": "",
        },
    },
}  # fmt: skip


def model_of(size: str, layers: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.nn.Module:
    """Qwen3 at full or toy width; bf16, or fp32 without a GPU, where Triton's interpreter has no bf16."""
    place = measure_module.device()
    dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    return qwen3.build(layers, dtype, place, seed) if size == "8b" else qwen3.tiny(layers, dtype, place, seed)


# --8<-- [start:training]
def trained(size: str, layers: int, name: str, batches: Tensor, graph: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses and norms ``[steps]`` and the final weights; the learning rate falls with every step."""
    model = model_of(size, layers, seed=3)
    with algorithms("strict"), recipe(name, model) as ready:
        step = TrainStep(model, ready.step, micro_batches=batches.shape[1])
        run = step.captured(batches[0]) if graph else step
        schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda i: 1 / (i + 1))
        seen = []
        for ids in batches:
            seen.append(torch.stack([t.clone() for t in run(ids)]))
            schedule.step()
    losses, norms = torch.stack(seen).unbind(1)
    return losses, norms, [p.detach() for p in model.parameters()]
# --8<-- [end:training]


def compare_training(size: str, layers: int, steps: int, tokens: int, recipes: list[str], micro_batches: list[int]) -> list[dict[str, Any]]:
    """Eager against the graph, each from the same weights over the same batches."""
    rows = []
    vocabulary = (qwen3.QWEN3_8B if size == "8b" else qwen3.TINY)["vocab_size"]
    for name in recipes:
        for micro in micro_batches:
            progress(f"{steps} steps, {name}, {micro} micro-batches")
            ids = torch.randint(0, vocabulary, (steps, micro, 1, tokens), generator=torch.Generator().manual_seed(5)).to(measure_module.device())
            row = {"recipe": name, "micro_batches": micro, "steps": steps}
            losses, norms, weights = trained(size, layers, name, ids, graph=False)
            row |= {"first_loss": losses[0].item(), "last_loss": losses[-1].item(), "parameters": len(weights)}
            try:
                again = trained(size, layers, name, ids, graph=True)
            except GraphError as error:
                rows.append(row | {"losses_differing": None, "norms_differing": None, "weights_differing": None, "ok": False, "failed": str(error)})
                continue
            counts = {
                "losses_differing": int((again[0] != losses).sum()), "norms_differing": int((again[1] != norms).sum()),
                "weights_differing": sum(not torch.equal(a, b) for a, b in zip(again[2], weights, strict=True)),
            }  # fmt: skip
            rows.append(row | counts | {"ok": not any(counts.values()), "failed": ""})
            del weights, again
            clean()
    return rows


def compare_decoding(size: str, layers: int, cases: list[list[int]]) -> list[dict[str, Any]]:
    """Log-probabilities of prescribed texts, ours and transformers', against a wider dtype."""
    model = model_of(size, layers).eval()
    wide = model_of(size, layers, torch.float32 if model.dtype == torch.bfloat16 else torch.float64).eval()
    wide.load_state_dict(model.state_dict())
    rows = []
    for sequences, bucket, places in cases:
        progress(f"decoding {sequences} in the bucket of {bucket}, {places} places")
        rows.append(_decoded(model, wide, sequences, bucket, places))
        clean()
    return rows


# --8<-- [start:decoding]
@torch.no_grad()
def _decoded(model: torch.nn.Module, wide: torch.nn.Module, sequences: int, bucket: int, places: int) -> dict[str, Any]:
    place = model.lm_head.weight.device
    texts = torch.randint(0, model.config.vocab_size, (sequences, places + 1), generator=torch.Generator().manual_seed(places + sequences)).to(place)
    lengths = [max(1, places // 2 - 5 * i % (places // 2)) for i in range(sequences)]  # of the prompts
    decoder = Decoder(model, bucket, places)
    if place.type == "cuda":
        decoder.capture(bucket)
    decoder.prefill([texts[i, :n] for i, n in enumerate(lengths)])
    decoder.tokens[:sequences], decoder.given[:sequences] = texts, places + 1
    logits: list[list[Tensor]] = [[] for _ in texts]
    for step in range(places - min(lengths)):
        decoder.decode(sequences, 1)
        for i, n in enumerate(lengths):
            if n + step < places and _looked_at(n + step, places):
                logits[i].append(decoder.logits[i].clone())
    ours = theirs = count = 0.0
    other = [0, 0]
    for i, n in enumerate(lengths):
        at = torch.tensor([p for p in range(n, places) if _looked_at(p, places)], device=place)
        true, reference = (m(texts[i : i + 1, :places], attention_mask={"full_attention": None}, use_cache=False, logits_to_keep=at).logits[0] for m in (wide, model))
        got = torch.stack(logits[i])
        true, reference, got = (t.to(true.dtype).log_softmax(-1) for t in (true, reference, got))
        ours, theirs, count = ours + (got - true).square().sum().item(), theirs + (reference - true).square().sum().item(), count + got.numel()
        for k, t in enumerate((got, reference)):
            other[k] += int((t.argmax(-1) != true.argmax(-1)).sum())
    rms, transformers_rms = (ours / count) ** 0.5, (theirs / count) ** 0.5
    ratio = rms / transformers_rms if transformers_rms else None
    return {
        "sequences": sequences, "bucket": bucket, "places": places, "shortest": min(lengths), "longest": max(lengths),
        "positions": sum(map(len, logits)), "rms": rms, "transformers_rms": transformers_rms, "ratio": ratio,
        "other_tokens": other[0], "transformers_other_tokens": other[1], "ok": ratio is not None and ratio <= SLACK,
    }  # fmt: skip
# --8<-- [end:decoding]


def _looked_at(position: int, places: int) -> bool:
    """Every eighth position and the last ones: a text's whole logits would take more memory than the model."""
    return position % 8 == 0 or position >= places - 8


def measure(*, size: str, training: dict[str, Any], decoding: dict[str, Any]) -> Tables:
    """Compare the captured training step with the eager one, and the decoder with transformers.

    Args:
        size: "8b" or "tiny" for the model's width.
        training: ``layers``, ``steps``, ``tokens`` a micro-batch, ``recipes`` of ``checkpointing.recipes``, numbers of ``micro_batches``.
        decoding: ``layers`` and ``cases`` of [sequences, captured batch size, places of the cache].

    Returns:
        ``training``: steps whose loss or norm and parameters whose final value differ in any bit. ``decoding``: rms of the
        log-probabilities' error, ours and transformers', their ratio, and how often the most probable token is another than in
        the wider dtype.
    """
    return {"training": compare_training(size, **training), "decoding": compare_decoding(size, **decoding)}


if __name__ == "__main__":
    cli(EXPERIMENT, measure)
