"""The caches that a request refers to, taken out of its header: they change with every step, the rest rarely.

In: a serialised `AttendRequest` or `ApplyRequest`. Out: the references, and the header without them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from attnserve import _fields, _wire
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.caches.work import check_named
from attnserve_server.errors import Malformed
from attnserve_server.requests.limits import RequestLimits

MessageType: TypeAlias = type[pb.AttendRequest] | type[pb.ApplyRequest]

MAX_REMEMBERED_BYTES: Final = 8 << 10
"""Headers of up to so many bytes are remembered: those of some hundred references."""


def _beginnings(number: int) -> tuple[bytes, bytes, bytes]:
    """How a message's field may begin: with its tag as everybody writes it, or with an overlong one."""
    tag = _fields.field_tag(number, _fields.LENGTH_DELIMITED)
    overlong = tag[:-1] + bytes((tag[-1] | 0x80,))
    return tag, overlong + b"\x80", overlong + b"\0"


_BEGINNINGS: Final = {
    message_type: _beginnings(message_type.CACHES_FIELD_NUMBER) for message_type in (pb.AttendRequest, pb.ApplyRequest)
}
"""How references begin, for each type of message: a header without any of these has none."""


class Reference(NamedTuple):
    """A cache, as a request names it."""

    name: str
    layer: int
    expected_length: int | None
    append_id: int = 0


def read_header(
    message_type: MessageType, buffer: bytes, at: int, end: int, limits: RequestLimits
) -> tuple[tuple[Reference, ...], bytes, Payloads]:
    """The caches that the message in a part of a buffer names, the message's header without them, and its payloads.
    Raises InvalidRequest.
    """
    try:
        header, payloads = _wire.find(message_type, buffer, at, end)
        known = len(header) <= MAX_REMEMBERED_BYTES
        if not known:
            limits.check_header(header)
        plain, overlong, longest = _BEGINNINGS[message_type]
        if plain not in header and overlong not in header and longest not in header:
            return (), header, payloads
        # Classes of messages are hashable, whatever their stubs say.
        references, rest = (_known if known else _apart)(message_type, header, limits)  # type: ignore[arg-type]
    except DecodeError as error:
        raise Malformed("", error) from None
    return references, rest, payloads


def _apart(message_type: MessageType, header: bytes, limits: RequestLimits) -> tuple[tuple[Reference, ...], bytes]:
    found: list[bytes] = []
    rest: list[bytes] = []
    for number, wire_type, start, _, end in _fields.fields(header, 0, len(header)):
        is_reference = number == message_type.CACHES_FIELD_NUMBER and wire_type == _fields.LENGTH_DELIMITED
        (found if is_reference else rest).append(header[start:end])
        limits.check_sequences("caches", len(found), or_more=True)
    references = tuple(
        Reference(
            each.name,
            each.layer,
            each.expected_length if each.HasField("expected_length") else None,
            each.append_id,
        )
        for each in message_type.FromString(b"".join(found)).caches
    )
    check_named([reference.name for reference in references])
    return references, b"".join(rest)


_known = lru_cache(maxsize=128)(_apart)
