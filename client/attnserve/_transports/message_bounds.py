"""What a stream's next message may hold, and what follows when gRPC finds a message too long.

In: the calls of a stream. Out: the bounds of a message; which call made a message too long. No I/O, no clock. gRPC ends
a stream at a message over a limit, whether the server's, or one that the client's caller has set, and does not say
which message it was.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeVar

from attnserve._errors import AttnServeError, is_of_reply
from attnserve._transports.in_flight import Call

T = TypeVar("T")


class MessageBounds:
    """The bounds on the messages of one stream, and of its successors."""

    def __init__(self, calls: Container[int], message_bytes: int) -> None:
        """`calls` are the ids of calls without an outcome; a message of several calls has at most `message_bytes`."""
        self._calls = calls
        self.message_bytes = message_bytes
        """The most that several calls in a message have together."""
        self._suspects: list[int] = []
        self._given_up: dict[int, int] = {}  # by stream

    @property
    def one_by_one(self) -> bool:
        """Whether a call is sent only when no other is in flight: one of them gets a reply that is too long."""
        while self._suspects and self._suspects[-1] not in self._calls:
            self._suspects.pop()
        return bool(self._suspects)

    def given_up(self, call: Call[T]) -> None:
        """Notes that a call was given up after it was sent: its message, or reply, may still be too long. So it counts
        for as long as its stream lasts, even once it is answered: at worst, other calls are sent again for nothing.
        """
        self._given_up[call.stream] = max(self._given_up.get(call.stream, 0), call.message_size)

    def ended(self, stream: int) -> int:
        """The size of the longest message of a stream with a call that was given up, 0 if there was none. The stream
        has ended, and will not be asked for again.
        """
        return self._given_up.pop(stream, 0)

    def too_long(self, affected: Sequence[Call[T]], error: AttnServeError, given_up: int) -> Call[T] | None:
        """The call, of those in flight, that made a message too long: all others are to be sent again. None if it is
        not known, or if it was one that was given up (`given_up` is what `ended` returned): then all are.

        If it was a message that was sent, it was the longest. If that held a single call, it was this call; if several,
        messages are shorter from now on. If it was a reply, it may have been to any call: from now on they are sent one
        by one. So every time brings the search further, and these retries need no bound.
        """
        if is_of_reply(error):
            if len(affected) == 1 and not given_up:
                return affected[0]
            self._suspects += [call.id for call in affected]
            return None
        longest = max(affected, key=lambda call: call.message_size, default=None)
        if longest is None or longest.message_size < given_up:
            return None
        if longest.size < longest.message_size:
            self.message_bytes = longest.message_size // 2
            return None
        return longest
