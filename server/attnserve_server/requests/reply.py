"""From results to bytes: the pieces of an encoded `AttendResponse`; payloads are not copied.

Concatenated serialised messages decode to their merger, so a reply is the message of its timings followed by the
message of its tensors, whose header is the same for all requests with the same problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from google.protobuf.message import Message

from attnserve import _fields, _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.requests.work import Phases, RequestResult

if TYPE_CHECKING:
    from attnserve_server.caches.request import CachedRequest
    from attnserve_server.requests.problem import Problem
    from attnserve_server.requests.request import Request

ReplyTensor: TypeAlias = tuple[str, int, Sequence[int]]
"""The field of a tensor in a response, its dtype and its shape."""


def encode_attend_response(
    request: Request | CachedRequest,
    result: RequestResult,
    phases: Phases,
    batch_size: int,
    cache_lengths: Sequence[int] = (),
) -> tuple[list[_fields.Buffer], int]:
    """The pieces of the reply, and their total length."""
    payloads = payloads_of(result)
    problem = request.problem
    scores_length = 0 if problem.return_scores is None else request.longest[1]
    header = _tensors_header(problem, scores_length, tuple(map(len, payloads)))
    timings = _TIMED.encode(phases, batch_size)
    if cache_lengths:
        timings += pb.AttendResponse(cache_lengths=cache_lengths).SerializeToString()
    pieces, size = _wire.join(pb.AttendResponse, header, payloads)
    return [timings, *pieces], len(timings) + size


def reply_template(problem: Problem, sizes: Sequence[int]) -> list[bytes]:
    """The bytes before, between and after the payloads of replies without scores, except the timings, which come first.
    The payloads are output and, if asked for, lse, of these sizes in bytes.
    """
    payloads = [memoryview(bytes(size)) for size in sizes]
    pieces, _ = _wire.join(pb.AttendResponse, _tensors_header(problem, 0, tuple(sizes)), payloads)
    around = [b""]
    for piece in pieces:
        if any(piece is payload for payload in payloads):
            around.append(b"")
        else:
            around[-1] += piece
    return around


def payloads_of(result: RequestResult) -> list[memoryview]:
    """The payloads of a reply, in the order of its tensors."""
    return [payload for payload in (result.output, result.lse, result.scores) if payload is not None]


class Timed:
    """What replies of a type say about how they were computed. One message is reused for all replies: setting its
    fields takes half as long as making another. Only on the event loop.
    """

    def __init__(self, response_type: type[pb.AttendResponse] | type[pb.ApplyResponse]) -> None:
        self._message = response_type()
        self._timings = self._message.timings

    def encode(self, phases: Phases, batch_size: int) -> bytes:
        """The fields `timings` and `batch_size` of a reply."""
        timings = self._timings
        timings.decode_ns = round(phases.decode * 1e9)
        timings.queue_ns = round(phases.queue * 1e9)
        timings.staging_ns = round(phases.staging * 1e9)
        timings.compute_ns = round(phases.compute * 1e9)
        timings.encode_ns = round(phases.encode * 1e9)
        self._message.batch_size = batch_size
        return self._message.SerializeToString()


_TIMED: Final = Timed(pb.AttendResponse)


@lru_cache(maxsize=1024)
def _tensors_header(problem: Problem, scores_length: int, sizes: tuple[int, ...]) -> bytes:
    """The header of the reply's tensors: output, then lse and scores if asked for."""
    dtype, rank = problem.dtype, problem.rank
    batch, heads, length, width = problem.batch, problem.query_heads, problem.query_length, problem.value_dim
    outer = [heads, length] if problem.packed or rank == 3 else [batch, heads, length] if rank == 4 else [length]
    shape = [*outer, width]
    if problem.tokens_first:
        shape[-3], shape[-2] = shape[-2], shape[-3]
    tensors: list[ReplyTensor] = [("output", dtype, shape)]
    if problem.return_lse:
        lse_dtype = dtype if dtype == tensor_pb2.DATA_TYPE_FLOAT64 else tensor_pb2.DATA_TYPE_FLOAT32
        tensors.append(("lse", lse_dtype, outer))
    if problem.return_scores is not None:
        tensors.append(("scores", dtype, [*outer, scores_length]))
    return tensors_header(pb.AttendResponse, tensors, sizes)


def tensors_header(response_type: type[Message], tensors: Sequence[ReplyTensor], sizes: Sequence[int]) -> bytes:
    """The header of a response with only tensors, whose payloads come in this order and have these sizes."""
    message = response_type()
    for index, ((field, dtype, shape), size) in enumerate(zip(tensors, sizes, strict=True)):
        tensor = tensor_pb2.Tensor(dtype=dtype, shape=shape, data=_wire.ticket(index, size))  # type: ignore[arg-type]
        getattr(message, field).CopyFrom(tensor)
    return message.SerializeToString()
