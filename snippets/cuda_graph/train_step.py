"""A whole training step for a CUDA graph: gradients zeroed, micro-batches accumulated, clipped, AdamW.

    step = TrainStep(model, forward_backward, learning_rate=1e-4, micro_batches=4)
    graph = step.captured(ids)                                        # ids: [4, B, S]
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, ...)  # outside: it writes into the tensor that the graph reads
    for ids in data:
        loss, norm = graph(ids)
        schedule.step()

What a graph asks of it: gradients and optimizer state at fixed addresses, made before the capture; a learning rate that is a
tensor, for a number would be captured as a constant; an optimizer that counts its steps on the device (``capturable=True``); a
clip that does not ask the host whether the norm is finite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snippets.cuda_graph.graphed import Graphed


# --8<-- [start:step]
class TrainStep:
    """One optimizer step; call it with token ids ``[micro_batches, B, S]``, eager, or through ``captured``.

    Args:
        model: its trainable parameters are those with ``requires_grad``; their gradients are made here and stay.
        forward_backward: ids ``[B, S]`` → loss; it adds to the gradients.
        learning_rate, betas, weight_decay: AdamW's.
        micro_batches: how many are accumulated; the gradient is their mean.
        clip: largest norm of the gradient; None for no clipping.

    Returns (when called):
        The mean loss and the gradient's norm before clipping (0 without clipping), both on the device.

    Raises:
        ValueError: another number of micro-batches than announced, or no trainable parameter.
    """

    def __init__(
        self, model: torch.nn.Module, forward_backward: Callable[[Tensor], Tensor], *, learning_rate: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1, micro_batches: int = 1, clip: float | None = 1.0,
    ):  # fmt: skip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("TrainStep: the model has no parameter with requires_grad")
        self.forward_backward, self.micro_batches, self.clip = forward_backward, micro_batches, clip
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        place = self.parameters[0].device
        self.learning_rate = torch.tensor(learning_rate, device=place)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.learning_rate, betas=betas, weight_decay=weight_decay, fused=True, capturable=place.type == "cuda"
        )

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.shape[0] != self.micro_batches:
            raise ValueError(f"TrainStep: ids is {tuple(ids.shape)}; its first size must be {self.micro_batches}, the number of micro-batches")
        gradients = [p.grad for p in self.parameters]
        torch._foreach_zero_(gradients)
        loss = torch.zeros((), device=ids.device)
        for micro in ids.unbind(0):
            loss += self.forward_backward(micro).detach()
        if self.micro_batches > 1:
            torch._foreach_mul_(gradients, 1 / self.micro_batches)
        norm = torch.zeros_like(loss) if self.clip is None else torch.nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.optimizer.step()
        return loss / self.micro_batches, norm

    def captured(self, ids: Tensor) -> Graphed:
        """The step as a CUDA graph for inputs like ``ids``; another shape takes another call. Weights and optimizer state stay.

        The warm-up runs real steps, with a learning rate of 0, which leaves the weights' bits; the state is put back, for which
        it is held twice until this returns. A step that has not run yet has none to hold.

        Raises:
            GraphError: see ``Graphed.capture``.
        """
        rate, before = self.learning_rate.clone(), [{k: v.clone() for k, v in self.optimizer.state[p].items()} for p in self.parameters]

        def restore() -> None:
            for p, state in zip(self.parameters, before, strict=True):
                for name, value in self.optimizer.state[p].items():
                    value.copy_(state[name]) if name in state else value.zero_()

        graph = Graphed(self, restore=restore)
        self.learning_rate.zero_()
        try:
            graph.capture(ids)
        finally:
            self.learning_rate.copy_(rate)
        graph.restore = lambda: None  # it would hold the copy for as long as the graph lives
        return graph
# --8<-- [end:step]
