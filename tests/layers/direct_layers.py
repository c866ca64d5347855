"""Multi-head layers of many kinds on a device, requests as received, and results: computed, and by the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import random_layers as make
from forward import attended
from layer_requests import read_layer_request

from attnserve._requests.apply import encode_apply
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.layers.extent import Extents
from attnserve_server.layers.outline import outline
from attnserve_server.layers.registry import Loaded
from attnserve_server.layers.request import LayerRequest
from attnserve_server.layers.specification import Attention
from attnserve_server.requests.work import Phases, Work

WIDTH: Final = 48
"""The input width of most layers here."""
ARCHITECTURES: Final[dict[str, Attention]] = {
    "causal": make.attention(32, 4, inputs=WIDTH, contexts=WIDTH, causal=True),
    "window, no biases": make.attention(
        48, 3, inputs=WIDTH, contexts=WIDTH, window=(5, 2), query_bias=False, key_bias=False, value_bias=False,
        output_bias=False,
    ),
    "grouped, widths of their own": make.attention(
        WIDTH, 8, kv_heads=2, head_dim=7, value_dim=6, outputs=16, causal=True, key_bias=False
    ),
    "no output projection": make.attention(
        WIDTH, 3, head_dim=8, value_dim=5, outputs=15, output=False, output_bias=False
    ),
    "capped, scaled": make.attention(32, 2, inputs=WIDTH, contexts=WIDTH, softcap=2.0, scale=0.5),
    "alibi": make.attention(
        32, 4, inputs=WIDTH, contexts=WIDTH, alibi=(0.5, 0.25, 0.125, 0.0625), causal=True
    ),
    "wide": make.attention(272, 4, inputs=528, contexts=528, causal=True),
}  # fmt: skip
HALVES: Final[dict[str, make.Dtype]] = {
    "grouped, widths of their own, float16": "float16",
    "grouped, widths of their own, bfloat16": "bfloat16",
    "no output projection, bfloat16": "bfloat16",
    "alibi, float16": "float16",
    "wide, float16": "float16",
    "wide, bfloat16": "bfloat16",
}
"""Layers in half precision; the others are in float32."""
ARCHITECTURES |= {name: ARCHITECTURES[name.rpartition(",")[0]] for name in HALVES}
NUMPY: Final = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype(np.float32),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype(np.float16),
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
NEAR: Final = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}


class Layers:
    """Stands in for a registry of layers with random weights, on a device with some threads."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self._loaded: dict[str, Loaded] = {}

    def get(self, name: str) -> Loaded:
        """The loaded layer, as the registry returns it."""
        if name not in self._loaded:
            layer = make.layer_of(ARCHITECTURES[name], parameters(name), self.device, dtype_of(name))
            shape = outline(layer.specification)
            self._loaded[name] = Loaded(layer, shape, 1, Extents(layer, shape))
        return self._loaded[name]

    def read(self, name: str, rows: Any, shift: int = 0, **options: Any) -> LayerRequest:
        """A request received `shift` bytes past an aligned address."""
        message = b"".join(encode_apply(name, rows, **options).pieces)
        registry: Any = self
        return read_layer_request(registry, b"\0" * shift + message + b"\0", shift, shift + len(message))

    def outputs(self, *requests: LayerRequest) -> list[Any]:
        """The outputs of one group of requests run together, with reruns for those that need one."""
        return [reply(request, *each) for request, each in zip(requests, results(self.device, requests), strict=True)]


def results(device: CpuDevice, requests: Any) -> list[Any]:
    batch = requests[0].run_batch(device, list(requests))
    again: dict[int, Work] = dict(batch.again)
    whole = list(batch.results)
    for place, request in again.items():
        (whole[place],) = request.run_batch(device, [request]).results
    return [(result,) for result in whole]


def reply(request: LayerRequest, result: Any) -> Any:
    """The output in an encoded reply."""
    pieces, size = request.encode(result, Phases(0, 0, 0, 0, 0), 1)
    message = b"".join(pieces)
    assert len(message) == size
    output = pb.ApplyResponse.FromString(message).output
    return np.frombuffer(output.data, NUMPY[output.dtype]).reshape(output.shape)


def dtype_of(name: str) -> make.Dtype:
    return HALVES.get(name, "float32")


def parameters(name: str) -> make.Parameters:
    return make.random_parameters(ARCHITECTURES[name], 1, dtype_of(name))


def rows_of(name: str, *shape: int, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).standard_normal((*shape, ARCHITECTURES[name].inputs), np.float32)
    return rows.astype(dtype_of(name))


def exact(name: str, rows: Any, **changes: Any) -> Any:
    """One sequence's output by the oracle."""
    architecture = replace(ARCHITECTURES[name], **changes)
    rows = rows.astype(np.float64)
    return attended(rows, rows, architecture, make.doubles(parameters(name)))[0]


def assert_near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=NEAR[found.dtype.name])
