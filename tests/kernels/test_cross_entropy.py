import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from snippets.kernels import causal_lm_loss, cross_entropy
from tests.kernels.common import DEVICE, compare, embedded, guarded, no_second_derivative, twice


def inputs(rows, vocabulary, dtype, ignored=0.3, scale=1.0):
    logits = (torch.randn(rows, vocabulary, dtype=dtype, device=DEVICE) * scale).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    labels[torch.rand(rows, device=DEVICE) < ignored] = -100
    if rows:
        labels[0] = vocabulary - 1  # the last column, and never all ignored
    return logits, labels


def both(labels, **kwargs):
    items = kwargs.pop("num_items_in_batch", None)

    def ours(logits):
        return cross_entropy(logits, labels, num_items_in_batch=items, **kwargs)

    def theirs(logits):
        if items is None:
            return F.cross_entropy(logits, labels, **kwargs)
        return F.cross_entropy(logits, labels, reduction="sum", **kwargs) / items

    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (1, 2), (3, 7), (40, 129), (2, 2048), (3, 9001)])
def test_equals_reference(rows, vocabulary, dtype):
    logits, labels = inputs(rows, vocabulary, dtype)
    compare(*both(labels), (logits,))


@pytest.mark.parametrize("items", [7, 2.5, torch.tensor(11)], ids=str)
def test_num_items_in_batch(items):
    logits, labels = inputs(20, 30, torch.float64)
    compare(*both(labels, num_items_in_batch=items), (logits,))


def test_another_ignore_index_and_int32_labels():
    logits, labels = inputs(20, 30, torch.float64, ignored=0)
    labels[3:9] = 5
    compare(*both(labels, ignore_index=5), (logits,))
    ours = cross_entropy(logits, labels.int(), ignore_index=5)
    torch.testing.assert_close(ours, F.cross_entropy(logits, labels, ignore_index=5))


def test_huge_logits_don_t_overflow():
    logits, labels = inputs(10, 3000, torch.float64, scale=1e4)
    compare(*both(labels), (logits,))


def test_masked_logits():
    """-inf in whole 16-byte groups: a running maximum of -inf must not become NaN."""
    logits, labels = inputs(6, 9000, torch.float64, ignored=0)
    with torch.no_grad():
        logits[:, :8500] = float("-inf")
        labels[:] = 8700
    ours, theirs = both(labels)
    torch.testing.assert_close(ours(logits), theirs(logits))
    (got,) = torch.autograd.grad(ours(logits), logits)
    (want,) = torch.autograd.grad(theirs(logits), logits)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_rows_without_a_softmax_give_nan(value):
    logits, labels = inputs(3, 40, torch.float64, ignored=0)
    with torch.no_grad():
        logits[1] = float(value)
    assert both(labels)[1](logits).isnan()
    assert both(labels)[0](logits).isnan()


def test_all_ignored_is_nan_with_zero_gradient():
    logits, _ = inputs(4, 9, torch.float64)
    ours, theirs = both(torch.full((4,), -100, device=DEVICE))
    assert ours(logits).isnan() and theirs(logits).isnan()
    got, want = (torch.autograd.grad(f(logits), logits)[0] for f in (ours, theirs))
    assert torch.equal(got, want) and not got.any()


def test_no_rows():
    logits = torch.randn(0, 9, device=DEVICE, requires_grad=True)
    labels = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert cross_entropy(logits, labels).isnan()
    loss = cross_entropy(logits, labels, num_items_in_batch=3)
    assert loss.item() == 0
    loss.backward()
    assert logits.grad.shape == (0, 9)


@pytest.mark.parametrize("label", [-1, 40, 2**40])
def test_impossible_label_is_nan_not_a_wrong_number(label):
    logits, labels = inputs(3, 40, torch.float64, ignored=0)
    labels[1] = label
    loss = cross_entropy(logits, labels)
    loss.backward()
    assert loss.isnan()
    assert logits.grad[1].isnan().all() and not logits.grad[[0, 2]].isnan().any()


def test_gradcheck():
    logits, labels = inputs(3, 7, torch.float64)
    assert gradcheck(lambda t: cross_entropy(t, labels), logits)
    assert gradcheck(lambda t: cross_entropy(t, labels, num_items_in_batch=3), logits)


@pytest.mark.parametrize("change", ["transposed", "every_other", "expanded", "sliced_rows"])
def test_noncontiguous_input(change):
    logits = embedded((3, 4, 11), torch.float64, change).requires_grad_()
    labels = torch.randint(0, 11, (4, 3), device=DEVICE).t()
    compare(
        lambda t: cross_entropy(t, labels), lambda t: F.cross_entropy(t.reshape(-1, 11), labels.reshape(-1)), (logits,)
    )


