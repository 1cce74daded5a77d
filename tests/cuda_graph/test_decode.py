"""transformers' decode step done right, and the ladder's bookkeeping."""

import pytest
import torch

from snippets import qwen3
from snippets.cuda_graph import decode, decode_autotune, decode_compiled, decode_compiled_long
from snippets.cuda_graph.graphed import CaptureFailed
from snippets.cuda_graph.hf_decode import HFDecoder
from snippets.measure import check_tables


@pytest.fixture(scope="module")
def model():
    return qwen3.tiny(layers=2).eval()


def test_steps_are_those_of_the_model_without_a_cache(model):
    prompt = torch.randint(3, 512, (2, 5))
    hf = HFDecoder(model, batch=2, places=12)
    with torch.no_grad():
        hf.forward(prompt[:, :-1], past_key_values=hf.cache, use_cache=True)
    hf.ids.copy_(prompt[:, -1:])
    ids = prompt
    for _ in range(6):
        hf.step()
        with torch.no_grad():
            want = model(ids, use_cache=False).logits[:, -1]
        torch.testing.assert_close(hf.logits, want, rtol=1e-4, atol=1e-4)
        ids = torch.cat((ids, want.argmax(-1, keepdim=True)), 1)
        assert torch.equal(hf.ids, ids[:, -1:])


def test_a_warm_up_leaves_no_trace(model):
    hf = HFDecoder(model, batch=1, places=9)
    hf.fill(3)
    with hf._untouched():
        hf.step()
        hf.step()
    assert [int(layer.cumulative_length) for layer in hf.cache.layers] == [3, 3] and int(hf.ids) == 0


@pytest.mark.parametrize("length", [-1, 9])
def test_a_cache_that_is_too_short(model, length):
    with pytest.raises(ValueError, match="leave a place"):
        HFDecoder(model, batch=1, places=9).fill(length)


def test_needed_bytes():
    model = qwen3.tiny(layers=2)
    config = model.config
    per_layer = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 3 * 64 * 160 + 2 * 64 + 2 * 32
    weights = 2 * per_layer + 64 + 512 * 64
    assert decode.needed_bytes(model, 0, 0) == 4 * weights
    assert decode.needed_bytes(model, 3, 7) == 4 * (weights + 3 * 7 * 2 * 2 * config.num_key_value_heads * config.head_dim)


def test_smoke():
    tables = decode.measure(**decode.EXPERIMENT["smoke"])
    check_tables(decode.EXPERIMENT["tables"], tables)
    rows = {(r["batch"], r["path"]): r for r in tables["steps"]}
    assert "CUDA" in rows[3, "hf graph"]["failed"] and rows[3, "hf graph"]["median_ms"] is None
    assert "CUDA" in rows[1, "ours graph"]["failed"]
    assert rows[1, "ours eager"]["median_ms"] > 0 and rows[1, "hf eager"]["failed"] == ""


def test_an_unknown_path(model):
    with pytest.raises(ValueError, match="begin with hf or ours"):
        decode.prepared("theirs eager", model, 1, 2, 3)


@pytest.mark.parametrize("module", [decode_autotune, decode_compiled, decode_compiled_long], ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_the_compiled_ladder(module):
    assert module.EXPERIMENT["tables"] == decode.EXPERIMENT["tables"]
    tables = module.measure(**module.EXPERIMENT["smoke"])
    check_tables(module.EXPERIMENT["tables"], tables)
    assert len(tables["steps"]) == 3 and all(r["median_ms"] > 0 and not r["failed"] for r in tables["steps"])


def test_a_compiled_path_is_visited_once_in_the_middle(monkeypatch):
    seen = []
    monkeypatch.setattr(decode, "visit", lambda path, *_: seen.append(path) or {"samples": [1.0, 2.0], "prepare_s": 0.5})
    decode.measure(size="tiny", layers=1, tokens=3, cases=[[1, 6, ["hf eager", "hf max-autotune", "ours eager"]]])
    assert seen == ["hf eager", "ours eager", "hf max-autotune", "ours eager", "hf eager"]


def test_every_context_and_batch_of_the_ladder_has_a_compiled_row():
    cases = {(b, c) for b, c, _ in decode.EXPERIMENT["full"]["cases"]}
    compiled = {(b, c) for m in (decode_autotune, decode_compiled, decode_compiled_long) for b, c, paths in m.EXPERIMENT["full"]["cases"] if any(map(decode.is_compiled, paths)) and "ours graph" in paths}
    assert compiled == cases


def test_a_compiler_that_fails_is_a_row_and_another_path_a_fault(monkeypatch, model):
    def raises(*_):
        raise RuntimeError("wrapped") from OSError("no g++")

    monkeypatch.setattr(decode, "prepared", raises)
    assert decode.visit("hf max-autotune", model, 1, 2, 3) == {"failed": "RuntimeError: wrapped"}
    with pytest.raises(RuntimeError, match="wrapped"):
        decode.visit("hf eager", model, 1, 2, 3)


def test_after_a_broken_capture_nothing_is_measured_and_what_was_is_kept(monkeypatch):
    def visit(path, *_):
        if path == "hf graph":
            raise CaptureFailed("the capture failed: no")
        return lambda: None, lambda: None

    monkeypatch.setattr(decode, "prepared", visit)
    cases = [[1, 6, ["hf eager", "hf graph", "ours eager"]], [2, 6, ["hf eager"]]]
    rows = {(r["batch"], r["path"]): r for r in decode.measure(size="tiny", layers=1, tokens=3, cases=cases)["steps"]}
    assert rows[1, "hf eager"]["median_ms"] is not None and rows[1, "hf graph"]["failed"] == "the capture failed: no"
    assert all("broke off (1 × 6 hf graph)" in rows[key]["failed"] for key in ((1, "ours eager"), (2, "hf eager")))
