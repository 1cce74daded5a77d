"""Plan what to store for a memory budget, exactly, from measured costs.

    python -m snippets.checkpointing.plan --budget-gib 24 --batch 1 --seq 4096

prints the fastest configuration whose predicted peak fits, what it is predicted to cost, and the lines to
paste. The budget is for activations: the peak above weights and gradients. With ``--host-gib`` some tensors may
wait in pinned host memory, at most as much of it as given.

The model. A layer under ``Keep`` stores its input, the attention's output and log-sum-exp, and the tensors
kept; each dropped tensor costs the time of its recipe once, since the backward asks for each of them exactly
once. A layer under ``Block`` stores its input and costs one forward. The backward of layer i peaks at what
layers 1..i store plus the gradient that comes in, the layer's own workspace, and what it has to make again in its
MLP half (the attention half comes later, when the MLP's tensors are gone). The loss peaks at everything stored plus the
last norm's input and output and its slice. The embedding's dense gradient comes when nothing is stored any more.

A tensor in host memory costs what its two copies take from the computation beside them, as long as a layer sends no
more than the bus carries in the time of its forward, and brings no more back than in that of its backward. In the
backward of layer i its own and those of the last layer before that sends are on the device. To see only one layer at a
time, the search is done once for each bound on the bytes that a layer sends, which every layer is charged for its
neighbour. Limited host memory is given to all layers in equal shares, or to as many as can send up to the bound.

The rest of the search is a dynamic program over the layers with the bytes stored so far as state, in units that divide
every size: exact, with no rounding; with host memory, exact for each of those bounds and shares.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from snippets.checkpointing.offload import pinned_bytes
from snippets.checkpointing.on_demand import TENSORS
from snippets.checkpointing.policies import Block, Keep, Nothing, Policy

GIB = 2**30
MLP_HALF = frozenset({"h2", "ln2", "gate", "up", "product"})
SENT = ("q", "k", "v", "h2", "gate", "up")  # by matrix products; the others are made again in less time than they take on the bus
BUS_SHARE = 0.9  # of a layer's time that its copies may take


class PlanError(ValueError):
    """No plan: costs that don't fit the question, or a budget that nothing fits."""


@dataclass(frozen=True, eq=False)
class Costs:
    """What ``costs`` measured for one batch × sequence, in bytes and µs."""

    layers: int
    input_bytes: int  # a layer's input
    attention_bytes: int  # output and log-sum-exp
    tensors: Mapping[str, tuple[int, float]]  # name → (bytes, time to make it with its helpers)
    layer_us: float  # forward and backward of a layer that stores everything
    block_us: float  # the same as a block
    loss_us: float
    workspace_bytes: int  # of a layer's backward, above what it has stored
    block_workspace_bytes: int
    loss_bytes: int  # with the last norm's input and output
    ends_us: float  # embedding and last norm, forward and backward
    ends_bytes: int
    send_bytes: int = 0  # what the bus carries beside a layer, out and back; 0: not measured
    sent_us_per_byte: float = 0.0  # what the copies out and back take from the computation

    @classmethod
    def read(cls, tables: Mapping[str, Sequence[Mapping[str, Any]]], batch: int, sequence: int, layers: int = 36) -> Costs:
        """From the tables of ``costs.measure``.

        Raises:
            PlanError: that shape was not measured; the message lists those that were.
        """

        def of(table: str, key: str) -> dict[str, Mapping[str, Any]]:
            return {r[key]: r for r in tables[table] if (r["batch"], r["sequence"]) == (batch, sequence)}

        tensors, parts = of("tensors", "tensor"), of("parts", "part")
        if not tensors:
            known = ", ".join(dict.fromkeys(f"{r['batch']}×{r['sequence']}" for r in tables["tensors"]))
            raise PlanError(f"no costs for {batch}×{sequence}; measured are {known}. Measure it: drop --costs on a GPU")
        made = {name: (int(tensors[name]["stored_bytes"]), tensors[name]["ps_per_byte"] * tensors[name]["stored_bytes"] / 1e6)
                for name in TENSORS}  # fmt: skip
        if not all(size > 0 and 0 <= us < math.inf for size, us in made.values()):
            raise PlanError("these costs hold a tensor without bytes or time; measure them again")
        stored = sum(size for size, _ in made.values()) + int(tensors["attention"]["stored_bytes"])
        boundary = int(tensors["ln1"]["stored_bytes"])
        host = {r["direction"]: r for r in tables.get("host", ())}
        for r in host.values():
            if not (math.isfinite(r["bytes"]) and r["bytes"] > 0 and 0 < r["median_us"] < math.inf and 0 <= r["lost_us"] < math.inf):
                raise PlanError(f"these costs hold a copy {r['direction']} of {r['bytes']} bytes in {r['median_us']} µs; measure them again")
        meanwhile = {"to_host": parts["forward"]["median_us"], "from_host": parts["layer"]["median_us"] - parts["forward"]["median_us"]}
        carried = [BUS_SHARE * us * host[d]["bytes"] / host[d]["median_us"] for d, us in meanwhile.items() if host]
        return cls(
            layers=layers, input_bytes=boundary,
            attention_bytes=int(tensors["attention"]["stored_bytes"]), tensors=made,
            layer_us=parts["layer"]["median_us"], block_us=parts["block"]["median_us"], loss_us=parts["loss"]["median_us"],
            workspace_bytes=max(0, int(parts["layer"]["peak_bytes"]) - stored) + boundary,
            block_workspace_bytes=int(parts["block"]["peak_bytes"]) + boundary,
            loss_bytes=int(parts["loss"]["peak_bytes"]) + 2 * boundary,
            ends_us=parts["ends"]["median_us"], ends_bytes=int(parts["ends"]["peak_bytes"]) + boundary,
            send_bytes=max(0, int(min(carried, default=0))), sent_us_per_byte=sum(r["lost_us"] / r["bytes"] for r in host.values()),
        )  # fmt: skip

    @property
    def everything_us(self) -> float:
        """Forward and backward with everything stored."""
        return self.layers * self.layer_us + self.loss_us + self.ends_us


