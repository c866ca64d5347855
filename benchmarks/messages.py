"""Puts encoded calls into a stream's messages, and takes encoded replies out of them, decoding little else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from attnserve import _fields
from attnserve._requests.operation import Operation
from attnserve.v1 import attention_pb2 as pb
from benchmarks.meters import Refused

_ID: Final = _fields.field_tag(pb.AttendStreamCall.ID_FIELD_NUMBER, _fields.VARINT)


def call(operation: Operation, call_id: int, request: bytes) -> list[_fields.Buffer]:
    """The pieces of one call, as a field of AttendStreamRequest."""
    envelope = _ID + _fields.varint(call_id) + _fields.field_prefix(operation.number, len(request))
    prefix = _fields.field_prefix(pb.AttendStreamRequest.CALLS_FIELD_NUMBER, len(envelope) + len(request))
    return [prefix + envelope, request]


def replies(operation: Operation, message: bytes) -> Iterator[tuple[int, memoryview | Refused]]:
    """The ids and encoded replies in an AttendStreamResponse, or refusals. RuntimeError if a reply has neither."""
    reply_number = pb.AttendStreamReply.DESCRIPTOR.fields_by_name[operation.field].number
    view = memoryview(message)
    for _, _, _, content, end in _fields.fields(message, 0, len(message)):
        call_id: int = 0
        reply: memoryview | Refused | None = None
        for number, _, start, inner, behind in _fields.fields(message, content, end):
            if number == pb.AttendStreamReply.ID_FIELD_NUMBER:
                call_id = pb.AttendStreamReply.FromString(message[start:behind]).id
            elif number == reply_number:
                reply = view[inner:behind]
            elif number == pb.AttendStreamReply.ERROR_FIELD_NUMBER:
                reply = Refused(pb.AttendStreamReply.FromString(message[content:end]).error.message)
        if reply is None:
            raise RuntimeError("a reply without a result")
        yield call_id, reply
