"""Requests and replies as messages, for tests that use the server's rooms without the SDK."""

from __future__ import annotations

from typing import Any

import numpy as np
from limits import LIMITS
from numpy.typing import NDArray

from attnserve import _dtypes
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.caches.request import read_attend
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.request import Request

Array = NDArray[Any]


def tensor(array: Array) -> tensor_pb2.Tensor:
    """The array as a tensor of the wire format."""
    data = np.ascontiguousarray(array)
    return tensor_pb2.Tensor(
        dtype=_dtypes.WIRE[data.dtype],  # type: ignore[arg-type]
        shape=array.shape,
        data=data.tobytes(),
    )


def array(message: tensor_pb2.Tensor) -> Array:
    """The array that a tensor holds."""
    return np.frombuffer(message.data, _dtypes.NUMPY[message.dtype]).reshape(tuple(message.shape))


def attend(query: Array, key: Array, value: Array, **fields: Any) -> pb.AttendRequest:
    """A request; fields that are arrays become tensors."""
    fields |= {"query": query, "key": key, "value": value}
    given: dict[str, Any] = {
        name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()
    }
    return pb.AttendRequest(**given)


def random_attend(
    seed: int,
    length: int = 3,
    *,
    kv_length: int | None = None,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    width: int = 8,
    dtype: Any = np.float32,
    **fields: Any,
) -> pb.AttendRequest:
    """A request of rank 4, heads first, with unit-normal contents from a seed."""
    rng = np.random.default_rng(seed)
    kv_length = length if kv_length is None else kv_length
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = (batch, heads, length, width), (batch, kv_heads, kv_length, width), (batch, kv_heads, kv_length, width)
    return attend(*(rng.standard_normal(shape).astype(dtype) for shape in shapes), **fields)


def read_request(buffer: bytes, at: int = 0, end: int | None = None, limits: RequestLimits = LIMITS) -> Request:
    """The request that a part of a buffer holds, as the server reads it. Raises InvalidRequest."""
    nobody: Any = None  # without caches, neither their host nor the caller is looked at
    request = read_attend(nobody, nobody, buffer, at, len(buffer) if end is None else end, limits)
    assert isinstance(request, Request)
    return request


def read(message: pb.AttendRequest) -> Request:
    """The message as the server's rooms get it."""
    return read_request(message.SerializeToString())
