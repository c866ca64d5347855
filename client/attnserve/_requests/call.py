"""A call of any operation, encoded, with what is needed to turn its response into a result.

In: the checked arrays and the header made from an operation's arguments (`attend`, `apply`). Out: the pieces of the
message, some of them views of the caller's memory; later, from a `Response`, the arrays of the result, of the caller's
kind and on the caller's device.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import Message

from attnserve import _dtypes, _wire
from attnserve._errors import InvalidRequestError, ProtocolError
from attnserve._fields import Buffer
from attnserve._requests import arrays as _arrays
from attnserve._requests.arrays import Array
from attnserve._requests.operation import Operation
from attnserve._requests.reply import Response, decode_response
from attnserve._requests.result import Timings
from attnserve.v1 import tensor_pb2

ResultT = TypeVar("ResultT")

Tensors: TypeAlias = tuple[tuple[str, int, tuple[int, ...]], ...]
"""The tensors of a request without their elements: the path of each field, the dtype and the shape."""

_NANOSECOND: Final = 1e-9

_LIMIT: Final = "max_message_bytes"
_LONGEST: Final = 2**31 - 1
"""The most bytes that a server may let messages have by that limit, and that protobuf reads."""


def tensors(arrays: Sequence[tuple[str, Array]]) -> Tensors:
    """Arrays with the paths of their fields, without their elements."""
    return tuple([(field, array.dtype, array.shape) for field, array in arrays])


@lru_cache(maxsize=3072)
def header(
    request_type: type[Message], tensors: Tensors, window: tuple[int, int] | None = None, **fields: Any
) -> bytes:
    """The serialised request, with a ticket for each tensor, in order. A field that is None stays unset.

    It is remembered by its arguments. So a field must always have a value of the same type: 1, 1.0 and True would be
    taken for each other, as -0.0 is for 0.0.
    """
    if window is not None:
        fields["window"] = {"left": window[0], "right": window[1]}
    request = request_type(**fields)
    for index, (field, dtype, shape) in enumerate(tensors):
        tensor = operator.attrgetter(field)(request)
        tensor.dtype = dtype
        tensor.shape.extend(shape)
        tensor.data = _wire.ticket(index, prod(shape) * _dtypes.NUMPY[dtype].itemsize)
    return request.SerializeToString()


def assembled(
    request_type: type[Message], header: bytes, arrays: Sequence[tuple[str, Array]]
) -> tuple[list[Buffer], int]:
    """The pieces of a request, from its header and its arrays, in the order of the header's tickets; and their total
    length, in bytes. InvalidRequestError if that is more than any server takes: otherwise it would be copied and sent
    only to be refused.
    """
    pieces, size = _wire.join(request_type, header, [array.data for _, array in arrays])
    if size > _LONGEST:
        raise InvalidRequestError(
            f"expected a request of at most {_LONGEST} bytes ({_LIMIT}), found {size}", limit=_LIMIT
        )
    return pieces, size


class Parts(NamedTuple):
    """What all results have in common; arrays are of the caller's kind."""

    output: Any
    lse: Any
    scores: Any
    timings: Timings
    batch_size: int
    cache_lengths: tuple[int, ...]


