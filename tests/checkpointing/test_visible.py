"""Kernels as operators: the same bits, and stored or run again as the policy says, which without them is not so."""

import sys

import pytest
import torch

from snippets import measure as measure_module
from snippets import qwen3
from snippets.checkpointing import policies as p
from snippets.checkpointing import visible as v
from snippets.kernels import patch, rms_norm, rope, swiglu

IDS = torch.randint(0, 512, (1, 6), generator=torch.Generator().manual_seed(0))
LAYERS = 2
CHEAP = p.ATTENTION + p.MATMUL


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = qwen3.tiny(LAYERS)
    for name, parameter in net.named_parameters():
        if "norm" in name:  # all ones would hide a swapped weight
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return net


def gradients(model):
    model.zero_grad(set_to_none=True)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {n: w.grad.clone() for n, w in model.named_parameters()} | {"loss": loss.detach()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def state(model):
    return [(n, type(m), dict(vars(m))) for n, m in model.named_modules()]


# ------------------------------------------------------------------------------- the operators


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


# Contiguous, and each layout that a model or a caller may hand over.
CASES = {
    "rms_norm": lambda: (v.RMS_NORM, rms_norm, (randn(2, 3, 8), randn(8), 1e-6)),
    "rms_norm, transposed": lambda: (v.RMS_NORM, rms_norm, (randn(3, 8, 2).transpose(1, 2), randn(8), 1e-5)),
    "rms_norm, columns of a wider tensor": lambda: (v.RMS_NORM, rms_norm, (randn(4, 3, 20)[..., 1:17], randn(32)[::2], 1e-6)),
    "rms_norm, expanded": lambda: (v.RMS_NORM, rms_norm, (randn(1, 8).expand(4, 8), randn(8), 1e-6)),
    "rms_norm, fp32 weight": lambda: (v.RMS_NORM, rms_norm, (randn(5, 8, dtype=torch.float16), randn(8), 1e-6)),
    "rms_norm, no rows": lambda: (v.RMS_NORM, rms_norm, (randn(0, 8), randn(8), 1e-6)),
    "swiglu": lambda: (v.SWIGLU, swiglu, (randn(2, 3, 8), randn(2, 3, 8))),
    "swiglu, halves of one projection": lambda: (v.SWIGLU, swiglu, randn(2, 3, 16).chunk(2, dim=-1)),
    "swiglu, transposed": lambda: (v.SWIGLU, swiglu, (randn(3, 8, 2).transpose(1, 2), randn(3, 2, 8))),
    "rope": lambda: (v.ROPE, rope, (randn(2, 4, 3, 8), randn(2, 2, 3, 8), randn(2, 3, 8), randn(2, 3, 8))),
    "rope, as the attention calls it": lambda: (
        v.ROPE, rope, (randn(2, 3, 4, 8).transpose(1, 2), randn(2, 3, 2, 8).transpose(1, 2), randn(1, 3, 8), randn(1, 3, 8)),
    ),
    "rope, expanded and strided": lambda: (
        v.ROPE, rope, (randn(1, 4, 3, 8).expand(2, 4, 3, 8), randn(2, 2, 3, 16)[..., ::2], randn(1, 3, 16)[..., ::2], randn(1, 8, 3).mT),
    ),
    "rope, fp32 tables": lambda: (
        v.ROPE, rope, (randn(1, 4, 3, 8, dtype=torch.float16), randn(1, 2, 3, 8, dtype=torch.float16), randn(1, 3, 8), randn(1, 3, 8)),
    ),
}  # fmt: skip


def case(name, needs=(True, True)):
    torch.manual_seed(0)
    (overload,), kernel, arguments = CASES[name]()
    tensors = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments)
    for t, need in zip(tensors, needs, strict=False):
        t.requires_grad_(need)
    return overload, kernel, tensors


