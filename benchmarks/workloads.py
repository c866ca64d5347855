"""What is measured: closed loops of equal requests, 8 heads of 64, float32, causal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

HEADS, WIDTH = 8, 64


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one length, so many in flight."""

    name: str
    length: int
    in_flight: int

    @property
    def description(self) -> str:
        """In words."""
        return f"{self.length} tokens, {self.in_flight} in flight"

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value, [H, L, D]."""
        random = np.random.default_rng(seed)
        return tuple(random.standard_normal((HEADS, self.length, WIDTH), dtype=np.float32) for _ in range(3))  # type: ignore[return-value]

    def request(self) -> bytes:
        """An encoded AttendRequest."""
        query, key, value = (
            tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())
            for array in self.arrays()
        )
        return pb.AttendRequest(causal=True, query=query, key=key, value=value).SerializeToString()

    def reply(self) -> bytes:
        """An encoded AttendResponse of the right size, for a server that computes nothing."""
        (query, _, _) = self.arrays()
        output = tensor_pb2.Tensor(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=(HEADS, self.length, WIDTH), data=query.tobytes()
        )
        return pb.AttendResponse(batch_size=1, output=output).SerializeToString()


WORKLOADS = (
    Workload("S", 16, 16),
    Workload("S1", 16, 1),
    Workload("M", 128, 8),
    Workload("L", 1024, 4),
)


def call(call_id: int, request: bytes) -> list[_wire.Buffer]:
    """The pieces of one call on a stream, as a field of AttendStreamRequest."""
    envelope = (
        b"\x08" + _wire.varint(call_id) + _wire.field_prefix(pb.AttendStreamCall.ATTEND_FIELD_NUMBER, len(request))
    )
    prefix = _wire.field_prefix(pb.AttendStreamRequest.CALLS_FIELD_NUMBER, len(envelope) + len(request))
    return [prefix + envelope, request]


def reply_ids(message: bytes) -> list[int]:
    """The ids of the replies of an AttendStreamResponse. Raises RuntimeError at an error."""
    ids = []
    for _, _, _, content, end in _wire.fields(message, 0, len(message)):
        call_id = 0
        for number, _, start, inner, behind in _wire.fields(message, content, end):
            if number == pb.AttendStreamReply.ID_FIELD_NUMBER:
                call_id = pb.AttendStreamReply.FromString(message[start:behind]).id
            elif number == pb.AttendStreamReply.ERROR_FIELD_NUMBER:
                raise RuntimeError(pb.AttendStreamReply.FromString(message[content:end]).error.message)
            del inner
        ids.append(call_id)
    return ids
