"""How the policies are used, each way as one function; every one computes the gradients of ``model`` on ``ids``.

    model = qwen3.load()                                   # or Qwen3ForCausalLM.from_pretrained(...)
    ids = torch.randint(0, 151936, (1, 4096), device="cuda")
    on_demand(model, ids)
"""

from __future__ import annotations

# --8<-- [start:imports]
import torch

from snippets.checkpointing.accumulate import accumulate
from snippets.checkpointing.chunked_loss import loss_and_backward
from snippets.checkpointing.policies import ATTENTION, MATMUL, Block, Keep, Selective, SubBlock, apply
from snippets.kernels import patch
# --8<-- [end:imports]


# --8<-- [start:selective]
def selective(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """SAC on transformers' own kernels, as torchtitan selects: attention and every second product are stored."""
    policy = Selective(save=ATTENTION + MATMUL, skip=(1, 3, 5), early_stop=False)  # k, o and up run again
    with apply(model, policy):
        model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:selective]


# --8<-- [start:mixed]
def mixed(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """One policy per layer: the first third as blocks, the rest with their MLP recomputed."""
    count = model.config.num_hidden_layers
    with apply(model, [Block()] * (count // 3) + [SubBlock("mlp")] * (count - count // 3)):
        model(ids, labels=ids, use_cache=False).loss.backward()
# --8<-- [end:mixed]


# --8<-- [start:on_demand]
def on_demand(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """This project's kernels, loss and accumulation; each layer stores these five tensors beside the attention."""
    with patch(model), accumulate(model), apply(model, Keep(("q", "k", "v", "h2", "up"))):
        loss_and_backward(model, ids)
# --8<-- [end:on_demand]


# --8<-- [start:offloaded]
def offloaded(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """The same, and three of them wait in pinned host memory; their copies run beside the computation."""
    with patch(model), accumulate(model), apply(model, Keep(("v", "h2", "up"), offload=("q", "k", "gate"))):
        loss_and_backward(model, ids)
# --8<-- [end:offloaded]
