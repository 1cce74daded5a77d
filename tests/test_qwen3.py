"""snippets/qwen3.py: the published values, the direct initialisation, checkpoints by QWEN3_8B."""

import pytest
import torch

from snippets import qwen3


def test_config_has_the_published_values():
    c = qwen3.config()
    got = {k: getattr(c, k) for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    assert got == {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    }
    assert (c.num_key_value_heads, c.head_dim, c.vocab_size, c.max_position_embeddings) == (8, 128, 151936, 40960)
    assert (c.rms_norm_eps, c.tie_word_embeddings, c.attention_bias, c.sliding_window) == (1e-6, False, False, None)
    assert c.rope_parameters["rope_theta"] == 1e6
    assert c.layer_types == ["full_attention"] * 36


def test_full_model_has_the_published_size():
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3.config())
    # 8.2 B parameters, 6.95 B without the two embedding matrices (model card)
    assert sum(p.numel() for p in model.parameters()) == 8_190_735_360


def test_unknown_override_is_refused():
    with pytest.raises(ValueError, match="hiden_size"):
        qwen3.config(hiden_size=64)


def test_build_is_a_pure_function_of_the_seed_and_computes_like_a_normally_built_model():
    from transformers import Qwen3ForCausalLM

    a, b, c = qwen3.tiny(seed=3), qwen3.tiny(seed=3), qwen3.tiny(seed=4)
    weight = a.model.layers[0].mlp.gate_proj.weight
    assert torch.equal(weight, b.model.layers[0].mlp.gate_proj.weight)
    assert not torch.equal(weight, c.model.layers[0].mlp.gate_proj.weight)
    assert 0.018 < a.lm_head.weight.std() < 0.022 and a.model.norm.weight.unique().tolist() == [1.0]

    # The ordinary constructor is the reference: buffers that to_empty leaves unset would show here.
    reference = Qwen3ForCausalLM(a.config)
    reference.load_state_dict(a.state_dict())
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(a.eval()(ids).logits, reference.eval()(ids).logits)


def test_build_keeps_rope_in_fp32_under_bf16_weights():
    model = qwen3.tiny(dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]


def test_tied_embeddings_stay_tied():
    model = qwen3.tiny(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_initialize_refills_in_place():
    model = qwen3.tiny(seed=1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    pointers = [p.data_ptr() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    qwen3.initialize(model, seed=1)
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_load_reads_the_checkpoint_that_the_variable_names(tmp_path, monkeypatch):
    saved = qwen3.tiny(seed=7)
    saved.save_pretrained(tmp_path)
    monkeypatch.setenv(qwen3.WEIGHTS, str(tmp_path))
    loaded = qwen3.load(dtype=torch.float32, device="cpu")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(saved.eval()(ids).logits, loaded.eval()(ids).logits)


def test_load_without_the_variable_builds(monkeypatch):
    monkeypatch.delenv(qwen3.WEIGHTS, raising=False)
    model = qwen3.load(dtype=torch.float32, device="cpu", layers=1, **qwen3.TINY)
    assert len(model.model.layers) == 1 and qwen3.weights() is None


def test_load_names_a_missing_directory(monkeypatch, tmp_path):
    monkeypatch.setenv(qwen3.WEIGHTS, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        qwen3.load()
