"""Small random checkpoints, the definitions of layers made from them, and what their own modules compute.

In: a directory. Out: safetensors files and `layers.toml` there, and each module in float64. A layer's plain name is
float64, the dtype of its file; `name/float32`, `name/bfloat16` and `name/float16` are the same layer in other dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

DTYPES = ("float64", "float32", "bfloat16", "float16")
VOCABULARY = 40
WIDTH, HEADS, HIDDEN = 24, 4, 40

Reference = Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """One layer: how its module is made, its definition, and what the module computes for one sequence.

    `reference` takes the module, ids [L] or activations [L, width], and a context [S, context_width] or None.
    """

    module: Callable[[], Any]
    definition: str
    reference: Reference
    width: int = WIDTH
    """0 if it takes ids."""
    context_width: int = 0
    """0 if it takes no context."""
    tolerance: float = 1e-11
    """Of the float64 layer, relative to the largest element."""


def _attention(module: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    y = x if context is None else context
    output: torch.Tensor = module(x, y, y, need_weights=False)[0]
    return output


def _causal_attention(module: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
    output: torch.Tensor = module(x, x, x, need_weights=False, attn_mask=mask)[0]
    return output


def _encoder(module: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = module(x[None])[0]
    return output


def _decoder(module: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    assert context is not None
    mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
    output: torch.Tensor = module(x[None], context[None], tgt_mask=mask)[0]
    return output


def _hidden_states(model: Any, ids: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = model(ids[None]).last_hidden_state[0]
    return output


def _blocks() -> dict[str, Checkpoint]:
    """Encoder and decoder layers of torch, ReLU and GELU, pre- and post-norm."""
    blocks = {}
    for activation in ("relu", "gelu"):
        for pre_norm in (False, True):
            options: dict[str, Any] = {"activation": activation, "norm_first": pre_norm, "batch_first": True}
            for side, layer, reference in (
                ("encoder", nn.TransformerEncoderLayer, _encoder),
                ("decoder", nn.TransformerDecoderLayer, _decoder),
            ):
                blocks[f"{side}/{activation}/{'pre' if pre_norm else 'post'}"] = Checkpoint(
                    module=lambda layer=layer, options=options: layer(WIDTH, HEADS, HIDDEN, **options),  # type: ignore[misc]
                    definition=f'preset = "torch.transformer_{side}_layer"\nheads = {HEADS}\n'
                    f'activation = "{activation}"\npre_norm = {str(pre_norm).lower()}',
                    reference=reference,
                    context_width=WIDTH if side == "decoder" else 0,
                )
    return blocks


def _original() -> dict[str, Checkpoint]:
    """The three attentions of the original Transformer: h = 8, d_k = d_v = 64."""
    definition = 'preset = "torch.multihead_attention"\nheads = 8\nhead_dim = 64\nvalue_dim = 64'
    return {
        f"original/{name}": Checkpoint(
            lambda: nn.MultiheadAttention(512, 8, bias=False), definition + more, reference, 512, context_width
        )
        for name, more, reference, context_width in (
            ("encoder_self", "", _attention, 0),
            ("decoder_self", "\ncausal = true", _causal_attention, 0),
            ("encoder_decoder", "", _attention, 512),
        )
    }


def _models() -> dict[str, Checkpoint]:
    """Models of transformers, saved as transformers saves them."""
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": 32,
    }
    return {
        "bert": Checkpoint(
            lambda: transformers.BertModel(transformers.BertConfig(**small, **sizes), add_pooling_layer=False),
            'preset = "bert"',
            _hidden_states,
            width=0,
        ),
        "gpt2": Checkpoint(
            lambda: transformers.GPT2Model(
                transformers.GPT2Config(**small, **ends, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32)
            ),
            'preset = "gpt2"',
            _hidden_states,
            width=0,
        ),
        "llama": Checkpoint(
            lambda: transformers.LlamaModel(
                transformers.LlamaConfig(**small, **ends, **sizes, num_key_value_heads=2, head_dim=8)
            ),
            'preset = "llama"',
            _hidden_states,
            width=0,
            tolerance=1e-5,  # transformers computes the angles in float32, whatever the model's dtype
        ),
    }


class Parameters(nn.Module):
    """Parameters by name, for layers that torch has no module for."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self._shapes = shapes
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


