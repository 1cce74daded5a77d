"""Switching kernels for a block: on inside, nothing left behind afterwards."""

import pytest
import torch

from snippets import qwen3, variants
from snippets.precision import corpus, loop


@pytest.fixture(scope="module")
def rows():
    return corpus.sequences("train", 6, 24, seed=0, vocab=qwen3.TINY["vocab_size"])


def test_variant_liger_is_undone(rows):
    """Liger replaces global names and instance methods: nothing of it may be left."""
    pytest.importorskip("liger_kernel")
    from transformers.models.qwen3 import modeling_qwen3

    model = qwen3.tiny()
    before = (
        modeling_qwen3.apply_rotary_pos_emb,
        modeling_qwen3.Qwen3RMSNorm,
        modeling_qwen3.Qwen3MLP,
        torch.nn.functional.cross_entropy,
    )
    expected = loop.forward(model, rows[:1], rows[:1])
    for name in ("liger", "liger_ce"):
        with variants.variant(name, model):
            assert modeling_qwen3.apply_rotary_pos_emb is not before[0]
            assert "forward" in model.model.norm.__dict__
        after = (
            modeling_qwen3.apply_rotary_pos_emb,
            modeling_qwen3.Qwen3RMSNorm,
            modeling_qwen3.Qwen3MLP,
            torch.nn.functional.cross_entropy,
        )
        assert after == before
        got = loop.forward(model, rows[:1], rows[:1])
        assert torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)
        assert not [n for n, m in model.named_modules() if "forward" in m.__dict__]


def test_liger_also_patches_the_head_norms():
    """What "liger" means in the tables: this version patches q_norm and k_norm of an instance as well."""
    pytest.importorskip("liger_kernel")
    model = qwen3.tiny()
    with variants.variant("liger", model):
        attention = model.model.layers[0].self_attn
        assert "forward" in attention.q_norm.__dict__ and "forward" in attention.k_norm.__dict__


def test_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="fastest"), variants.variant("fastest", qwen3.tiny()):
        pass


def test_only_liger_s_loss_leaves_the_layers_alone(rows):
    pytest.importorskip("liger_kernel")
    model = qwen3.tiny()
    with variants.variant("liger_loss", model):
        assert [n for n, m in model.named_modules() if "forward" in m.__dict__] == [""]
    assert "forward" not in model.__dict__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["ours", "liger", "liger_ce", "liger_loss"])
def test_variant_trains_like_the_baseline_on_a_gpu(name):
    """First loss within 1e-3, and the patched run stays near the baseline for 20 steps."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = qwen3.tiny(dtype=torch.bfloat16, device="cuda", **shape)
    rows = corpus.sequences("train", 20, 128, seed=0, vocab=512)
    plain = loop.train(model, rows, rate=1e-3, warmup=5, ignored=16, say=lambda *_: None)
    qwen3.initialize(model, 0)
    with variants.variant(name, model):
        patched = loop.train(model, rows, rate=1e-3, warmup=5, ignored=16, say=lambda *_: None)
    assert not torch.equal(patched.losses, plain.losses), "the variant computed exactly the baseline: is it on?"
    assert float(patched.losses[0]) == pytest.approx(float(plain.losses[0]), rel=1e-3)
    assert torch.allclose(patched.losses, plain.losses, rtol=2e-2)
