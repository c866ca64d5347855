"""Checkpoints as publishers write them, small and random, and the layers that definitions with presets make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forward
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import load_definitions
from attnserve_server.layers.specification import Attention, LayerSpecification, Transformer

LENGTH = 7
TOLERANCE = 1e-11


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(20)
    with torch.no_grad():
        yield


def randomised(module: Any) -> Any:
    """The module in float64 with every parameter random: the zeros and ones of an initialisation hide mistakes."""
    module = module.double().eval()
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


def save(directory: Path, module: nn.Module, prefix: str = "") -> None:
    tensors = {prefix + name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")


def define(directory: Path, text: str) -> list[LayerSpecification]:
    path = directory / "layers.toml"
    path.write_text('[[layers]]\nname = "layer"\nfile = "model.safetensors"\n' + text)
    return load_definitions(path, directory, [])


def loaded(directory: Path, text: str) -> tuple[LayerSpecification, dict[str, Any]]:
    (specification,) = define(directory, text)
    parameters = load(specification, directory, "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == specification.architecture.shapes()
    return specification, {name: tensor.double().numpy() for name, tensor in parameters.items()}


def run(directory: Path, text: str, x: Any, context: Any = None) -> Any:
    """The output of the single layer that a definition makes of the checkpoint in a directory."""
    specification, parameters = loaded(directory, text)
    x, context = np.asarray(x), None if context is None else np.asarray(context)
    match specification.architecture:
        case Attention() as layer:
            return forward.attention(x, x if context is None else context, layer, parameters)
        case Transformer() as layer:
            return forward.transformer(x, layer, parameters, context)


def close(found: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.squeeze(0).numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def bert_config(**changes: Any) -> Any:
    return transformers.BertConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
            "attn_implementation": "eager",
            **changes,
        }
    )


def pretrained(directory: Path, model: Any) -> Any:
    """A model of random parameters, saved with its config as transformers saves it."""
    model = randomised(model)
    model.save_pretrained(directory)
    return model


IDS = torch.tensor([[3, 17, 5, 39, 0, 3, 8]])


def gpt2_config(**changes: Any) -> Any:
    return transformers.GPT2Config(
        **{
            "vocab_size": 40,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attn_implementation": "eager",
            **changes,
        }
    )


SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
