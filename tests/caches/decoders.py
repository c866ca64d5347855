"""Decoders whose keys and values caches can hold, and the caches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from attnserve import Cache, Client

DECODERS = ("gpt2", "llama", "mistral", "decoder/stack")
WINDOW = 6
MISTRAL = "mistral.toml"


def write_mistral(directory: Path) -> Any:
    """Writes a small random Mistral with a window shorter than the tests' sequences. Returns its module (float64)."""
    torch.manual_seed(5)
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=40,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    module = transformers.MistralModel(config).double().eval()
    module.save_pretrained(directory / "mistral")
    sections = [
        f'[[layers]]\nname = "mistral{suffix}"\nfile = "mistral"\npreset = "llama"\n{more}'
        for suffix, more in (("", ""), ("/float32", 'dtype = "float32"\n'), ("/bfloat16", 'dtype = "bfloat16"\n'))
    ]
    (directory / MISTRAL).write_text("\n".join(sections))
    return module


def create_cache(client: Client, layer: str, dtype: str = "float32") -> Cache:
    """An empty cache for a decoder, shaped by the server's outline of it."""
    outline = client.layers.get(layer)
    head_dim = outline.head_dim
    return client.create_cache(num_kv_heads=outline.kv_heads, head_dim=head_dim, layers=outline.blocks, dtype=dtype)