@dataclass(frozen=True)
class Option:
    """One policy for one layer: bytes stored after its forward, bytes on top in its backward, extra time in µs, bytes sent
    to the host, and the pinned memory that those take there."""

    policy: Policy
    stored: int
    workspace: int
    extra_us: float
    sent: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class Plan:
    """One option per layer, with the predicted peak above weights and gradients and the predicted step time."""

    options: tuple[Option, ...]
    peak_bytes: int
    step_us: float

    @property
    def policies(self) -> list[Policy]:
        """What ``policies.apply`` takes."""
        return [o.policy for o in self.options]

    @property
    def host_bytes(self) -> int:
        """Pinned host memory."""
        return sum(o.pinned for o in self.options)


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every subset, the empty one first."""
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


def options(costs: Costs, send: int = 0, pinned: float = math.inf) -> list[Option]:
    """Every policy for a layer that no other one beats in bytes, workspace and time; of those that send at most ``send``
    bytes, which take at most ``pinned`` bytes of the host."""
    found = [Option(Block(), costs.input_bytes, costs.block_workspace_bytes, costs.block_us - costs.layer_us)]
    size = {t: costs.tensors[t][0] for t in TENSORS}
    for away in subsets(SENT):
        sent, held = sum(size[t] for t in away), sum(pinned_bytes(size[t]) for t in away)
        if sent > send or held > pinned:
            continue
        for kept in subsets([t for t in TENSORS if t not in away]):
            dropped = [t for t in TENSORS if t not in kept and t not in away]
            found.append(Option(
                Keep(kept, away) if dropped or away else Nothing(),
                costs.input_bytes + costs.attention_bytes + sum(size[t] for t in kept),
                costs.workspace_bytes + sum(size[t] for t in dropped if t in MLP_HALF) + sent,
                sum(costs.tensors[t][1] for t in dropped) + sent * costs.sent_us_per_byte, sent, held,
            ))  # fmt: skip
    # Of two that cost the same the one that leaves the host alone.
    found.sort(key=lambda o: (o.stored, o.extra_us, o.workspace, o.sent))
    best: list[Option] = []
    for o in found:
        if not any(b.extra_us <= o.extra_us and b.workspace <= o.workspace for b in reversed(best)):
            best.append(o)
    return best


def predict(costs: Costs, chosen: Sequence[Option]) -> Plan:
    """Peak and time of a configuration under the model."""
    stored, peak, coming = 0, 0, 0
    for option in chosen:
        stored += option.stored
        peak = max(peak, stored + option.workspace + coming)
        coming = option.sent or coming
    peak = max(peak, stored + costs.loss_bytes + coming, costs.ends_bytes)
    time = costs.everything_us + sum(o.extra_us for o in chosen)
    return Plan(tuple(chosen), peak, time)


def plan(costs: Costs, budget_bytes: float, host_bytes: float = 0) -> Plan:
    """The fastest configuration whose predicted peak fits the budget.

    Args:
        host_bytes: pinned host memory that it may use besides; infinite for no limit.

    Raises:
        PlanError: not even the smallest configuration fits; the message says what it needs. Or a budget is no number,
            or host memory is offered and the costs don't say what its bus carries.
    """
    if not math.isfinite(budget_bytes):
        raise PlanError(f"a budget of {budget_bytes} bytes: give a finite number")
    if not host_bytes >= 0:
        raise PlanError(f"{host_bytes} bytes of host memory: give a number, 0 for none")
    if host_bytes and not costs.send_bytes:
        raise PlanError("these costs have no copies to the host; measure them again, on a GPU")
    sizes = {sum(costs.tensors[t][0] for t in away) for away in subsets(SENT)}
    alone = options(costs)
    searches = [(0, [alone] * costs.layers)]
    for send in sorted(s for s in sizes if 0 < s <= costs.send_bytes) if host_bytes else ():
        free = options(costs, send)
        some = int(min(costs.layers, host_bytes / max(1, *(o.pinned for o in free))))
        searches.append((send, [free] * some + [alone] * (costs.layers - some)))
        if some < costs.layers:
            searches.append((send, [options(costs, send, host_bytes / costs.layers)] * costs.layers))
    found = [p for send, choices in searches if (p := _within(costs, int(budget_bytes), send, choices))]
    if not found:
        need = min(_least(costs, send, choices) for send, choices in searches)
        raise PlanError(
            f"nothing fits {budget_bytes / GIB:.3g} GiB of activations; the smallest configuration needs {math.ceil(need / GIB * 100) / 100:.2f} GiB."
            " Shorten the sequence or the batch"
        )
    return min(found, key=lambda p: (p.step_us, p.host_bytes))


def _least(costs: Costs, send: int, choices: Sequence[Sequence[Option]]) -> int:
    """The smallest budget that ``_within`` finds something for, in bytes."""

    def fits(budget: int) -> bool:  # storing the least in each layer leaves the most to those behind it
        stored = 0
        for options_ in choices:
            stored = min((s for o in options_ if (s := stored + o.stored) + o.workspace + send <= budget), default=math.inf)
        return stored + costs.loss_bytes + send <= budget and costs.ends_bytes <= budget

    most = costs.ends_bytes + costs.loss_bytes + send + sum(max(o.stored + o.workspace for o in c) for c in choices)
    return bisect.bisect_left(range(most), True, key=fits)


def _within(costs: Costs, budget_bytes: int, send: int, choices: Sequence[Sequence[Option]]) -> Plan | None:
    """The fastest of these options for each layer, with room for ``send`` bytes of a neighbour on top of every layer; None if
    nothing fits."""
    unit = math.gcd(*(o.stored for c in choices for o in c))
    slots = min(budget_bytes, sum(max(o.stored for o in c) for c in choices)) // unit + 1
    time = torch.full((max(slots, 1),), math.inf, dtype=torch.float64)
    time[0] = 0.0
    taken = torch.full((costs.layers, len(time)), -1, dtype=torch.int16)
    for i in range(costs.layers):
        after = torch.full_like(time, math.inf)
        for j, option in enumerate(choices[i]):
            step = option.stored // unit
            # The state after this layer, in slots: what is stored then, plus its workspace, has to fit.
            most = min(len(time), (budget_bytes - option.workspace - send) // unit + 1)
            if most <= step:
                continue
            candidate = time[: most - step] + option.extra_us
            better = candidate < after[step:most]
            after[step:most][better] = candidate[better]
            taken[i, step:most][better] = j
        time = after
    most = min(len(time), (budget_bytes - costs.loss_bytes - send) // unit + 1)
    if budget_bytes < costs.ends_bytes or most <= 0 or not time[:most].isfinite().any():
        return None
    at = int(time[:most].argmin())
    chosen = []
    for i in reversed(range(costs.layers)):
        option = choices[i][int(taken[i, at])]
        chosen.append(option)
        at -= option.stored // unit
    # The search leaves equal layers scattered. Larger workspaces first gives the lowest peak of any order: what comes later
    # stands on more.
    return predict(costs, sorted(chosen, key=lambda o: (-o.workspace, o.stored, o.sent, o.policy.name)))


# --------------------------------------------------------------------------- command line


def lines(policies: Sequence[Policy]) -> str:
    """The code of one micro-step of ``model`` on ``ids`` and ``labels`` under these policies."""
    runs = [(p, len(list(group))) for p, group in itertools.groupby(policies)]
    names = sorted({type(p).__name__ for p in policies})
    parts = []
    for policy, count in runs:
        made = f"{type(policy).__name__}()"
        if isinstance(policy, Keep):
            made = f"Keep({policy.tensors!r}, offload={policy.offload!r})" if policy.offload else f"Keep({policy.tensors!r})"
        parts.append(f"[{made}] * {count}")
    return f"""from snippets.checkpointing.accumulate import accumulate