def call(function, arguments):
    """Outputs, and gradients of the first two arguments for random output gradients of another layout."""
    out = function(*arguments)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    torch.manual_seed(1)
    dys = [torch.randn(o.shape[::-1]).to(o.dtype).permute(*range(o.dim() - 1, -1, -1)) for o in outs]
    leaves = [a for a in arguments[:2] if a.requires_grad]
    return out if isinstance(out, tuple) else (out,), torch.autograd.grad(outs, leaves, dys)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operators_have_the_bits_and_layouts_of_the_kernels(name, needs):
    overload, kernel, arguments = case(name, needs)
    (out, grads), (want, want_grads) = call(overload, arguments), call(kernel, arguments)
    for a, b in zip([*out, *grads], [*want, *want_grads], strict=True):
        assert torch.equal(a, b) and (a.dtype, a.stride(), a.requires_grad) == (b.dtype, b.stride(), b.requires_grad)
    inputs = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor) and a.numel()}
    assert not inputs & {o.untyped_storage().data_ptr() for o in (*out, *grads) if o.numel()}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    # Not test_aot_dispatch_dynamic: the backward launches, which tracing can't follow.
    overload, _, arguments = case(name)
    torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])
def test_no_second_derivative(name):
    overload, _, arguments = case(name)
    out = overload(*arguments)
    out = out[0] if isinstance(out, tuple) else out
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), arguments[0], create_graph=True)


def test_operators_refuse_what_the_kernels_refuse():
    (norm,), (turn,) = v.RMS_NORM, v.ROPE
    with pytest.raises(ValueError, match="weight has shape"):
        norm(randn(2, 8), randn(4))
    q, k, table = randn(1, 2, 3, 8).requires_grad_(), randn(1, 2, 3, 8, dtype=torch.float64), randn(1, 3, 8)
    with pytest.raises(TypeError, match="q becomes torch.float32, k torch.float64"):
        turn(q, k, table, table)


# ------------------------------------------------------------------------------- in a model

NONE, ALL = {}, {"rms_norm": 1, "rope": 1, "swiglu": 1}


@pytest.mark.parametrize(
    ("seen", "policy", "again"),
    [
        (False, p.Nothing(), NONE),
        (False, p.Block(), ALL),
        # Invisible: whatever the policy says, the kernels run again.
        (False, p.Selective(CHEAP), ALL),
        (False, p.Selective(CHEAP + v.VISIBLE), ALL),
        (False, p.ByRule(v.everything), ALL),
        # Visible: saved, or exactly once more.
        (True, p.Nothing(), NONE),
        (True, p.Block(), ALL),
        (True, p.Block(early_stop=False), ALL),
        (True, p.SubBlock("mlp"), {"swiglu": 1}),
        (True, p.Selective(CHEAP), ALL),
        (True, p.Selective(CHEAP, early_stop=False), ALL),
        (True, p.Selective(CHEAP + v.RMS_NORM), {"rope": 1, "swiglu": 1}),
        (True, p.Selective(CHEAP + v.ROPE), {"rms_norm": 1, "swiglu": 1}),
        (True, p.Selective(CHEAP + v.SWIGLU), {"rms_norm": 1, "rope": 1}),
        (True, p.Selective(CHEAP + v.VISIBLE), NONE),
        (True, p.ByRule(v.everything), NONE),
        (True, p.Keep(("q", "gate")), ALL),
    ],
    ids=lambda x: getattr(x, "name", None) or ("visible" if x is True else "invisible" if x is False else "+".join(x) or "nothing"),
)  # fmt: skip
def test_what_runs_again_and_the_bits_stay(model, seen, policy, again):
    with patch(model):
        expected = gradients(model)
        if seen:
            v.visible(model)
        with p.apply(model, policy), v.executions() as counts:
            assert same(gradients(model), expected)
    per_layer = {"rms_norm": 4, "rope": 1, "swiglu": 1}
    assert counts == {n: LAYERS * k * (1 + again.get(n, 0)) + (n == "rms_norm") for n, k in per_layer.items()}


