"""Business gate: what an accuracy difference means, and MMLU/GSM8K under both sets of kernels.

Standard errors (any machine):

    python -m snippets.precision.business

The benchmarks themselves, each item answered by the same weights under transformers' kernels and
under ours, compared item by item (needs a GPU, ``pip install -r requirements-eval.txt``, the data
sets, and weights):

    QWEN3_8B=Qwen/Qwen3-8B python -m snippets.precision.business --tasks mmlu,gsm8k

Exit code: 0 no significant difference, 1 a significant one, 2 something is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snippets.measure import Tables, cli

EXPERIMENT = {
    "title": "MMLU 与 GSM8K 能分辨多小的差异",
    "needs": "cpu",
    "memory_gib": 0,
    "minutes": 1,
    "full": {
        "benchmarks": [["MMLU", 14042, 0.75], ["GSM8K", 1319, 0.88]],
        "discordant": [0.01, 0.02, 0.05, 0.1],
    },
    "smoke": {"benchmarks": [["GSM8K", 1319, 0.88]], "discordant": [0.05]},
    "tables": {
        "standard_error": {
            "benchmark": "",
            "items": "1",
            "accuracy": "1",
            "standard_error": "1",
            "smallest_unpaired": "1",
        },
        "paired": {"benchmark": "", "items": "1", "discordant": "1", "smallest_paired": "1"},
    },
}

Z95 = 1.959963984540054  # two-sided 5 % point of the normal distribution


# ---------------------------------------------------------------------------- statistics


def standard_error(accuracy: float, items: int) -> float:
    """Binomial standard error of an accuracy (both as fractions of 1): sqrt(p (1 - p) / n)."""
    if not 0 <= accuracy <= 1 or items < 1:
        raise ValueError(f"accuracy {accuracy} must lie in [0, 1] and items {items} be at least 1")
    return math.sqrt(accuracy * (1 - accuracy) / items)


def smallest_unpaired(accuracy: float, items: int) -> float:
    """Smallest difference of two separately quoted accuracies that is significant at 5 %: 1.96 sqrt(2) SE."""
    return Z95 * math.sqrt(2) * standard_error(accuracy, items)


def smallest_paired(discordant: float, items: int) -> float:
    """Smallest accuracy difference that a paired test on the same items finds significant at 5 %.

    Args:
        discordant: share of items that exactly one of the two models gets right.

    Method: McNemar. With b and c such items, the difference is (b - c) / n and its standard error
    under "no difference" sqrt(b + c) / n. How well the model does cancels out.
    """
    if not 0 <= discordant <= 1 or items < 1:
        raise ValueError(f"discordant {discordant} must lie in [0, 1] and items {items} be at least 1")
    return Z95 * math.sqrt(discordant / items)


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value that both models are equally good.

    Args:
        only_a, only_b: items that only the first (only the second) model gets right. Under equality
            each discordant item is a fair coin, so this is a binomial test; no normal approximation.
    """
    n, k = only_a + only_b, min(only_a, only_b)
    if k < 0:
        raise ValueError(f"counts must not be negative: {only_a}, {only_b}")
    # Integers all the way: the tail stays exact where floating-point powers would underflow.
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / 2**n)


def measure(*, benchmarks: list[list[Any]], discordant: list[float]) -> Tables:
    """Standard errors and smallest detectable differences.

    Args:
        benchmarks: [name, number of items, assumed accuracy] each. The accuracy is an assumption
            that fixes the error's size, not a result.
        discordant: shares of discordant items to compute the paired threshold for.
    """
    return {
        "standard_error": [
            {
                "benchmark": name,
                "items": n,
                "accuracy": p,
                "standard_error": standard_error(p, n),
                "smallest_unpaired": smallest_unpaired(p, n),
            }
            for name, n, p in benchmarks
        ],
        "paired": [
            {"benchmark": name, "items": n, "discordant": q, "smallest_paired": smallest_paired(q, n)}
            for name, n, _ in benchmarks
            for q in discordant
        ],
    }


# -------------------------------------------------------------------------------- lm-eval


class Missing(RuntimeError):
    """Weights, a package or a device that the benchmark run needs is not there."""


def outcomes(results: dict[str, Any], task: str) -> dict[str, dict[tuple[str, Any], bool]]:
    """Right or wrong per item of one finished lm-eval run.

    Args:
        results: what ``lm_eval.simple_evaluate(..., log_samples=True)`` returned.
        task: a task or a group such as "mmlu"; a group's items are those of all its subtasks.

    Returns:
        "metric,filter" (as lm-eval spells it) → {(subtask, item id): right}.

    Raises:
        Missing: no item with an accuracy (``acc`` or ``exact_match``).
    """

    def leaves(name: str) -> Iterable[str]:
        below = results.get("group_subtasks", {}).get(name) or []
        return [leaf for child in below for leaf in leaves(child)] if below else [name]

    found: dict[str, dict[tuple[str, Any], bool]] = {}
    for leaf in leaves(task):
        for sample in results["samples"].get(leaf, []):
            for metric in ("exact_match", "acc"):
                if metric in sample:
                    key = f"{metric},{sample.get('filter', 'none')}"
                    found.setdefault(key, {})[leaf, sample["doc_id"]] = bool(round(float(sample[metric])))
    if not found:
        raise Missing(f"task {task}: lm-eval returned no item with acc or exact_match")
    return found


