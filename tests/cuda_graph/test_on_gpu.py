"""What needs a device: captures, replays, buckets, log-probabilities in bf16."""

import subprocess
import sys

import pytest
import torch

from snippets import qwen3
from snippets.cuda_graph import buckets, decode, graphed, launch, linears, pitfalls, sweep, trees
from snippets.cuda_graph.decoder import Decoder
from snippets.cuda_graph.graphed import Graphed, GraphError
from snippets.measure import check_tables

pytestmark = pytest.mark.gpu


def prompts_of(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 512, (n,), generator=generator) for n in sizes]


def test_replays_with_other_values_and_shapes():
    both = Graphed(lambda x, y: {"sum": x + y, "product": (x * y).relu()})
    for n in (7, 3):
        both.capture(torch.ones(n, device="cuda"), torch.ones(n, device="cuda"))
    for n in (3, 7, 3):
        x, y = torch.randn(2, n, device="cuda")
        out = graphed.clone(both(x, y))
        torch.testing.assert_close(out["sum"], x + y)
        torch.testing.assert_close(out["product"], (x * y).relu())
    with pytest.raises(GraphError, match=r"not captured for \[5\] float32 cuda:0, \[5\] float32 cuda:0; captured: \[7\]"):
        both(torch.ones(5, device="cuda"), torch.ones(5, device="cuda"))
    with pytest.raises(GraphError, match="float16"):
        both(torch.ones(3, device="cuda").half(), torch.ones(3, device="cuda").half())


@pytest.mark.parametrize("waits", [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x.cpu(), lambda x: x if x.sum() > 0 else -x])
def test_a_wait_is_refused_before_the_capture_and_the_process_goes_on(waits):
    x = torch.ones(4, device="cuda")
    with pytest.raises(GraphError, match=r"waits for the device \(test_on_gpu\.py:\d+: "):
        Graphed(waits).capture(x)
    assert torch.cuda.get_sync_debug_mode() == 0
    again = Graphed(lambda x: torch.nn.functional.dropout(x, 0.5))
    again.capture(x)
    masks = {tuple(again(x).tolist()) for _ in range(20)}
    assert len(masks) > 1  # random numbers go on at each replay


def test_transformers_other_branch_is_refused():
    model = qwen3.build(1, vocab_size=1024).eval()
    ids = torch.randint(0, 1024, (1, 64), device="cuda")

    def forward(ids, mask):
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=False).logits

    with pytest.raises(GraphError, match=r"masking_utils\.py:\d+: .*full_attention"):
        Graphed(lambda ids: forward(ids, None)).capture(ids)
    right = Graphed(lambda ids: forward(ids, {"full_attention": None}))
    right.capture(ids)
    other = torch.randint(0, 1024, (1, 64), device="cuda")
    torch.testing.assert_close(right(other), forward(other, {"full_attention": None}))


@pytest.mark.parametrize("module", [buckets, decode, launch, linears, pitfalls, sweep, trees], ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_each_experiment_runs_small(module):
    """All that only a device can do: a first run of minutes is no place to find a typing error."""
    tables = module.measure(**module.EXPERIMENT["smoke"])
    check_tables(module.EXPERIMENT["tables"], tables)
    rows = [row for table in tables.values() for row in table]
    assert rows and not [row for row in rows if row.get("failed") or row.get("ok") is False]


BREAKS = """
import torch
from snippets.cuda_graph.graphed import CaptureFailed, Graphed

x, stream = torch.ones(4, device="cuda"), torch.cuda.current_stream()

def breaks(x):
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return x * 2

try:
    Graphed(breaks, same_operators=False).capture(x)
except CaptureFailed as error:
    print(error, "| the stream is", "as before" if torch.cuda.current_stream() == stream else "another")
"""


def test_a_capture_that_breaks_leaves_the_stream_and_says_why():
    run = subprocess.run([sys.executable, "-c", BREAKS], capture_output=True, text=True, timeout=120)  # it spoils its process
    assert "not permitted when stream is capturing" in run.stdout and "the stream is as before" in run.stdout, run.stderr[-2000:]


def test_what_the_warm_up_changed_is_put_back():
    total = torch.zeros((), device="cuda")
    add = Graphed(lambda x: total.add_(x.sum()), restore=total.zero_)
    add.capture(torch.ones(2, device="cuda"))
    assert total.item() == 0
    add(torch.full((2,), 3.0, device="cuda"))
    assert total.item() == 6


@pytest.mark.parametrize("pdl", [False, True])
def test_graphs_give_the_tokens_of_the_eager_steps_in_every_bucket(pdl):
    net = qwen3.build(2, vocab_size=4096).eval()
    prompts = [p.cuda() % 4096 for p in prompts_of(5, 60, 64, 130, 7, 9)]
    eager = Decoder(net, batch=8, places=200, pdl=False)
    graphed = Decoder(net, batch=8, places=200, pdl=pdl)
    graphed.capture(1, 2, 4, 8)
    for count in (1, 2, 4):  # as many as the bucket has room for: elsewhere another matrix product may order its sums otherwise
        want, got = eager.generate(prompts[:count], 32), graphed.generate(prompts[:count], 32)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (4, 4), (8, 8), (3, 4), (6, 8)])
def test_log_probabilities_on_a_gpu(count, bucket):
    """Against fp32: no further from it than transformers' own bf16, times Gate 2's slack; also where a bucket has rows too many."""
    places = 150
    net = qwen3.build(4, vocab_size=4096).eval()
    texts = torch.randint(0, 4096, (count, places + 1), device="cuda")
    with torch.no_grad():
        bf16 = net(texts[:, :places], attention_mask={"full_attention": None}, use_cache=False).logits.float().log_softmax(-1)
        wide = qwen3.build(4, dtype=torch.float32, vocab_size=4096).eval()
        wide.load_state_dict(net.state_dict())
        true = wide(texts[:, :places], attention_mask={"full_attention": None}, use_cache=False).logits.log_softmax(-1)
    decoder = Decoder(net, batch=8, places=places)
    decoder.capture(bucket)
    decoder.tokens[:count], decoder.given[:count] = texts, places + 1
    errors = []
    for i in range(places):
        decoder.decode(count, 1)
        errors.append((decoder.logits[:count].float().log_softmax(-1) - true[:, i]).square().mean())
    ours, theirs = torch.stack(errors).mean().sqrt(), (bf16 - true).square().mean().sqrt()
    assert ours <= 1.5 * theirs


def test_fifty_captured_training_steps_are_the_eager_ones():
    from snippets.checkpointing.determinism import algorithms
    from snippets.checkpointing.recipes import recipe
    from snippets.cuda_graph.train_step import TrainStep

    batches = torch.randint(0, 4096, (50, 2, 1, 256), device="cuda")
    ends = []
    for graph in (False, True):
        net = qwen3.build(2, vocab_size=4096, seed=3)
        with algorithms("strict"), recipe("ours none", net) as ready:
            step = TrainStep(net, ready.step, micro_batches=2)
            run = step.captured(batches[0]) if graph else step
            schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda i: 1 / (i + 1))
            losses = []
            for ids in batches:
                losses.append(run(ids)[0].clone())
                schedule.step()
        ends.append((torch.stack(losses), [p.detach().clone() for p in net.parameters()]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