def test_the_count_is_that_of_launches(model, monkeypatch):
    launches = dict.fromkeys(v.FUNCTIONS, 0)

    class Watched:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            def launch(*arguments, **keywords):
                launches[self.name] += not keywords.get("BACKWARD", False)
                return self.kernel[grid](*arguments, **keywords)

            return launch

    for name, function in v.FUNCTIONS.items():
        module, kernel = sys.modules[function.__module__], "_rope" if name == "rope" else "_forward"
        monkeypatch.setattr(module, kernel, Watched(name, getattr(module, kernel)))
    for seen in (False, True):
        launches.update(dict.fromkeys(launches, 0))
        with patch(model), v.visible(model) if seen else p.Applied([]), p.apply(model, p.Selective(CHEAP + v.VISIBLE)):
            with v.executions() as counts:
                gradients(model)
        assert counts == launches and (counts["swiglu"] == LAYERS) == seen
    assert all(f.forward.__name__ == "forward" for f in v.FUNCTIONS.values())


def test_off_restores(model):
    plain, other = state(model), qwen3.tiny(1)
    with patch(model), patch(other):
        patched, others = state(model), state(other)
        switch = v.visible(model)
        changed = {type(a).__name__ for (_, a, _), (_, b, _) in zip(state(model), patched, strict=True) if a is not b}
        assert changed and state(other) == others
        with torch.no_grad():
            inside = model.eval()(IDS).logits
        switch.off()
        switch.off()
        assert torch.equal(model(IDS).logits, inside)
        model.train()
        assert state(model) == patched
        with v.visible(model):
            assert state(model) != patched
        assert state(model) == patched
    assert state(model) == plain


def test_only_what_is_patched_becomes_visible(model):
    with patch(model, rope=False, swiglu=False), v.visible(model), p.apply(model, p.Selective(CHEAP + v.VISIBLE)):
        with v.executions() as counts:
            gradients(model)
    assert counts == {"rms_norm": 4 * LAYERS + 1, "rope": 0, "swiglu": 0}


def test_models_that_cannot_be_made_visible(model):
    with pytest.raises(p.PolicyError, match=r"no module of this Qwen3ForCausalLM runs a kernel.*snippets\.kernels\.patch\(model\)"):
        v.visible(model)
    with patch(model):
        before = state(model)
        with v.visible(model), pytest.raises(p.PolicyError, match="call visible.. once"):
            v.visible(model)
        with p.apply(model, p.Keep()), pytest.raises(p.PolicyError, match="before anything that wraps the kernels"):
            v.visible(model)
        mlp = model.model.layers[1].mlp
        mlp.forward = mlp.forward
        with pytest.raises(p.PolicyError, match="layers.1.mlp has a forward of its own"):
            v.visible(model)
        del mlp.forward
        assert state(model) == before


def test_switches_go_off_in_the_opposite_order(model):
    with patch(model) as kernels:
        before = state(model)
        switch = v.visible(model)
        upper = p.apply(model, p.SubBlock("mlp"))
        with pytest.raises(p.PolicyError, match="layers.0.mlp was switched to something else"):
            switch.off()
        upper.off()
        switch.off()
        assert state(model) == before
        # The patch's own off() takes visible with it; visible's then has nothing to put back.
        switch = v.visible(model)
        kernels.off()
        plain = state(model)
        switch.off()
        assert state(model) == plain
        kernels.on()


# ------------------------------------------------------------------------------- the experiment


def test_measure():
    tables = v.measure(**v.EXPERIMENT["smoke"])
    measure_module.check_tables(v.EXPERIMENT["tables"], tables)
    rows = {r["setting"]: r for r in tables["runs"]}
    layers = v.EXPERIMENT["smoke"]["layers"]
    runs = {"no checkpointing": 1, "invisible": 2, "invisible, everything saved": 2, "visible, recomputed": 2, "visible, saved": 1}
    assert rows.keys() == runs.keys()
    for name, row in rows.items():
        each = layers * runs[name]
        assert (row["rms_norm"], row["rope"], row["swiglu"]) == (4 * each + 1, each, each)
        assert row["different"] == 0 and row["gradients"] == 11 * layers + 2
    with pytest.raises(ValueError, match="'8b' or 'tiny'"):
        v.measure(size="7b", layers=1, batch=1, sequence=8, rounds=5)
