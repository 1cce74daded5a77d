"""Qwen3-8B as every experiment of this project uses it.

``Qwen3Config()`` without arguments is not the 8B model (its defaults have 32 layers, 32 KV heads
and an MLP of 22016), so every value of the published config is written out below.

Without weights on disk the model is filled with random numbers straight on the device; with the
environment variable ``QWEN3_8B`` set to a directory or a hub id, ``load`` reads that checkpoint
through ``from_pretrained``. Kernels, memory and speed don't depend on which of the two it is.

transformers is imported where it is needed, so that importing this module stays cheap.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from snippets import interpreter  # noqa: F401 - before transformers, which imports triton

WEIGHTS = "QWEN3_8B"  # environment variable: directory or hub id of a checkpoint

# config.json of Qwen/Qwen3-8B, in the spelling of transformers 5 (rope_parameters).
QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

# Same structure (grouped KV heads, per-head norms, head_dim not hidden/heads), small enough for a CPU.
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(layers: int = 36, *, attention: str = "sdpa", **overrides: Any):
    """The ``Qwen3Config`` of Qwen3-8B.

    Args:
        layers: number of decoder layers (36 in the published model).
        attention: transformers' attention implementation ("sdpa", "eager", ...).
        overrides: config fields to replace.

    Raises:
        ValueError: for a field that Qwen3's config doesn't have (a typo would be kept silently).
    """
    from transformers import Qwen3Config

    unknown = set(overrides) - set(QWEN3_8B) - {"pad_token_id"}
    if unknown:
        raise ValueError(f"unknown Qwen3 config fields {sorted(unknown)}; known: {sorted(QWEN3_8B)}")
    values = QWEN3_8B | {"num_hidden_layers": layers, "max_window_layers": layers} | overrides
    return Qwen3Config(**values, attn_implementation=attention)


@torch.no_grad()
def initialize(model: torch.nn.Module, seed: int = 0) -> None:
    """Refill all weights in place, as transformers initialises Qwen3: matrices N(0, 0.02²), norm gains 1.

    The numbers are drawn on the parameters' own device (8.2 billion in about a second on a Hopper
    GPU) and depend on the seed, the device type and the parameter order only.
    """
    std = model.config.initializer_range
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, std, generator=generator)


def build(
    layers: int = 36,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    seed: int = 0,
    *,
    attention: str = "sdpa",
    **overrides: Any,
):
    """A ``Qwen3ForCausalLM`` with random weights, in train mode.

    The modules are made on the meta device and allocated once on ``device`` in ``dtype``: no fp32
    copy and no host memory. 36 layers in bf16 take 15.3 GiB.

    Args:
        layers, dtype, seed: as named; see ``initialize`` for the distribution.
        device: default is the CUDA device if there is one, else the CPU.
        overrides: config fields to replace.
    """
    from transformers import Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = config(layers, attention=attention, **overrides)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(settings)
    model = model.to(dtype).to_empty(device=device)
    # inv_freq is a non-persistent buffer: to_empty left it unset, and it must stay fp32.
    model.model.rotary_emb = Qwen3RotaryEmbedding(settings).to(device)
    if settings.tie_word_embeddings:
        model.tie_weights()
    initialize(model, seed)
    return model.train()


def tiny(
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **overrides: Any,
):
    """The same architecture at toy width (hidden 64, vocabulary 512) for tests and smoke runs."""
    return build(layers, dtype, device, seed, **(TINY | overrides))


def weights() -> str | None:
    """What ``QWEN3_8B`` names (directory or hub id), or None where it is unset or empty."""
    return os.environ.get(WEIGHTS) or None


def load(
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    *,
    attention: str = "sdpa",
    **build_arguments: Any,
):
    """The model that ``QWEN3_8B`` names, or ``build(**build_arguments)`` where it names none.

    Raises:
        FileNotFoundError: ``QWEN3_8B`` looks like a path and there is no such directory.
    """
    from transformers import Qwen3ForCausalLM

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = weights()
    if name is None:
        return build(dtype=dtype, device=device, attention=attention, **build_arguments)
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise FileNotFoundError(
            f"{WEIGHTS}={name!r}: no such directory, and not a hub id (owner/name) either;"
            " point it at a directory with config.json and *.safetensors"
        )
    return Qwen3ForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention).to(device)
