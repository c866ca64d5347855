"""Layers with random weights on a CPU, and random requests for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.build import build_layer
from attnserve_server.layers.layer import Layer, LayerInput
from attnserve_server.layers.specification import (
    Architecture,
    Attention,
    Block,
    Dtype,
    FeedForward,
    LayerSpecification,
    LearnedScore,
    Norm,
)

DTYPES: tuple[Dtype, ...] = ("float32", "float64", "float16", "bfloat16")
Parameters = Mapping[str, torch.Tensor]


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch dtype of that name."""
    found: torch.dtype = getattr(torch, dtype)
    return found


def random_parameters(architecture: Architecture, seed: int = 0, dtype: Dtype = "float32") -> dict[str, torch.Tensor]:
    """Weights that roughly keep the size of unit-normal rows; vectors are about 1, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in architecture.shapes().items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_table = name.startswith("embedding.") and len(shape) == 2
        parameters[name] = (values if len(shape) == 1 or is_table else values / shape[1] ** 0.5).to(torch_dtype(dtype))
    return parameters


def layer_of(architecture: Architecture, parameters: Parameters, device: CpuDevice, dtype: Dtype = "float32") -> Layer:
    """The layer with these parameters."""
    kind: Literal["multi_head", "additive", "general", "transformer"] = "transformer"
    if isinstance(architecture, Attention):
        kind = "multi_head"
    elif isinstance(architecture, LearnedScore):
        kind = architecture.score
    specification = LayerSpecification(
        name="layer", kind=kind, architecture=architecture, dtype=dtype, file="layer.safetensors", parameters={}
    )
    return build_layer(specification, dict(parameters), device)


def random_rows(rows: int, width: int, seed: int, dtype: Dtype = "float32") -> torch.Tensor:
    """Unit-normal [rows, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(torch_dtype(dtype))


def packed(*sequences: torch.Tensor, **fields: Any) -> LayerInput:
    """A request of these sequences [length, width]."""
    return LayerInput(input=torch.cat(sequences), lengths=[len(each) for each in sequences], **fields)


def batched(rows: torch.Tensor, **fields: Any) -> LayerInput:
    """A request of sequences of one length, [B, L, width], with contexts of the same form."""
    context = fields.pop("context", None)
    if context is not None:
        fields |= {"context": context.flatten(0, 1), "context_lengths": [context.shape[1]] * context.shape[0]}
    return LayerInput(input=rows.flatten(0, 1), lengths=[rows.shape[1]] * rows.shape[0], **fields)


def run(layer: Layer, *requests: LayerInput) -> list[Any]:
    """A layer's replies to requests that it runs together."""
    return list(layer.run(requests))


def attention(width: int = 32, heads: int = 4, **fields: Any) -> Attention:
    """Multi-head attention of one width, with all biases, unless `fields` say otherwise."""
    head_dim = fields.pop("head_dim", width // heads)
    defaults: dict[str, Any] = {
        "inputs": width,
        "contexts": width,
        "outputs": width,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "query_bias": True,
        "key_bias": True,
        "value_bias": True,
        "output_bias": True,
    }
    return Attention(**defaults | fields)


def block(width: int = 32, heads: int = 4, hidden: int = 64, *, crossed: bool = False, **fields: Any) -> Block:
    """A post-norm encoder block with ReLU and LayerNorm, or a decoder block, unless `fields` say otherwise."""
    defaults: dict[str, Any] = {
        "self_attention": attention(width, heads, causal=crossed),
        "cross_attention": attention(width, heads) if crossed else None,
        "feed_forward": FeedForward(width=width, hidden=hidden, activation="relu"),
        "norm": Norm(kind="layer", width=width, epsilon=1e-5),
        "pre_norm": False,
    }
    return Block(**defaults | fields)


def doubles(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Tensors as NumPy float64."""
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's elements reinterpreted as integers."""
    sizes: Sequence[torch.dtype] = (torch.int16, torch.int32, torch.int64)
    integers = next(each for each in sizes if each.itemsize == tensor.itemsize)
    return tensor.contiguous().view(integers).numpy()


def assert_same_replies(one: Any, other: Any, what: object = "") -> None:
    """Asserts that two replies hold the same bits."""
    for name in ("output", "lse", "scores"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), (name, what)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(bits_of(a), bits_of(b), err_msg=f"{name} {what}")
