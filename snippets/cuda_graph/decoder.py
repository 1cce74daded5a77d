"""Greedy decoding of transformers' Qwen3 with a CUDA graph for each batch size: prefill eager, every token one replay.

    decoder = Decoder(model, batch=8, places=4096)
    decoder.capture(1, 2, 4, 8)
    texts = decoder.generate(prompts, new_tokens=128)    # three prompts run in the graph for four

A step has no arguments: tokens, lengths and cache are buffers at fixed addresses, and the step itself picks the next token
and advances the lengths. So a replay is all that a token takes, and the host may be a step or a hundred behind.

For one sequence the linear layers are matrix-vector products (``decode_kernels``), for more of them cuBLAS's. The attention reads each length from the device, so one graph serves every context up to ``places``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snippets.cuda_graph import decode_kernels as kernels
from snippets.cuda_graph.graphed import WARMUPS, Graphed
from snippets.kernels import rms_norm, swiglu
from snippets.kernels.common import processors

CHECK_EVERY = 16  # tokens between two looks at whether every sequence has ended; a look waits for the device


@dataclass
class _Layer:
    norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def joined(*linears: torch.nn.Linear) -> Tensor:
    """The weights of several linear layers in one matrix, ``[sum of outputs, inputs]``; the layers become views of it.

    So the model goes on working and nothing is held twice.
    """
    together = linears[0].weight.data
    if not all(x.weight.untyped_storage().data_ptr() == together.untyped_storage().data_ptr() for x in linears):
        together = torch.cat([x.weight.data for x in linears])
        for x, part in zip(linears, together.split([x.out_features for x in linears]), strict=True):
            x.weight.data = part
    return together.as_strided((sum(x.out_features for x in linears), linears[0].in_features), (linears[0].in_features, 1), 0)


class Decoder:
    """Decodes up to ``batch`` sequences of up to ``places`` tokens.

    Args:
        model: a ``Qwen3ForCausalLM`` in eval mode, on one device. Its q, k, v and its gate, up become views of joined matrices.
        batch: sequences at a time.
        places: tokens of a sequence, prompt included.
        pdl: programmatic dependent launch (see ``decode_kernels``); default where the device has it, Hopper and newer.

    Attributes:
        tokens: ``[batch, places + 1]``, int64; lengths: ``[batch]``, int32, of what the cache holds; given: ``[batch]``, int32,
        how many of the tokens are prescribed; logits: ``[batch, V]`` of the last step; keys, values: ``[layers, batch, KV, places, D]``.

    Raises:
        ValueError: a model with biases, a sliding window or in training mode; sizes that are not positive.
    """

    def __init__(self, model: torch.nn.Module, batch: int, places: int, *, pdl: bool | None = None):
        config = model.config
        if config.attention_bias or config.sliding_window:
            raise ValueError("Decoder: attention_bias and sliding_window are not supported; the published Qwen3 models have neither")
        if model.training:
            raise ValueError("Decoder: the model is in training mode; call model.eval()")
        if batch < 1 or not 1 <= places <= config.max_position_embeddings:
            raise ValueError(f"Decoder: batch {batch} and places {places}; give 1 or more, and at most {config.max_position_embeddings} places")
        self.model, self.config, self.batch, self.places = model, config, batch, places
        table = model.model.embed_tokens.weight
        place, dtype = table.device, table.dtype
        self.pdl = torch.cuda.is_available() and torch.cuda.get_device_capability(place) >= (9, 0) if pdl is None else pdl
        heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        with torch.no_grad():
            self.layers = [self._read(layer) for layer in model.model.layers]
            positions = torch.arange(places + 1, device=place)[None]  # a sequence at the end of its cache still runs along
            self.cos, self.sin = (t[0].to(dtype).contiguous() for t in model.model.rotary_emb(table[:1, None], positions))

        def buffer(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*shape, dtype=of, device=place)

        self.tokens, self.lengths = buffer(batch, places + 1, of=torch.int64), buffer(batch, of=torch.int32)
        self.given, self.logits = buffer(batch, of=torch.int32), buffer(batch, config.vocab_size)
        self.keys, self.values = (buffer(len(self.layers), batch, kv, places, d) for _ in range(2))
        self._hidden, self._between = (buffer(batch, config.hidden_size) for _ in range(2))
        self._qkv, self._attended = buffer(batch, (heads + 2 * kv) * d), buffer(batch, heads * d)
        self._inner = buffer(batch, config.intermediate_size)
        self._graphs: dict[int, Graphed] = {}

    @staticmethod
    def _read(layer: torch.nn.Module) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            layer.input_layernorm.weight, joined(attention.q_proj, attention.k_proj, attention.v_proj), attention.q_norm.weight,
            attention.k_norm.weight, attention.o_proj.weight, layer.post_attention_layernorm.weight, joined(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight,
        )  # fmt: skip

    # --8<-- [start:step]
    @torch.no_grad()
    def step(self, count: int) -> None:
        """One token for each of the first ``count`` sequences: launches only, nothing waits."""
        eps, pdl = self.config.rms_norm_eps, self.pdl
        decoder, head = self.model.model, self.model.lm_head.weight
        hidden, between, qkv, attended, inner = (t[:count] for t in (self._hidden, self._between, self._qkv, self._attended, self._inner))
        tokens, lengths, logits = self.tokens[:count], self.lengths[:count], self.logits[:count]
        kernels.embed(tokens, lengths, decoder.embed_tokens.weight, hidden, pdl=pdl)
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            def attend(qkv: Tensor, layer: _Layer = layer, keys: Tensor = keys[:count], values: Tensor = values[:count]) -> Tensor:
                return kernels.attend(
                    qkv, layer.q_norm, layer.k_norm, self.cos, self.sin, lengths, keys, values,
                    eps=eps, parts=self._parts(count), out=attended, pdl=pdl,
                )  # fmt: skip

            if count == 1:
                attend(kernels.linear(hidden, layer.qkv, norm=layer.norm, eps=eps, out=qkv, pdl=pdl))
                kernels.linear(attended, layer.o, residual=hidden, out=between, pdl=pdl)
                kernels.linear(between, layer.gate_up, norm=layer.mlp_norm, eps=eps, gated=True, out=inner, pdl=pdl)
                kernels.linear(inner, layer.down, residual=between, out=hidden, pdl=pdl)
            else:
                attend(torch.mm(rms_norm(hidden, layer.norm, eps), layer.qkv.T, out=qkv))
                torch.add(hidden, torch.mm(attended, layer.o.T), out=between)
                gate, up = torch.mm(rms_norm(between, layer.mlp_norm, eps), layer.gate_up.T).chunk(2, dim=1)
                torch.add(between, torch.mm(swiglu(gate, up), layer.down.T), out=hidden)
        if count == 1:
            kernels.linear(hidden, head, norm=decoder.norm.weight, eps=eps, out=logits, pdl=pdl)
        else:
            torch.mm(rms_norm(hidden, decoder.norm.weight, eps), head.T, out=logits)
        kernels.pick(logits, tokens, lengths, self.given[:count], pdl=pdl)
    # --8<-- [end:step]

    def _parts(self, count: int) -> int:
        """Programs for each sequence and KV head, so that all multiprocessors have work: a power of two."""
        wanted = 2 * processors(self.tokens.device) // (count * self.config.num_key_value_heads)
        return 1 << max(0, min(wanted, 64).bit_length() - 1)

    def capture(self, *counts: int) -> None:
        """One CUDA graph for each of these numbers of sequences, the largest first.

        Raises:
            ValueError: more sequences than the decoder has room for.
            GraphError: no CUDA device, or a capture that failed.
        """
        if bad := [c for c in counts if not 1 <= c <= self.batch]:
            raise ValueError(f"Decoder: cannot capture for {bad[0]} sequences; this decoder has room for {self.batch}")
        for count in sorted(counts, reverse=True):
            graph = Graphed(lambda count=count: self.step(count), share=next(iter(self._graphs.values()), None))
            with self._untouched():
                graph.capture()
            self._graphs[count] = graph

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """What a warm-up changes is put back: it runs from length 0 and so writes the first places of the cache."""
        changed = (self.tokens, self.lengths, self.given, self.keys[:, :, :, :WARMUPS], self.values[:, :, :, :WARMUPS])
        state = [buffer.clone() for buffer in changed]
        self.lengths.zero_()
        try:
            yield
        finally:
            for buffer, before in zip(changed, state, strict=True):
                buffer.copy_(before)

    # --8<-- [start:generate]
    @torch.no_grad()
    def prefill(self, prompts: Sequence[Tensor]) -> None:
        """Fill the cache by the model itself, eager, prompts of one length together; each gets its first new token.

        Args:
            prompts: token ids, one dimension each.

        Raises:
            ValueError: no prompt, too many, an empty one, or one that leaves no place for a token.
        """
        if not 1 <= len(prompts) <= self.batch:
            raise ValueError(f"Decoder: {len(prompts)} prompts; this decoder takes 1 to {self.batch}")
        if bad := [len(p) for p in prompts if not 1 <= len(p) <= self.places]:
            raise ValueError(f"Decoder: a prompt of {bad[0]} tokens; this decoder takes 1 to {self.places}")
        self.lengths.zero_()
        self.given.zero_()
        self.tokens.zero_()
        for size in sorted({len(p) for p in prompts}):
            rows = [i for i, p in enumerate(prompts) if len(p) == size]
            ids = torch.stack([prompts[i] for i in rows]).to(self.tokens.device)
            out = self.model(ids, attention_mask={"full_attention": None}, use_cache=True, logits_to_keep=1)
            for index, cached in enumerate(out.past_key_values.layers):
                self.keys[index, rows, :, :size], self.values[index, rows, :, :size] = cached.keys, cached.values
            self.tokens[rows, :size], self.tokens[rows, size] = ids, out.logits[:, -1].argmax(-1)
            self.lengths[rows] = size

    def decode(self, prompts: int, steps: int, stop: int | None = None) -> None:
        """``steps`` tokens for each of the first ``prompts`` sequences, fewer where all have ended with ``stop``.

        The smallest captured graph that has room runs; the rows that it has too many run along. Without graphs, eager.
        """
        count = min((c for c in self._graphs if c >= prompts), default=None)
        advance = self._graphs[count] if count else lambda: self.step(prompts)
        for done in range(steps):
            advance()
            if stop is not None and done % CHECK_EVERY == CHECK_EVERY - 1 and bool((self.tokens[:prompts] == stop).any(1).all()):
                return

    def generate(self, prompts: Sequence[Tensor], new_tokens: int, stop: int | None = None) -> list[Tensor]:
        """Continue each prompt greedily; what comes after ``stop`` is cut off.

        Returns:
            The new tokens of each prompt, one dimension each, at most ``new_tokens``.

        Raises:
            ValueError: as ``prefill``, or a prompt that has fewer than ``new_tokens`` places behind it.
        """
        longest = max(map(len, prompts), default=0)
        if new_tokens < 1 or longest + new_tokens > self.places + 1:
            raise ValueError(f"Decoder: {new_tokens} new tokens after a prompt of {longest}; there is room for {self.places + 1 - longest}")
        self.prefill(prompts)
        self.decode(len(prompts), new_tokens - 1, stop)
        out = [self.tokens[i, len(p) : len(p) + new_tokens].clone() for i, p in enumerate(prompts)]
        return [t[: int(ends[0]) + 1] if stop is not None and len(ends := (t == stop).nonzero()) else t for t in out]
    # --8<-- [end:generate]
