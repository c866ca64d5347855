"""Layers in plain NumPy float64, one sequence at a time: an oracle that shares nothing with what it checks.

In: an architecture, its parameters by canonical name, a sequence (ids [L] or activations [L, width]) and a context.
Out: the layer's output [L, width], float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
from numpy.typing import NDArray

from attnserve_server.layers.specification import Attention, Block, Embedding, FeedForward, Norm, Rotary, Transformer

Floats = NDArray[np.float64]
Parameters = Mapping[str, Floats]

_ERF = np.vectorize(math.erf)
ACTIVATIONS: Mapping[str, Any] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + _ERF(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def below(parameters: Parameters, prefix: str) -> Parameters:
    """The parameters whose names begin with the prefix, which is removed."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def linear(x: Floats, parameters: Parameters, name: str) -> Floats:
    """The linear map x W^T + b, with b if there is one."""
    return x @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", np.float64(0))


def normed(x: Floats, norm: Norm, parameters: Parameters) -> Floats:
    """LayerNorm or RMSNorm."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon)
    weight = parameters.get("weight", np.float64(0 if norm.unit_offset else 1))
    return x * (weight + norm.unit_offset) + parameters.get("bias", np.float64(0))


def rotated(heads: Floats, rotary: Rotary) -> Floats:
    """Heads [H, L, D] with their pairs rotated by angles that grow with the position."""
    pairs = np.arange(rotary.width // 2)
    angles = (rotary.offset + np.arange(heads.shape[1]))[:, None] * rotary.base ** (-2.0 * pairs / rotary.width)
    first, second = (2 * pairs, 2 * pairs + 1) if rotary.interleaved else (pairs, pairs + rotary.width // 2)
    turned = heads.copy()
    turned[..., first] = heads[..., first] * np.cos(angles) - heads[..., second] * np.sin(angles)
    turned[..., second] = heads[..., second] * np.cos(angles) + heads[..., first] * np.sin(angles)
    return turned


def attended(
    x: Floats, context: Floats, layer: Attention, parameters: Parameters, offset: int = 0, **options: Any
) -> tuple[Floats, oracle.Expected]:
    """The output of multi-head attention of x [L, inputs] over a context [S, contexts], and the oracle's result for the
    attention inside. The first input is at position `offset`; `options`, for the oracle, override the layer's own.
    """
    query, key, value = (
        linear(source, parameters, name).reshape(len(source), heads, width).swapaxes(0, 1)
        for source, name, heads, width in (
            (x, "query", layer.heads, layer.head_dim),
            (context, "key", layer.kv_heads, layer.head_dim),
            (context, "value", layer.kv_heads, layer.value_dim),
        )
    )
    if layer.rotary is not None:
        standing = replace(layer.rotary, offset=layer.rotary.offset + offset)
        query, key = rotated(query, standing), rotated(key, layer.rotary)
    own: dict[str, Any] = {
        "causal": layer.causal,
        "window": layer.window,
        "scale": layer.scale,
        "softcap": layer.softcap,
        "alibi_slopes": np.array(layer.alibi) if layer.alibi else None,
    }
    inside = oracle.attend(query, key, value, **own | options)
    output: Floats = inside.output.swapaxes(0, 1).reshape(len(x), layer.heads * layer.value_dim)
    return linear(output, parameters, "output") if layer.output else output, inside


def attention(x: Floats, context: Floats, layer: Attention, parameters: Parameters) -> Floats:
    """Multi-head attention of x [L, inputs] over a context [S, contexts], as the layer is defined."""
    return attended(x, context, layer, parameters)[0]


def feed_forward(x: Floats, layer: FeedForward, parameters: Parameters) -> Floats:
    """down(activation(up(x))), gated or not."""
    activation = ACTIVATIONS[layer.activation]
    up = linear(x, parameters, "up")
    hidden = activation(linear(x, parameters, "gate")) * up if layer.gated else activation(up)
    return linear(hidden, parameters, "down")


def block(x: Floats, context: Floats | None, layer: Block, parameters: Parameters) -> Floats:
    """A block of a transformer."""
    steps: list[tuple[str, Any]] = [
        ("self.", lambda y: attention(y, y, layer.self_attention, below(parameters, "self."))),
        ("feed_forward.", lambda y: feed_forward(y, layer.feed_forward, below(parameters, "feed_forward."))),
    ]
    if (cross := layer.cross_attention) is not None:
        assert context is not None
        steps.insert(1, ("cross.", lambda y: attention(y, context, cross, below(parameters, "cross."))))
    for name, step in steps:
        own = below(parameters, name + "norm.")
        if layer.pre_norm:
            x = x + step(normed(x, layer.norm, own))
        else:
            x = normed(x + step(x), layer.norm, own)
    return x


def embedded(x: NDArray[Any], layer: Embedding, parameters: Parameters) -> Floats:
    """Ids or activations with their positions and segment 0."""
    at = layer.position_offset + np.arange(len(x))
    result: Floats = parameters["token.weight"][x] * layer.scale if layer.vocabulary else x
    if layer.positions:
        result = result + parameters["position.weight"][at]
    if layer.segments:
        result = result + parameters["segment.weight"][0]
    if layer.sinusoidal:
        angles = at[:, None] / 10000 ** (2 * np.arange(layer.width // 2) / layer.width)
        result = result + np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(x), -1)
    return result if layer.norm is None else normed(result, layer.norm, below(parameters, "norm."))


def transformer(x: NDArray[Any], layer: Transformer, parameters: Parameters, context: Floats | None = None) -> Floats:
    """A whole transformer."""
    if layer.embedding is not None:
        x = embedded(x, layer.embedding, below(parameters, "embedding."))
    for number in range(layer.blocks):
        x = block(x, context, layer.block, below(parameters, f"blocks.{number}."))
    return x if layer.final_norm is None else normed(x, layer.final_norm, below(parameters, "norm."))
