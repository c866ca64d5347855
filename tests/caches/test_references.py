"""References to caches are taken out of a request's header, within the limits for all of it."""

from __future__ import annotations

from dataclasses import replace

import limits
import pytest

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.caches.references import MessageType, Reference, read_header
from attnserve_server.errors import InvalidRequest, Malformed

LIMITS = replace(limits.LIMITS, max_sequences=10)
EACH_MESSAGE = pytest.mark.parametrize("message_type", [pb.AttendRequest, pb.ApplyRequest])


@EACH_MESSAGE
def test_they_are_taken_out_in_their_order(message_type: MessageType) -> None:
    """And nothing else is, wherever they stand; without any, the header is as it came."""
    given = [
        pb.CacheReference(name="one", expected_length=0, append_id=7),
        pb.CacheReference(name="two", layer=3),
    ]
    rest = message_type(return_lse=True).SerializeToString()
    own = message_type(caches=given).SerializeToString()
    for message in (own + rest, rest + own):
        references, header, payloads = read_header(message_type, b"??" + message + b"?", 2, 2 + len(message), LIMITS)
        assert references == (Reference("one", 0, 0, 7), Reference("two", 3, None, 0))
        assert header == rest
        assert not payloads.places
    assert read_header(message_type, rest, 0, len(rest), LIMITS)[:2] == ((), rest)


@EACH_MESSAGE
@pytest.mark.parametrize("more", range(1, 5))
def test_they_are_found_by_an_overlong_tag_too(message_type: MessageType, more: int) -> None:
    """Which may be their only one: stock protobuf reads tags of up to 5 bytes."""
    own = message_type(caches=[pb.CacheReference(name="one")]).SerializeToString()
    message = bytes((own[0] | 0x80, *[0x80] * (more - 1), 0)) + own[1:]
    assert message_type.FromString(message).caches
    references, header, _ = read_header(message_type, message, 0, len(message), LIMITS)
    assert (references, header) == ((Reference("one", 0, None),), b"")


@EACH_MESSAGE
def test_they_count_in_the_header(message_type: MessageType) -> None:
    """Long names as well as many references, though the rest is short."""
    for caches, field in (
        ([pb.CacheReference(name="x" * LIMITS.max_header_bytes)], ""),
        ([pb.CacheReference(name=str(n)) for n in range(LIMITS.max_sequences + 1)], "caches"),
    ):
        message = message_type(caches=caches).SerializeToString()
        with pytest.raises(InvalidRequest) as caught:
            read_header(message_type, message, 0, len(message), LIMITS)
        assert caught.value.field == field


@EACH_MESSAGE
def test_what_is_no_message_is_malformed(message_type: MessageType) -> None:
    whole = message_type(caches=[pb.CacheReference(name="one")]).SerializeToString()
    with pytest.raises(Malformed):
        read_header(message_type, whole, 0, len(whole) - 1, LIMITS)
