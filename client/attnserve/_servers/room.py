"""Until when a server that had no room for a call need not be asked again, however many calls come.

In: the errors of refused calls. They say after how many seconds there should be room: when half of what waits is
computed, so that the server does not run out of work. Out: when there should be room, and what the server would say to
a call until then. No I/O, no clock.
"""

from __future__ import annotations

from math import inf
from typing import Final

from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo

from attnserve._errors import AttnServeError, OverloadedError
from attnserve._settings.retry import room_after

LONGEST: Final = 5.0
"""How long, in seconds, a server that had no room is left alone at most, whatever it says."""

_FOR_ALL: Final = frozenset(("requests", "queue_time"))
"""The bounds that hold for calls of any size. That on ``bytes`` holds for calls as large as the refused one."""


class Room:
    """What one server says of its room. Any thread may ask; refusals may come from any thread, too."""

    __slots__ = ("_refusal", "pool_until", "until")

    def __init__(self) -> None:
        self.until = 0.0
        """Until when the server should have none, in seconds of `time.monotonic`."""
        self.pool_until = 0.0
        """Until when its pool of caches should have no room: other servers are preferred for new caches."""
        self._refusal: tuple[float, float, float, OverloadedError] | None = None
        """The last refusal that holds for other calls: from when until when, from how many bytes on, and the error."""

    def refused(self, now: float, error: AttnServeError | None, size: int | None) -> None:
        """Notes the error that a call ended with, whatever it is. `size` is its length in bytes; None if unknown."""
        if isinstance(error, OverloadedError) and error.bound == "cache_bytes":
            self.pool_until = max(self.pool_until, now + min(error.retry_delay or 0.0, LONGEST))
        delay = room_after(error)
        if delay is None:
            return
        until = now + min(delay, LONGEST)
        self.until = max(self.until, until)
        assert isinstance(error, OverloadedError)  # else there is no delay
        least: float = 0 if error.bound in _FOR_ALL else size if error.bound == "bytes" and size is not None else inf
        if (noted := self._refusal) is not None and until <= noted[1] and noted[2] <= least:
            return  # that holds for more calls, and for longer
        if least < inf:
            copy = OverloadedError(str(error), code=error.code, details=error.details)  # without the caller's frames
            self._refusal = now, until, least, copy

    def refusal(self, now: float, size: int) -> OverloadedError | None:
        """What the server would say to a call of so many bytes, by what it has said of another one; None if it may have
        room.
        """
        if (noted := self._refusal) is None:
            return None
        since, until, least, error = noted
        if now >= until or size < least:
            return None
        return unasked(error, now - since, until - now)


def unasked(error: OverloadedError, ago: float, delay: float) -> OverloadedError:
    """What a server said to another call, so many seconds ago, with what is left of the delay."""
    return repeated(error, f"{error}; it said so {ago:.3f} s ago, and was not asked again", delay)


def repeated(error: OverloadedError, message: str, delay: float) -> OverloadedError:
    """What a server said to another call, in other words, and with another delay in seconds."""
    details: list[Message] = [detail for detail in error.details if not isinstance(detail, RetryInfo)]
    details.append(again := RetryInfo())
    again.retry_delay.FromNanoseconds(round(delay * 1e9))
    return OverloadedError(message, code=error.code, details=tuple(details))
