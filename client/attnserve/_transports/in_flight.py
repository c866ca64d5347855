"""One call on a stream, from when it is taken to its outcome: what is sent, until when, and where it stands.

No I/O, no clock. Only the multiplexer changes one (`multiplexer.py`); who moves it to another server hands it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Generic, TypeAlias, TypeVar

from attnserve._errors import AttnServeError, OverloadedError
from attnserve._fields import Buffer
from attnserve._requests.reply import Response

T = TypeVar("T")


class Call(Generic[T]):
    """One call and where it stands."""

    __slots__ = (
        "attempts",
        "deadline",
        "field",
        "id",
        "message_size",
        "owner",
        "pieces",
        "pinned",
        "refusal",
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
        """Whoever waits for the outcome; means nothing here."""
        self.field: Final = field
        """The number of the field that the request has in a stream's call: what is asked for."""
        self.pieces: Final = pieces
        """The serialised request, kept until the outcome: the call may have to be sent again."""
        self.size: Final = size
        """The length of the pieces together, in bytes."""
        self.timeout: Final = timeout
        self.deadline: Final = inf if timeout is None else now + timeout
        """When nobody waits any more."""
        self.pinned = False
        """Whether no other server can answer it."""
        self.trace = b""
        """Its trace context, as serialised fields of a stream's call."""
        self.id = 0
        """What the call is named on the wire; 0 before it is added."""
        self.stream = 0
        """The stream on which the call was sent; 0 while it is not sent."""
        self.message_size = 0
        """The sizes together of the calls in the message with which it was sent."""
        self.attempts = 0
        """How many attempts have failed."""
        self.refusal: OverloadedError | None = None
        """What the last attempt was refused with, if a server had no room."""
        self.resent = False
        """Whether an attempt may have been carried out without a reply; one that was answered UNAVAILABLE was not."""


Outcome: TypeAlias = tuple[Call[T], Response | AttnServeError]
