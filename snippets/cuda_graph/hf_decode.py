"""transformers' own decode step with a StaticCache: eager, compiled, or captured in a CUDA graph.

What has to be right for a capture (transformers 5.17):

* The cache is allocated before. Its tensors are made at the first use; inside a capture their zeros would become part of the
  graph, and each replay would wipe the cache.
* Each layer counts its tokens on the device and advances the count inside the step. Warm-up runs advance it too, so it is put back.
* The step always builds a mask of the cache's whole length and repeats K and V for the query heads, so its time depends on the
  length that was allocated, not on the tokens that are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from snippets.cuda_graph.graphed import Graphed


class HFDecoder:
    """``batch`` sequences of one common length in a StaticCache of ``places`` tokens; one greedy token a step.

    Args:
        model: a ``Qwen3ForCausalLM`` in eval mode.
        forward: what to call instead of the model, such as ``torch.compile(model, ...)``.

    Attributes:
        ids: ``[batch, 1]``, the current tokens; logits: ``[batch, V]`` of the last step.
    """

    def __init__(self, model: torch.nn.Module, batch: int, places: int, forward: Callable[..., Any] | None = None):
        from transformers import StaticCache

        config, weight = model.config, model.lm_head.weight
        self.forward = model if forward is None else forward  # a compiled model has no truth value
        self.cache = StaticCache(config=config, max_cache_len=places)
        self.cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, weight.dtype, weight.device)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.logits: Tensor | None = None
        self._graph: Graphed | None = None

    @torch.no_grad()
    def fill(self, length: int) -> None:
        """Random keys and values for ``length`` tokens, for measurements that don't ask what they say.

        Raises:
            ValueError: no place is left behind them.
        """
        if not 0 <= length < self.cache.layers[0].max_cache_len:
            raise ValueError(f"HFDecoder: {length} tokens in a cache of {self.cache.layers[0].max_cache_len}; leave a place for the next")
        for layer in self.cache.layers:
            layer.keys[:, :, :length].normal_()
            layer.values[:, :, :length].normal_()
            layer.cumulative_length.fill_(length)

    # --8<-- [start:step]
    @torch.no_grad()
    def step(self) -> None:
        """One token for each sequence: launches only."""
        out = self.forward(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.logits = out.logits[:, -1]
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))

    def capture(self) -> None:
        """Capture the step; afterwards ``advance`` replays it.

        Raises:
            GraphError: no CUDA device, or a step that cannot be captured.
        """
        graph = Graphed(self.step)
        with self._untouched():
            graph.capture()
        self._graph = graph

    def advance(self) -> None:
        """One step, by the graph where there is one."""
        self._graph() if self._graph else self.step()
    # --8<-- [end:step]

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        counts, ids = [layer.cumulative_length.clone() for layer in self.cache.layers], self.ids.clone()
        try:
            yield
        finally:
            for layer, count in zip(self.cache.layers, counts, strict=True):
                layer.cumulative_length.copy_(count)
            self.ids.copy_(ids)
