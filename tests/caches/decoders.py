"""Decoders whose keys and values caches can hold, and the caches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from attnserve import Cache, Client

DECODERS = ("gpt2", "llama", "mistral", "decoder/stack")
WINDOW = 6
MISTRAL = "mistral.toml"
WIDE = "wide.toml"


def write_mistral(directory: Path) -> Any:
    """Writes a small random Mistral with a window shorter than the tests' sequences. Returns its module (float64).

    Another one, `mistral/whole`, has widths of whole vectors: its batches are not padded.
    """
    torch.manual_seed(5)
    module, whole = _mistral(24, 40, 16), _mistral(64, 128, 64)
    module.save_pretrained(directory / "mistral")
    whole.save_pretrained(directory / "mistral-whole")
    sections = [
        f'[[layers]]\nname = "{name}"\nfile = "{file}"\npreset = "llama"\n{more}'
        for name, file, more in (
            ("mistral", "mistral", ""),
            ("mistral/float32", "mistral", 'dtype = "float32"\n'),
            ("mistral/bfloat16", "mistral", 'dtype = "bfloat16"\n'),
            ("mistral/whole", "mistral-whole", 'dtype = "float16"\n'),
        )
    ]
    (directory / MISTRAL).write_text("\n".join(sections))
    return module


def _mistral(width: int, hidden: int, head_dim: int) -> Any:
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=hidden,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return transformers.MistralModel(config).double().eval()


def write_wide(directory: Path) -> None:
    """Writes a small random decoder of activations whose values are wider than its keys."""
    torch.manual_seed(6)
    width, heads, blocks = 24, 2, 2
    shapes = {
        "self.query.weight": (heads * 8, width),
        "self.key.weight": (heads * 8, width),
        "self.value.weight": (heads * 20, width),
        "self.output.weight": (width, heads * 20),
        "feed_forward.up.weight": (40, width),
        "feed_forward.down.weight": (width, 40),
        "self.norm.weight": (width,),
        "feed_forward.norm.weight": (width,),
    }
    tensors = {f"blocks.{n}.{name}": torch.randn(shape) / 5 for n in range(blocks) for name, shape in shapes.items()}
    save_file(tensors, directory / "wide.safetensors")
    names = "\n".join(f'"blocks.{{n}}.{name}" = "blocks.{{n}}.{name}"' for name in shapes)
    (directory / WIDE).write_text(
        f'[[layers]]\nname = "wide"\nkind = "transformer"\nfile = "wide.safetensors"\nheads = {heads}\n'
        'causal = true\npre_norm = true\nactivation = "gelu"\nnorm = { kind = "rms", epsilon = 1e-5 }\n'
        f"[layers.parameters]\n{names}\n"
    )


def create_cache(client: Client, layer: str, dtype: str | None = None) -> Cache:
    """An empty cache for a decoder, as its outline says, which stores the layer's dtype if caches can."""
    outline = client.layers.get(layer)
    if dtype is None:
        dtype = "float32" if outline.dtype == "float64" else outline.dtype
    return client.create_cache(
        outline.num_kv_heads, outline.head_dim, value_dim=outline.value_dim, layers=outline.blocks, dtype=dtype
    )
