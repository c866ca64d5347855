"""Replies as clients read them: small ones by protobuf alone, large ones by their headers, with the same arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from attnserve import ProtocolError
from attnserve._requests.operation import ATTEND
from attnserve._requests.reply import Response, decode_replies, decode_response
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

SMALL, LARGE = 16, 1 << 16


def response(elements: int) -> pb.AttendResponse:
    """A response with an output of `elements` numbers and an lse of one."""
    found = pb.AttendResponse(batch_size=elements)
    for tensor, count in ((found.output, elements), (found.lse, 1)):
        tensor.dtype = tensor_pb2.DATA_TYPE_FLOAT32
        tensor.shape.append(count)
        tensor.data = np.arange(count, dtype=np.float32).tobytes()
    return found


def message(sizes: Sequence[int], *, closing: bool = False) -> bytes:
    """A message of replies with outputs of the given sizes, followed by an error."""
    replies = [pb.AttendStreamReply(id=number, attend=response(size)) for number, size in enumerate(sizes, 1)]
    refused = pb.AttendStreamReply(id=len(sizes) + 1)
    refused.error.message = "no"
    return pb.AttendStreamResponse(replies=[*replies, refused], closing=closing).SerializeToString()


def check(found: Response, elements: int) -> None:
    """Compares a response with the one of `response`."""
    assert found.operation is ATTEND
    assert found.message.batch_size == elements
    output = np.frombuffer(found.elements(found.message.output), np.float32)
    np.testing.assert_array_equal(output, np.arange(elements, dtype=np.float32))
    assert bytes(found.elements(found.message.lse)) == bytes(4)
    assert not found.elements(found.message.scores)


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize(
    "sizes", [(), (SMALL,), (LARGE,), (0, SMALL), (SMALL, LARGE), (LARGE, SMALL), (SMALL,) * 4000, (LARGE,) * 5]
)
def test_replies_of_every_size_are_read_alike(sizes: tuple[int, ...], closing: bool) -> None:
    replies, found_closing = decode_replies(message(sizes, closing=closing))
    assert found_closing == closing
    assert [reply.id for reply in replies] == list(range(1, len(sizes) + 2))
    for reply, size in zip(replies, sizes, strict=False):
        assert isinstance(reply.result, Response)
        check(reply.result, size)
    assert replies[-1].result == pb.AttendStreamResponse.FromString(message(())).replies[0].error


@pytest.mark.parametrize("size", [0, SMALL, LARGE])
def test_responses_of_every_size_are_read_alike(size: int) -> None:
    check(decode_response(ATTEND, response(size).SerializeToString()), size)


def test_a_message_of_nothing_holds_nothing() -> None:
    assert decode_replies(b"") == ([], False)


@pytest.mark.parametrize("sizes", [(SMALL,), (LARGE,), (SMALL, LARGE), (LARGE, SMALL)])
def test_what_is_no_message_is_said_to_be_none(sizes: tuple[int, ...]) -> None:
    data = message(sizes)
    for spoilt in (data[:-1], data + b"\x0a", data + b"\x07", b"\xff" * 20, b"\xff" * (1 << 17)):
        with pytest.raises(ProtocolError):
            decode_replies(spoilt)
    found = response(sizes[0]).SerializeToString()
    for spoilt in (found[:-1], found + b"\x0a", b"\xff" * 20, b"\xff" * (1 << 17)):
        with pytest.raises(ProtocolError):
            decode_response(ATTEND, spoilt)
