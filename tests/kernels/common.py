"""Checks that every kernel has to pass, written once."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def listed(value):
    return list(value) if isinstance(value, tuple | list) else [value]


def gradients_for(outputs):
    """Gradients of every kind that autograd hands out: dense random, expanded (stride 0), strided."""
    yield "dense", [torch.randn_like(o) for o in outputs]
    yield "expanded", [torch.randn((), dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs]
    yield "strided", [torch.randn((*o.shape, 2), dtype=o.dtype, device=o.device)[..., 1] for o in outputs]
    yield (
        "transposed",
        [torch.randn(o.shape[::-1], dtype=o.dtype, device=o.device).permute(list(range(o.dim()))[::-1]) for o in outputs],
    )


def compare(kernel, reference, args, tolerance=None):
    """Outputs and gradients of ``kernel`` against ``reference`` on the same inputs."""
    torch.manual_seed(1)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    ours, theirs = listed(kernel(*args)), listed(reference(*args))
    tolerance = tolerance or TOLERANCE[leaves[0].dtype]
    for o, t in zip(ours, theirs, strict=True):
        assert o.shape == t.shape and o.dtype == t.dtype
        torch.testing.assert_close(o, t, rtol=tolerance, atol=tolerance)
    for kind, dys in gradients_for(theirs):
        got = torch.autograd.grad(ours, leaves, dys, retain_graph=True)
        want = torch.autograd.grad(theirs, leaves, dys, retain_graph=True)
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape and g.dtype == w.dtype
            scale = max(1.0, w.abs().max().item() if w.numel() else 0.0)
            torch.testing.assert_close(
                g, w, rtol=tolerance, atol=tolerance * scale, msg=lambda m, k=kind: f"{k} gradient: {m}"
            )


def no_second_derivative(kernel, args):
    """create_graph=True is refused, also where the incoming gradient is a constant: the way of a gradient penalty."""
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    total = sum(o.sum() for o in listed(kernel(*args)))
    with pytest.raises(RuntimeError, match="no second derivative.*create_graph"):
        torch.autograd.grad(total, leaves, create_graph=True)
    torch.autograd.grad(total, leaves)  # and the refusal has used up nothing


def embedded(shape, dtype, change):
    """A random non-contiguous tensor of ``shape`` (3 dimensions or more, the first two are played with)."""

    def random(*n):
        return torch.randn(*n, dtype=dtype, device=DEVICE)

    first, second, *lead, last = shape
    out = {
        "every_other": lambda: random(first, second, *lead, 2 * last)[..., ::2],
        "transposed": lambda: random(second, first, *lead, last).transpose(0, 1),
        "expanded": lambda: random(first, 1, *lead, last).expand(shape),
        "sliced_rows": lambda: random(first, second, *lead, 3 * last)[..., last : 2 * last],
    }[change]()
    assert out.shape == tuple(shape) and not out.is_contiguous()
    return out


def twice(kernel, args):
    """Inputs stay as they were, and a second backward over the same graph gives the same gradients."""
    kept = [a.detach().clone() for a in args]
    leaves = [a for a in args if a.requires_grad]
    outputs = listed(kernel(*args))
    dys = [torch.randn_like(o) for o in outputs]
    kept_dys = [d.clone() for d in dys]
    first = torch.autograd.grad(outputs, leaves, dys, retain_graph=True)
    first = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, leaves, dys)
    for a, b in zip([*args, *dys, *second], [*kept, *kept_dys, *first], strict=True):
        assert torch.equal(a, b)


def guarded(kernel, reference, shapes, dtype=torch.float64, grad=None):
    """Inputs inside NaN: a read past a row's end poisons the result, a write past it changes the guard.

    Each tensor is a window of a wider and longer NaN buffer, so that both the row's neighbours and
    the rows before and after are NaN.
    """
    buffers, views = [], []
    for shape in shapes:
        outer = [n + 4 for n in shape]
        buffer = torch.full(outer, float("nan"), dtype=dtype, device=DEVICE)
        window = tuple(slice(2, 2 + n) for n in shape)
        buffer[window] = torch.randn(shape, dtype=dtype, device=DEVICE)
        buffers.append(buffer.clone())
        views.append(buffer[window].detach())
        views[-1]._outer = buffer
    leaves = [v.requires_grad_(grad is None or i in grad) for i, v in enumerate(views)]
    outputs = listed(kernel(*leaves))
    # The gradient too lies in NaN.
    dys = []
    for o in outputs:
        outer = torch.full([n + 4 for n in o.shape], float("nan"), dtype=o.dtype, device=o.device)
        window = tuple(slice(2, 2 + n) for n in o.shape)
        outer[window] = torch.randn_like(o)
        dys.append(outer[window])
    wanted = [v for v in leaves if v.requires_grad]
    got = torch.autograd.grad(outputs, wanted, dys)
    expected_outputs = listed(reference(*leaves))
    expected = torch.autograd.grad(expected_outputs, wanted, dys)
    for a, b in zip([*outputs, *got], [*expected_outputs, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for view, before in zip(views, buffers, strict=True):
        torch.testing.assert_close(view._outer, before, rtol=0, atol=0, equal_nan=True)
