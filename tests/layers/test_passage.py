"""What lies between two attentions of a stack: which library computes it, and that both compute the same."""

from __future__ import annotations

import pytest
import random_layers as make
import torch

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.block import build_steps
from attnserve_server.layers.norms import build_norm
from attnserve_server.layers.passage import packed_passages, passages_of
from attnserve_server.layers.product import is_native, products_of
from attnserve_server.layers.specification import Activation, Dtype, FeedForward, Norm, Rotary, Transformer

Devices = dict[int, CpuDevice]


def stack(
    width: int = 32,
    hidden: int = 48,
    *,
    crossed: bool = True,
    pre_norm: bool = True,
    activation: Activation = "silu",
    gated: bool = True,
    **fields: object,
) -> Transformer:
    """Two blocks with everything that a passage may have; `fields` are those of self-attention."""
    attention = {
        "kv_heads": 2,
        "head_dim": 8,
        "causal": True,
        "rotary": Rotary(width=6, base=1e4, interleaved=gated),
    } | fields
    forward = FeedForward(width=width, hidden=hidden, activation=activation, gated=gated)
    norm = Norm(kind="rms", width=width, epsilon=1e-6, bias=False, unit_offset=True)
    own = make.attention(width, 4, **attention)
    block = make.block(
        width, 4, crossed=crossed, self_attention=own, feed_forward=forward, norm=norm, pre_norm=pre_norm
    )
    return Transformer(blocks=2, block=block, final_norm=Norm(kind="layer", width=width, epsilon=1e-5))


def by_library(architecture: Transformer, device: CpuDevice, dtype: Dtype = "float32") -> bool:
    """Whether the native library computes the passages of a stack."""
    parameters, of = dict(make.random_parameters(architecture, 0, dtype)), make.torch_dtype(dtype)
    steps = [
        step
        for number in range(architecture.blocks)
        for step in build_steps(architecture.block, parameters, f"blocks.{number}.", of, device)
    ]
    assert architecture.final_norm is not None
    final_norm = build_norm(architecture.final_norm, parameters, "norm.")
    passages = passages_of(steps, final_norm, architecture.block.self_attention.inputs, of, device)
    assert len(passages) == len(steps) + 1
    return packed_passages(passages) is not None


@pytest.mark.parametrize("dtype", make.DTYPES)
def test_the_library_computes_what_it_multiplies(devices: Devices, tensor_devices: Devices, dtype: Dtype) -> None:
    assert by_library(stack(), devices[2], dtype) == is_native(make.torch_dtype(dtype), products_of(devices[2]))
    assert not by_library(stack(), tensor_devices[2], dtype)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (stack(hidden=45), True),  # hidden units are padded
        (stack(kv_heads=4), True),
        (stack(crossed=False, pre_norm=False), True),
        (stack(width=40), False),
        (stack(value_dim=9), False),
    ],
)
def test_widths_are_whole_vectors(devices: Devices, architecture: Transformer, expected: bool) -> None:
    there = devices[1].native is not None
    assert by_library(architecture, devices[1]) == (expected and there)


@pytest.mark.parametrize("width", [16, 112, 880])
@pytest.mark.parametrize("constant", [0.1, 7.7, 1000.3, 1e6])
def test_of_equal_elements_the_layer_norm_leaves_nothing(devices: Devices, width: int, constant: float) -> None:
    """What rounding leaves of them is scaled by up to 1 / sqrt(epsilon), here 1e6."""
    block = make.block(width, 1, norm=Norm(kind="layer", width=width, epsilon=1e-12, weight=False, bias=False))
    architecture = Transformer(blocks=1, block=block)
    parameters = {name: torch.zeros(shape) for name, shape in architecture.shapes().items()}
    rows = torch.full((16, width), constant)
    rows[1::2] *= -1
    (reply,) = make.run(make.layer_of(architecture, parameters, devices[1]), make.packed(rows))
    torch.testing.assert_close(reply.output, torch.zeros(16, width), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_both_compute_the_same(
    devices: Devices, tensor_devices: Devices, dtype: Dtype, pre_norm: bool, activation: Activation, gated: bool
) -> None:
    architecture = stack(pre_norm=pre_norm, activation=activation, gated=gated)
    parameters = make.random_parameters(architecture, 3, dtype)
    context = make.random_rows(90, 32, 1, dtype)
    request = make.packed(
        *(make.random_rows(length, 32, length, dtype) for length in (1, 7, 82)),
        context=context,
        context_lengths=[30] * 3,
    )
    (one,), (other,) = (
        make.run(make.layer_of(architecture, parameters, device, dtype), request)
        for device in (devices[2], tensor_devices[2])
    )
    near = {"float32": 2e-5, "float16": 2e-2}[dtype]
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=near * float(other.output.abs().max()))