from snippets.checkpointing.chunked_loss import loss_and_backward
from snippets.checkpointing.policies import {', '.join(names)}, apply
from snippets.kernels import patch

patch(model)
accumulate(model)
apply(model, {' + '.join(parts)})
loss = loss_and_backward(model, ids, labels)"""


def tables(path: Path | None, batch: int, sequence: int) -> tuple[Mapping[str, Any], str]:
    """Costs from a file (``costs --json``, or a record), or measured now; and where they come from.

    Raises:
        PlanError: no file and no GPU, or a file that holds no costs.
    """
    if path is None and torch.cuda.is_available():
        from snippets.checkpointing import costs

        full = costs.EXPERIMENT["full"] | {"shapes": [[batch, sequence]]}
        return costs.measure(**full), f"measured now on {torch.cuda.get_device_name()}"
    if path is None:
        found = sorted(Path("records").glob("*/checkpointing.costs.json"))
        if not found:
            raise PlanError("no GPU to measure on and no record of the costs; give --costs FILE")
        path = found[0]
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return {k: read["tables"][k] for k in ("tensors", "parts")} | {"host": read["tables"].get("host", ())}, f"{path}, {read['device']['name']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path} holds no costs ({type(error).__name__}: {error}); write one with costs --json FILE") from error


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m snippets.checkpointing.plan", description="What to store for a memory budget")
    parser.add_argument("--budget-gib", type=float, required=True, help="for activations: the peak above weights and gradients")
    parser.add_argument("--host-gib", type=float, default=0, help="pinned host memory that tensors may wait in (default: none)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--costs", type=Path, metavar="FILE", help="what costs --json wrote, or a record; else measured on this GPU")
    args = parser.parse_args(arguments)
    if not (math.isfinite(args.budget_gib * GIB) and args.budget_gib > 0 and min(args.batch, args.seq, args.layers) > 0):
        parser.error("--budget-gib, --batch, --seq and --layers must be positive numbers")
    if not args.host_gib >= 0:
        parser.error("--host-gib must be a number of 0 or more")
    try:
        measured, source = tables(args.costs, args.batch, args.seq)
        try:
            costs = Costs.read(measured, args.batch, args.seq, args.layers)
        except KeyError as error:
            raise PlanError(f"{source}: lacks {error}; it is older than this code or of a CPU. Measure again with costs --json") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"{source}: holds values that cannot be costs ({error}). Measure again with costs --json") from error
        best = plan(costs, args.budget_gib * GIB, args.host_gib * GIB)
    except PlanError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    print(f"{args.batch}×{args.seq}, {args.layers} layers, at most {args.budget_gib:g} GiB of activations; costs: {source}\n")
    for policy, group in itertools.groupby(best.policies):
        print(f"  {len(list(group)):3} layers  {policy.name}")
    print(
        f"\npredicted peak {best.peak_bytes / GIB:.2f} GiB above weights and gradients, {best.host_bytes / GIB:.2f} GiB in host memory\n"
        f"predicted time {best.step_us / 1e3:.1f} ms forward and backward, {best.step_us / costs.everything_us - 1:+.1%} of storing everything\n"
    )
    print(lines(best.policies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
