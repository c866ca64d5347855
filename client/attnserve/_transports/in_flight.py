"""One call on a stream, from submission to outcome: what is sent, its deadline, and its state.

No I/O, no clock. Only the multiplexer (`multiplexer.py`) that has a call changes it; moving a call to another server
hands it to another multiplexer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final, Generic, TypeAlias, TypeVar

from attnserve._errors import AttnServeError, OverloadedError
from attnserve._fields import Buffer
from attnserve._requests.call import EncodedCall
from attnserve._requests.reply import Response
from attnserve._tracing import CallSpan

T = TypeVar("T")


class Call(Generic[T]):
    """One call and its state."""

    __slots__ = (
        "attempts",
        "avoid",
        "deadline",
        "due",
        "field",
        "given",
        "id",
        "message_size",
        "owner",
        "pieces",
        "pinned",
        "priority",
        "refusal",
        "refusals",
        "resent",
        "size",
        "stream",
        "timeout",
        "trace",
    )

    def __init__(
        self, owner: T, field: int, pieces: Sequence[Buffer], size: int, now: float, timeout: float | None
    ) -> None:
        self.owner: Final = owner
        """Who waits for the outcome; opaque here."""
        self.field: Final = field
        """The field number of the request in a stream's call, which says what operation it is."""
        self.pieces: Final = pieces
        """The serialised request, kept until the outcome because the call may have to be sent again."""
        self.size: Final = size
        """The total length of the pieces, in bytes."""
        self.timeout: Final = timeout
        self.given = timeout
        """How many seconds the caller allowed in all, which errors name; `timeout` is what was left of them here."""
        self.deadline: Final = inf if timeout is None else now + timeout
        """When the caller stops waiting."""
        self.pinned = False
        """Whether only this server can answer it."""
        self.priority = 0
        """If calls wait for room, those of a higher one are sent first."""
        self.trace = b""
        """Its trace context, as serialised fields of a stream's call."""
        self.id = 0
        """The call's id on the wire; 0 before it is added."""
        self.stream = 0
        """The stream on which the call was sent; 0 while it is not sent."""
        self.message_size = 0
        """The total size of the calls in the message that it was sent in."""
        self.attempts = 0
        """How many attempts have failed, for another reason than that the server had no room."""
        self.refusals = 0
        """How often a server had no room for it."""
        self.refusal: OverloadedError | None = None
        """The error that refused the last attempt, if a server had no room."""
        self.due = 0.0
        """When it is to be sent again, if it waits for that."""
        self.avoid: str | None = None
        """The address of the server at which the last attempt failed."""
        self.resent = False
        """Whether an earlier attempt may have run without a reply; one that was answered UNAVAILABLE did not."""

    @classmethod
    def of(cls, owner: T, encoded: EncodedCall[Any], now: float, *, span: CallSpan | None, pinned: bool) -> Call[T]:
        """An encoded call, whose time runs from `now` on, and which carries the context of a span if it has one."""
        call = cls(owner, encoded.operation.number, encoded.pieces, encoded.size, now, encoded.timeout)
        call.given = encoded.given
        if span is not None:
            call.trace = span.fields
        call.pinned = pinned
        call.priority = encoded.priority
        return call


Outcome: TypeAlias = tuple[Call[T], Response | AttnServeError]