def test_inputs_kept_and_backward_repeatable():
    logits, labels = inputs(9, 40, torch.float64)
    twice(lambda t: cross_entropy(t, labels), (logits,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("where", [slice(0, 4), slice(3, 900), slice(8997, 9001)], ids=str)
def test_logits_at_the_ends_of_the_range(where, dtype):
    # finfo.min is how masks are often written; times log2(e) it would overflow.
    logits, labels = inputs(3, 9001, dtype)
    logits = logits.detach()
    logits[:, where] = torch.finfo(dtype).min
    logits[1, 1000] = torch.finfo(dtype).max
    labels[:] = torch.tensor([2000, 1000, -100])
    compare(*both(labels), (logits.requires_grad_(),))


@pytest.mark.parametrize("shift", [100.0, 1e4, -1e4])
def test_a_shift_of_all_logits_costs_no_digits(shift):
    logits, labels = inputs(5, 300, torch.float32)
    logits = (logits.detach() + shift).requires_grad_()
    ours, theirs = both(labels)
    (got,) = torch.autograd.grad(ours(logits), logits)
    exact = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(theirs(exact), exact)
    assert (got - want).norm() < 1e-6 * want.norm()


def test_second_derivative_is_refused():
    logits, labels = inputs(3, 7, torch.float64)
    no_second_derivative(lambda x: cross_entropy(x, labels), [logits])


def test_int32_labels_and_an_ignore_index_beyond_int32():
    logits, labels = inputs(5, 9, torch.float64, ignored=0)
    compare(lambda x: cross_entropy(x, labels.int(), ignore_index=2**40), lambda x: F.cross_entropy(x, labels), [logits])


def test_inplace_backward_is_no_secret_from_other_users_of_the_logits():
    logits, labels = inputs(5, 9, torch.float64)
    shared = logits * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (shared.pow(2).sum() + cross_entropy(shared, labels, inplace_backward=True)).backward()


def test_inplace_backward_gives_the_same_gradient_once():
    logits, labels = inputs(9, 40, torch.float64)
    (want,) = torch.autograd.grad(cross_entropy(logits, labels), logits)
    copy = logits.detach().clone().requires_grad_()
    loss = cross_entropy(copy, labels, inplace_backward=True)
    (got,) = torch.autograd.grad(loss, copy, retain_graph=True)
    assert torch.equal(got, want) and got.data_ptr() == copy.data_ptr()
    with pytest.raises(RuntimeError, match="inplace_backward=False"):
        torch.autograd.grad(loss, copy)


@pytest.mark.parametrize("width", [5, 64])
def test_neighbours_don_t_matter_and_aren_t_written(width):
    labels = torch.randint(0, width, (7,), device=DEVICE)
    guarded(*both(labels), [(7, width)])


def test_loss_may_be_changed_in_place():
    logits, labels = inputs(4, 9, torch.float64)
    loss = cross_entropy(logits, labels)
    loss /= 2  # gradient accumulation does this
    loss.backward()
    torch.testing.assert_close(logits.grad, torch.autograd.grad(F.cross_entropy(logits, labels) / 2, logits)[0])


@pytest.mark.parametrize("items", [None, 5])
@pytest.mark.parametrize("shifted", [False, True])
def test_causal_lm_loss_equals_transformers(items, shifted):
    logits = torch.randn(2, 6, 50, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 50, (2, 6), device=DEVICE)
    labels[0, :3] = -100
    extra = {"shift_labels": labels} if shifted else {}
    results = []
    for f in (causal_lm_loss, ForCausalLMLoss):
        loss = f(logits=logits, labels=labels, vocab_size=50, num_items_in_batch=items, **extra)
        results.append((loss, *torch.autograd.grad(loss, logits)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("logits", "labels", "error", "says"),
    [
        (torch.ones(2, 4), torch.zeros(2), TypeError, "int64 or int32.*float32"),
        (torch.ones(2, 4), torch.zeros(3, dtype=torch.int64), ValueError, "labels"),
        (torch.ones(2, 0), torch.zeros(2, dtype=torch.int64), ValueError, "V >= 1"),
        (torch.ones(2, 4).long(), torch.zeros(2, dtype=torch.int64), TypeError, "int64"),
        (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "one device"),
    ],
)
def test_errors(logits, labels, error, says):
    with pytest.raises(error, match=says):
        cross_entropy(logits.to(DEVICE), labels.to(DEVICE) if labels.device.type == "cpu" else labels)


@pytest.mark.gpu
def test_bf16_on_gpu():
    logits = (torch.randn(300, 151936, device="cuda") * 3).bfloat16().requires_grad_()
    labels = torch.randint(0, 151936, (300,), device="cuda")
    labels[::7] = -100
    ours, theirs = cross_entropy(logits, labels), F.cross_entropy(logits.float(), labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (got,), (want,) = (torch.autograd.grad(loss, logits) for loss in (ours, theirs))
    # One bf16 step at most, and rarely: both compute in fp32 and round once.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-12)
    assert (got != want).float().mean() < 1e-2


@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows, vocabulary = 14200, 151936
    assert rows * vocabulary > 2**31
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    labels = torch.full((rows,), -100, device="cuda")
    labels[-2:] = 151935
    loss = cross_entropy(logits, labels)
    (got,) = torch.autograd.grad(loss, logits)
    tail = logits[-2:].detach().float().requires_grad_()
    wanted = F.cross_entropy(tail, labels[-2:])
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got[-2:].float(), torch.autograd.grad(wanted, tail)[0], rtol=2**-7, atol=1e-12)
    assert not got[:-2].any()


@pytest.mark.gpu
def test_capture_in_a_cuda_graph():
    """A host sync inside would make the capture fail; the count must be the replay's, not the capture's."""
    logits, labels = inputs(64, 4096, torch.float32)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(cross_entropy(logits, labels), logits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(logits, labels)
        (gradient,) = torch.autograd.grad(loss, logits)
    other, other_labels = inputs(64, 4096, torch.float32, ignored=0.8)
    with torch.no_grad():
        logits.copy_(other)
    labels.copy_(other_labels)
    graph.replay()
    wanted = F.cross_entropy(other, other_labels)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, other)[0])


@pytest.mark.gpu
def test_no_sync_and_no_fp32_logits():
    logits = torch.randn(2048, 151936, device="cuda").bfloat16().requires_grad_()
    labels = torch.randint(0, 151936, (2048,), device="cuda")
    torch.autograd.grad(cross_entropy(logits, labels), logits)  # compile first
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(cross_entropy(logits, labels, num_items_in_batch=2048), logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 1.05 * logits.numel() * 2  # the gradient in bf16, nothing of that size besides