CHECKPOINTS: Mapping[str, Checkpoint] = {
    "attention": Checkpoint(
        lambda: nn.MultiheadAttention(WIDTH, HEADS),
        f'preset = "torch.multihead_attention"\nheads = {HEADS}',
        _attention,
    ),
    "attention/over": Checkpoint(
        lambda: nn.MultiheadAttention(WIDTH, HEADS, kdim=10, vdim=10),
        f'preset = "torch.multihead_attention"\nheads = {HEADS}',
        _attention,
        context_width=10,
    ),
    **_blocks(),
    **_original(),
    **_models(),
    "encoder/stack": Checkpoint(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True),
            3,
            norm=nn.LayerNorm(WIDTH),
            enable_nested_tensor=False,
        ),
        f'preset = "torch.transformer_encoder"\nheads = {HEADS}',
        _encoder,
    ),
    "decoder/stack": Checkpoint(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True), 3),
        f'preset = "torch.transformer_decoder"\nheads = {HEADS}',
        _decoder,
        context_width=WIDTH,
    ),
}
"""The layers that have a module to compare with."""

PLAIN: Mapping[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "rotary": (
        {"q": (32, WIDTH), "bq": (32,), "k": (16, WIDTH), "v": (12, WIDTH), "o": (20, 24), "bo": (20,)},
        'kind = "multi_head"\nheads = 4\nkv_heads = 2\nsoftcap = 4.0\nrotary = { base = 100.0, fraction = 0.5 }\n'
        'parameters = { query.weight = "q", query.bias = "bq", key.weight = "k", value.weight = "v", '
        'output.weight = "o", output.bias = "bo" }',
    ),
    "alibi": (
        {"q": (32, WIDTH), "k": (32, WIDTH), "v": (32, WIDTH), "o": (WIDTH, 32)},
        'kind = "multi_head"\nheads = 4\ncausal = true\nwindow = [4, 0]\nalibi = "geometric"\n'
        'parameters = { query.weight = "q", key.weight = "k", value.weight = "v", output.weight = "o" }',
    ),
    "single": (
        {"q": (8, WIDTH), "bq": (8,), "k": (8, 10), "bk": (8,), "v": (6, 10), "bv": (6,)},
        'kind = "single_head"\nparameters = { query.weight = "q", query.bias = "bq", key.weight = "k", '
        'key.bias = "bk", value.weight = "v", value.bias = "bv" }',
    ),
    "additive": (
        {"q": (16, WIDTH), "k": (16, 10), "b": (16,), "w": (16,)},
        'kind = "additive"\nparameters = { query.weight = "q", key.weight = "k", bias = "b", score.weight = "w" }',
    ),
    "general": (
        {"w": (WIDTH, 10), "v": (6, 10)},
        'kind = "general"\nparameters = { score.weight = "w", value.weight = "v" }',
    ),
}
"""The layers that the oracle computes: their tensors' shapes, and the definition."""


def write(directory: Path) -> dict[str, Any]:
    """Writes all checkpoints and `layers.toml`. Returns the modules, in float64, by layer name."""
    generator = torch.Generator().manual_seed(11)
    modules: dict[str, Any] = {}
    sections: list[str] = []
    definitions = {name: (each.module, each.definition) for name, each in CHECKPOINTS.items()}
    definitions |= {name: (lambda shapes=shapes: Parameters(**shapes), text) for name, (shapes, text) in PLAIN.items()}  # type: ignore[misc]
    for name, (make, text) in definitions.items():
        module = modules[name] = make().double().eval()
        for parameter in module.parameters():
            _randomise(parameter, generator)
        file = name.replace("/", "-")
        if isinstance(module, transformers.PreTrainedModel):
            module.save_pretrained(directory / file)
        else:
            file += ".safetensors"
            save_file({key: each.contiguous() for key, each in module.state_dict().items()}, directory / file)
        sections += [
            f'[[layers]]\nname = "{name}{suffix}"\nfile = "{file}"\n{more}{text}\n'
            for suffix, more in (("", ""), *((f"/{dtype}", f'dtype = "{dtype}"\n') for dtype in DTYPES[1:]))
        ]
    (directory / "layers.toml").write_text("\n".join(sections))
    return modules


@torch.no_grad()
def _randomise(parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Matrices whose products keep rows at unit variance; unit-normal vectors: zeros and ones would hide mistakes."""
    drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    parameter.copy_(drawn / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else drawn)
