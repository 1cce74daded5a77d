"""The comparison finds what differs: another learning rate, a wrong decoder; and the sound ones pass."""

import pytest
import torch

from snippets.cuda_graph import agreement
from snippets.cuda_graph.decoder import Decoder
from snippets.measure import check_tables


def test_smoke():
    tables = agreement.measure(**agreement.EXPERIMENT["smoke"])
    check_tables(agreement.EXPERIMENT["tables"], tables)
    (row,) = tables["training"]
    assert not row["ok"] and "CUDA device" in row["failed"] and 0 < row["first_loss"]  # no graph on a CPU
    for row in tables["decoding"]:
        assert row["ok"] and 0 < row["rms"] and row["positions"] > 0 and row["shortest"] <= row["longest"] < row["places"]


def test_a_graph_that_differs_is_counted(monkeypatch):
    first = agreement.trained

    def off(size, layers, name, batches, graph):
        losses, norms, weights = first(size, layers, name, batches, False)
        if graph:
            losses, weights = losses.clone(), [w.clone() for w in weights]
            losses[1] += 1
            weights[3].view(-1)[0] += 1
        return losses, norms, weights

    monkeypatch.setattr(agreement, "trained", off)
    (row,) = agreement.compare_training("tiny", **agreement.EXPERIMENT["smoke"]["training"])
    assert (row["losses_differing"], row["norms_differing"], row["weights_differing"], row["ok"]) == (1, 0, 1, False)


@pytest.mark.parametrize("wrong", ["position", "cache"])
def test_a_wrong_decoder_fails(monkeypatch, wrong):
    right = Decoder.prefill

    def prefill(self, prompts):
        right(self, prompts)
        if wrong == "position":
            self.cos = self.cos.roll(1, 0)
        else:
            self.keys[:, :, :, 0] = 0

    monkeypatch.setattr(Decoder, "prefill", prefill)
    rows = agreement.compare_decoding("tiny", **agreement.EXPERIMENT["smoke"]["decoding"])
    assert not any(r["ok"] for r in rows) and all(r["ratio"] > 10 for r in rows)


def test_positions_reach_the_end_of_the_cache():
    looked = [p for p in range(100, 256) if agreement._looked_at(p, 256)]
    assert looked[-8:] == list(range(248, 256)) and 104 in looked and 105 not in looked
    assert torch.tensor(looked).diff().max() == 8
