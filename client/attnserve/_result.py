"""What an attention gives: a reply as an `AttentionResult`.

In: the bytes of a stream's message, or of a unary response. Out: replies by the id of their call, and results as
arrays of the caller's kind. Whatever makes no sense is a `ProtocolError`, never an exception of another library.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic, NamedTuple, cast

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from attnserve import _arrays, _dtypes, _wire
from attnserve._errors import ProtocolError
from attnserve._request import ArrayT, AttendCall
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

_NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class Timings:
    """How long each phase of a call took, in seconds: as the server measured them, and the whole as the SDK did."""

    decode: float
    """Decoding and checking the request."""
    queue: float
    """Waiting to be run."""
    staging: float
    """Bringing the batch to the device."""
    compute: float
    """Computing the batch."""
    encode: float
    """Bringing the results back and encoding them."""
    total: float
    """From the call of `attend` or `submit` to its result, the network included."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult(Generic[ArrayT]):
    """The result of an attention. Arrays are of the query's kind, NumPy or torch, and on the query's device."""

    output: ArrayT
    """``[B, Hq, Lq, Dv]`` in the layout, rank and dtype of the query."""
    lse: ArrayT | None
    """Log-sum-exp of each row: ``[B, Hq, Lq]`` whatever the layout (``[Hq, total]`` where packed), without the axes
    that the query's rank lacks; float32, or float64 for float64 queries. None unless asked for."""
    scores: ArrayT | None
    """The scores asked for: ``[B, Hq, Lq, S]`` whatever the layout (``[Hq, total, longest S]`` where packed), without
    the axes that the query's rank lacks, in the dtype of the query. None unless asked for."""
    timings: Timings
    """How long each phase took."""
    batch_size: int
    """How many requests ran together with this one, itself included."""


class Attended(NamedTuple):
    """A decoded `AttendResponse`: its header, and the payloads that its tickets name."""

    response: pb.AttendResponse
    payloads: list[memoryview]


class Reply(NamedTuple):
    """The reply to one call of a stream."""

    id: int
    result: Attended | Status | ProtocolError
    """What came of the call; a ProtocolError if the reply says neither."""


def decode_replies(data: bytes) -> list[Reply]:
    """The replies in an `AttendStreamResponse`. ProtocolError if the bytes are none."""
    try:
        header, payloads = _wire.split(pb.AttendStreamResponse, data)
        message = pb.AttendStreamResponse.FromString(header)
    except DecodeError as error:
        raise ProtocolError(f"the server sent what is not a message of replies: {error}") from error
    replies = []
    for reply in message.replies:
        kind = reply.WhichOneof("result")
        result: Attended | Status | ProtocolError
        if kind == "attend":
            result = Attended(reply.attend, payloads)
        elif kind == "error":
            result = reply.error
        else:
            result = ProtocolError("the server sent a reply with neither a result nor an error")
        replies.append(Reply(reply.id, result))
    return replies


def decode_response(data: bytes) -> Attended:
    """An `AttendResponse`. ProtocolError if the bytes are none."""
    try:
        header, payloads = _wire.split(pb.AttendResponse, data)
        return Attended(pb.AttendResponse.FromString(header), payloads)
    except DecodeError as error:
        raise ProtocolError(f"the server sent what is not a response: {error}") from error


def attention_result(call: AttendCall[ArrayT], attended: Attended) -> AttentionResult[ArrayT]:
    """The result of a call. ProtocolError if the response is not one to this call."""
    response, payloads = attended
    if response.output.dtype != call.dtype:
        found = _dtypes.name(response.output.dtype) if response.HasField("output") else "no output"
        raise ProtocolError(f"output: expected {_dtypes.name(call.dtype)}, the server replied with {found}")
    output = _array(call, "output", response.output, payloads)
    lse = scores = None
    if call.returns_lse:
        if not response.HasField("lse"):
            raise ProtocolError("lse: asked for, and the server replied without it")
        lse = _array(call, "lse", response.lse, payloads)
    if call.returns_scores:
        if not response.HasField("scores"):
            raise ProtocolError("scores: asked for, and the server replied without them")
        scores = _array(call, "scores", response.scores, payloads)
    phases = response.timings
    timings = Timings(
        phases.decode_ns * _NANOSECOND,
        phases.queue_ns * _NANOSECOND,
        phases.staging_ns * _NANOSECOND,
        phases.compute_ns * _NANOSECOND,
        phases.encode_ns * _NANOSECOND,
        time.perf_counter() - call.started,
    )
    return AttentionResult(output, lse, scores, timings, response.batch_size)


def _array(call: AttendCall[ArrayT], field: str, tensor: tensor_pb2.Tensor, payloads: list[memoryview]) -> ArrayT:
    index = _wire.read_ticket(tensor.data)[0]
    data = payloads[index] if index >= 0 else b""
    array = _arrays.from_wire(field, tensor.dtype, tuple(tensor.shape), data)
    return cast(ArrayT, array if call.device is None else _arrays.to_torch(array, call.device))