class EncodedCall(ABC, Generic[ResultT]):
    """An encoded request, and what is needed to turn its response into a result."""

    __slots__ = (
        "_device",
        "_dtype",
        "_returns_lse",
        "_returns_scores",
        "_rows",
        "appends",
        "cache_lengths",
        "given",
        "pieces",
        "priority",
        "size",
        "started",
        "timeout",
    )

    operation: ClassVar[Operation]
    """The operation that is called."""

    def __init__(
        self,
        header: bytes,
        arrays: Sequence[tuple[str, Array]],
        like: Any,
        *,
        returns_lse: bool,
        returns_scores: bool,
        priority: int,
        timeout: float | None,
    ) -> None:
        """Assembles a request from its header and its arrays, in the order of the header's tickets.

        `like` is what the caller passed for the first array. The result is of its kind and on its device; the output
        has its dtype, or any floating dtype if `like` holds integers.
        """
        self.started = time.perf_counter()
        """When the call was made, in seconds of `time.perf_counter`."""
        self.pieces, self.size = assembled(self.operation.request_type, header, arrays)
        """The pieces that, concatenated, are the serialised request; and their total length, in bytes."""
        self.timeout = timeout
        """How long to wait for the reply, in seconds; None for no limit."""
        self.given = timeout
        """How long its caller allows for all that leads to the reply. `timeout` may be what is left of that."""
        self.priority: Final = priority
        """Calls of a higher one are sent first, where calls wait to be sent."""
        self.appends: Sequence[int] = ()
        """How many tokens it appends to each resident cache, or to all; empty if it appends none."""
        self.cache_lengths: Sequence[int | None] = ()
        """The lengths that its caches will have; None for one that another client writes."""
        _, (dtype, shape, _) = arrays[0]
        self._dtype = dtype if dtype in _dtypes.FLOATING else None
        self._rows = shape if self._dtype is None else shape[:-1]
        tensor = _arrays.torch_tensor(like)
        self._device = None if tensor is None else tensor.device
        self._returns_lse = returns_lse
        self._returns_scores = returns_scores

    def prepend(self, fields: bytes) -> None:
        """Puts serialised fields of the request before the others. It is for fields that change with every call: in the
        header, they would keep that from being remembered.
        """
        self.pieces.insert(0, fields)
        self.size += len(fields)

    @abstractmethod
    def result(self, response: Response) -> ResultT:
        """The result of the call. ProtocolError if the response does not fit this call."""

    def decode(self, data: bytes) -> ResultT:
        """The result of the call from the serialised response of a unary call. ProtocolError as for `result`, and if
        the bytes are no response.
        """
        return self.result(decode_response(self.operation, data))

    def parts(self, response: Response) -> Parts:
        """What all results have in common, from the response. ProtocolError if it does not fit this call."""
        operation, message, _ = response
        if operation is not self.operation:
            raise ProtocolError(f"the server answered {self.operation.field} with the result of {operation.field}")
        tensor = message.output
        found = tensor.dtype
        if found != self._dtype and not (self._dtype is None and found in _dtypes.FLOATING):
            expected = "a floating dtype" if self._dtype is None else _dtypes.name(self._dtype)
            name = _dtypes.name(found) if message.HasField("output") else "no output"
            raise ProtocolError(f"output: expected {expected}, the server replied with {name}")
        output = self._array("output", tensor, response)
        if output.shape[:-1] != self._rows:
            expected, shape = ", ".join([*map(str, self._rows), "..."]), list(output.shape)
            raise ProtocolError(f"output: expected the shape [{expected}], the server replied with {shape}")
        lse = scores = None
        if self._returns_lse:
            if not message.HasField("lse"):
                raise ProtocolError("lse: asked for, and the server replied without it")
            lse = self._array("lse", message.lse, response)
        if self._returns_scores:
            if not message.HasField("scores"):
                raise ProtocolError("scores: asked for, and the server replied without them")
            scores = self._array("scores", message.scores, response)
        cache_lengths = tuple(message.cache_lengths[:])
        for length, reported in zip(self.cache_lengths, cache_lengths, strict=False):  # whose number is checked later
            if length not in (None, reported):
                raise ProtocolError(f"cache_lengths: expected {length}, the server replied with {reported}")
        phases = message.timings
        timings = Timings(
            phases.decode_ns * _NANOSECOND,
            phases.queue_ns * _NANOSECOND,
            phases.staging_ns * _NANOSECOND,
            phases.compute_ns * _NANOSECOND,
            phases.encode_ns * _NANOSECOND,
            time.perf_counter() - self.started,
        )
        return Parts(output, lse, scores, timings, message.batch_size, cache_lengths)

    def _array(self, field: str, tensor: tensor_pb2.Tensor, response: Response) -> Any:
        array = _arrays.from_wire(field, tensor.dtype, tuple(tensor.shape[:]), response.elements(tensor))
        return array if self._device is None else _arrays.to_torch(array, self._device)