def compare(task: str, reference: dict[str, Any], candidate: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric of a task: both accuracies, their errors, the paired test.

    Raises:
        ValueError: the two runs didn't answer the same items.
    """
    rows = []
    left, right = outcomes(reference, task), outcomes(candidate, task)
    if left.keys() != right.keys():
        raise ValueError(f"task {task}: the runs have different metrics {sorted(left)} and {sorted(right)}")
    for metric, a in left.items():
        b = right[metric]
        if a.keys() != b.keys():
            raise ValueError(f"task {task}: the two runs answered different items; use one seed and one limit")
        n = len(a)
        only_a = sum(a[k] and not b[k] for k in a)
        only_b = sum(b[k] and not a[k] for k in a)
        p_a, p_b = sum(a.values()) / n, sum(b.values()) / n
        rows.append(
            {
                "task": task,
                "metric": metric,
                "items": n,
                "hf": p_a,
                "ours": p_b,
                "standard_error": standard_error(p_a, n),
                "smallest_unpaired": smallest_unpaired(p_a, n),
                "only_hf": only_a,
                "only_ours": only_b,
                "smallest_paired": smallest_paired((only_a + only_b) / n, n),
                "p": mcnemar(only_a, only_b),
            }
        )
    return rows


def run(
    tasks: list[str],
    *,
    limit: int | None = None,
    batch: int = 8,
    include: str | None = None,
    dtype: Any = None,
    candidate: str = "ours",
) -> list[dict[str, Any]]:
    """Evaluate tasks twice on the weights that QWEN3_8B names, under each set of kernels.

    Args:
        tasks: lm-eval task or group names.
        limit: only the first so many items of each task.
        batch: items per call; the same for both runs, since it changes rounding too.
        include: directory with task YAML files of your own.
        dtype: of the weights; default bf16.
        candidate: the variant compared with "hf" (see ``snippets.variants``).

    Raises:
        Missing: lm-eval or the weights are not there.
    """
    from snippets import qwen3

    name = qwen3.weights()
    if name is None:
        raise Missing(
            f"{qwen3.WEIGHTS} is not set: an accuracy needs trained weights. Set it to a directory or hub id,"
            f" for example {qwen3.WEIGHTS}=Qwen/Qwen3-8B"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise Missing("lm-eval is not installed: pip install -r requirements-eval.txt")
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    from snippets.measure import progress
    from snippets.variants import variant

    model = qwen3.load(dtype=dtype or torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    manager = TaskManager(include_path=include)
    results = {}
    for which in ("hf", candidate):
        progress(f"lm-eval {','.join(tasks)}：{which}")
        with variant(which, model):
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
            results[which] = lm_eval.simple_evaluate(
                lm, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=True, bootstrap_iters=0
            )
    return [row for task in tasks for row in compare(task, results["hf"], results[candidate])]


def main(arguments: list[str] | None = None) -> int:
    """Command line of the benchmark run; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m snippets.precision.business", description="MMLU/GSM8K under transformers' kernels and ours"
    )
    parser.add_argument("--tasks", required=True, help="lm-eval tasks or groups, comma-separated: mmlu,gsm8k")
    parser.add_argument("--limit", type=int, help="only the first so many items of each task")
    parser.add_argument("--batch", type=int, default=8, help="items per call (default 8)")
    parser.add_argument("--include", metavar="DIR", help="directory with task YAML files of your own")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args(arguments)
    try:
        rows = run(args.tasks.split(","), limit=args.limit, batch=args.batch, include=args.include)
    except (Missing, FileNotFoundError) as error:
        print(f"business: {error}", file=sys.stderr)
        return 2
    significant = False
    for r in rows:
        significant |= r["p"] < 0.05
        print(
            f"{r['task']} {r['metric']}: n={r['items']}"
            f"  hf {r['hf']:.2%} ± {r['standard_error']:.2%} (SE)  ours {r['ours']:.2%}\n"
            f"  items that only one gets right: hf {r['only_hf']}, ours {r['only_ours']}; McNemar p = {r['p']:.3g}"
            f" → {'significant' if r['p'] < 0.05 else 'no significant difference'}\n"
            f"  smallest significant difference: paired {r['smallest_paired']:.2%},"
            f" unpaired {r['smallest_unpaired']:.2%}"
        )
    if args.out:
        args.out.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    return int(significant)


if __name__ == "__main__":
    if any(a.startswith("--tasks") for a in sys.argv[1:]):
        sys.exit(main())
    cli(EXPERIMENT, measure)
