"""Tensors as a request's header describes them: dtype, shape and payload, checked against each other.

In: a message and the path of a tensor in it. Out: a `TensorSpec`, or InvalidRequest with the path.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from attnserve import _dtypes, _wire
from attnserve.v1 import tensor_pb2
from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest

MAX_RANK = 4
"""The most axes of a tensor, however the server is configured."""
MAX_LENGTH = (1 << 31) - 1
"""The longest axis of a tensor."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The place of a tensor's elements among the payloads (-1 if it has none), their dtype, and the shape."""

    payload: int
    dtype: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * _dtypes.NUMPY[self.dtype].itemsize


def tensor_at(message: Message, path: str) -> TensorSpec:
    """The tensor at a path, after checking its dtype, and that its payload is as long as its shape says."""
    owner: Any = message
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if not owner.HasField(name):
        raise InvalidRequest(path, "a tensor", "nothing")
    tensor: tensor_pb2.Tensor = getattr(owner, name)
    dtype = _dtypes.NUMPY.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{path}.dtype", "one of the data types", _dtypes.name(tensor.dtype))
    check_rank(f"{path}.shape", tensor.shape)
    shape = tuple(tensor.shape)
    if any(length < 0 for length in shape):
        raise InvalidRequest(f"{path}.shape", "lengths of 0 or more", list(shape))
    if any(length > MAX_LENGTH for length in shape):
        allowed = f"lengths of at most {MAX_LENGTH}"
        raise InvalidRequest(f"{path}.shape", allowed, list(shape), LIMIT_EXCEEDED, limit="max_axis_length")
    payload, size = _wire.read_ticket(tensor.data)
    expected = math.prod(shape) * dtype.itemsize
    if size != expected:
        raise InvalidRequest(f"{path}.data", f"{expected} bytes for {dtype.name} {list(shape)}", f"{size} bytes")
    return TensorSpec(payload, tensor.dtype, shape)


def check_rank(field: str, shape: Sequence[int], most: int = MAX_RANK) -> None:
    """Raises InvalidRequest if there are too many axes, before looking at any: multiplying as many lengths as fit into
    a message takes minutes.
    """
    if len(shape) > most:
        raise InvalidRequest(field, f"at most {most} axes", f"{len(shape)} axes", LIMIT_EXCEEDED, limit="max_rank")


def float_tensor(message: Message, path: str) -> TensorSpec:
    """The tensor at a path, of a floating dtype."""
    spec = tensor_at(message, path)
    if spec.dtype not in _dtypes.FLOATING:
        raise InvalidRequest(f"{path}.dtype", "a floating dtype", _dtypes.name(spec.dtype))
    return spec


def parameter(message: Message, path: str, shape: tuple[int, ...]) -> TensorSpec:
    """The tensor at a path, of a floating dtype and a given shape."""
    spec = float_tensor(message, path)
    if spec.shape != shape:
        raise InvalidRequest(f"{path}.shape", str(list(shape)), shown(spec))
    return spec


def int_tensor(message: Message, path: str, shapes: tuple[tuple[int, ...], ...]) -> TensorSpec:
    """The tensor at a path, of dtype int64 and one of the given shapes."""
    spec = tensor_at(message, path)
    if spec.dtype != tensor_pb2.DATA_TYPE_INT64:
        raise InvalidRequest(f"{path}.dtype", "int64", _dtypes.name(spec.dtype))
    if spec.shape not in shapes:
        raise InvalidRequest(f"{path}.shape", " or ".join(str(list(shape)) for shape in shapes), shown(spec))
    return spec


def masks_of(message: Message) -> dict[str, TensorSpec]:
    """The mask and the bias of a request, as far as it has them."""
    given: Any = message
    tensors = {}
    if given.HasField("mask"):
        mask = tensors["mask"] = tensor_at(message, "mask")
        if mask.dtype != tensor_pb2.DATA_TYPE_BOOL:
            expected = "bool (what is added to the scores is `bias`)"
            raise InvalidRequest("mask.dtype", expected, _dtypes.name(mask.dtype))
    if given.HasField("bias"):
        tensors["bias"] = float_tensor(message, "bias")
    return tensors


def check_masks(tensors: Mapping[str, TensorSpec], target: tuple[int, int, int, int], axes: int = 4) -> None:
    """Raises InvalidRequest unless mask and bias, as far as they are given, broadcast to [B, Hq, Lq, S] as NumPy does,
    aligned at the right. The error shows only that many `axes`, the last ones: those that the request's own tensors
    have.
    """
    for name in ("mask", "bias"):
        if name in tensors:
            _check_broadcast(name, tensors[name], target, axes)


def check_lengths(field: str, lengths: Sequence[int], most: int, packed: bool) -> None:
    """Raises InvalidRequest unless each is a part of an axis of length `most`, and all together are the whole of a
    packed one.
    """
    for index, length in enumerate(lengths):
        if not 0 <= length <= most:
            raise InvalidRequest(f"{field}[{index}]", f"from 0 to {most}", length)
    if packed and sum(lengths) != most:
        raise InvalidRequest(field, f"a sum of {most}, the total of the packed tensor", sum(lengths))


def _check_broadcast(field: str, spec: TensorSpec, target: tuple[int, int, int, int], axes: int) -> None:
    shape = spec.shape
    if any(length not in (1, wanted) for length, wanted in zip(reversed(shape), reversed(target), strict=False)):
        expected = f"a shape that broadcasts to {list(target[-axes:])}"
        batch, _, _, keys = target
        if shape == (batch, keys) and axes == 4:
            expected += f" (one row of keys for each sequence is [{batch}, 1, 1, {keys}])"
        raise InvalidRequest(f"{field}.shape", expected, shown(spec))


def read_integers(spec: TensorSpec | None, payloads: Sequence[memoryview]) -> tuple[int, ...] | None:
    """The elements of an int64 tensor; None for no tensor."""
    if spec is None:
        return None
    if spec.payload < 0:
        return ()
    return struct.unpack(f"<{spec.size // 8}q", payloads[spec.payload])


def shown(spec: TensorSpec) -> str:
    """A shape, as errors show it."""
    return f"shape {list(spec.shape)}"
