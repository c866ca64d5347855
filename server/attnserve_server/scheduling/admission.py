"""Admission: bounds what is in flight by count, bytes, cost and time, before anything is queued.

No caller can take all the room: each gets at most `SHARE` times as much as is left free, so that there is always some
for another. A refusal says how long the work ahead will take at the measured rate. A request larger than a whole bound
can never be admitted; that is the caller's mistake, not load.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest, Overloaded
from attnserve_server.no_room import NoRoom, full, share_exceeded
from attnserve_server.scheduling.pace import Amount, Pace

MIN_RETRY_DELAY: Final = 0.005
MAX_RETRY_DELAY: Final = 10.0
UNREAD_RETRY_DELAY: Final = 1.0
"""The shortest delay that a refusal tells where most bytes are those of replies that their callers have not read yet:
how long that takes is not known.
"""

SHARE: Final = 8
"""A caller may have this many times what is left of a bound: eight ninths of the bound if it is alone, and eight
seventeenths if another caller also takes all it can get. (Dynamic thresholds: Choudhury and Hahne 1998.)"""

ALWAYS_WAIT: Final = 16
"""This many requests may always wait, however slow they are: the bound on time applies to longer queues."""

ALWAYS_BATCHES: Final = 2
"""This many full batches may always wait; a device needs no more to stay busy."""


@dataclass(slots=True)
class InFlight:
    """What is in flight. `requests` and `bytes` count requests until their replies have been sent; `waiting`,
    `waiting_bytes`, `flops` and `work` count them until they have been computed.
    """

    requests: int = 0
    bytes: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    flops: int = 0
    work: Amount = field(default_factory=Amount)
    """The requests not computed yet, by kind."""


NOTHING: Final = InFlight()

MOST_TOLD: Final = 1024
"""The number of callers whose refusals are remembered: more than have connections between two batches."""


class Told(NamedTuple):
    """A refusal that also holds for the caller's next requests of at least `size` bytes, until something is learnt
    about how long work takes (`changes` is `Pace.changes` at the time of the refusal).
    """

    why: NoRoom
    size: int
    changes: int


class Admission:
    """Counts what is in flight, in total and per caller. `max_queue_time` 0 means no bound."""

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        max_flops: int,
        max_reply_bytes: int,
        max_queue_time: float,
    ) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_flops = max_flops
        self._max_reply_bytes = max_reply_bytes
        self._max_queue_time = max_queue_time or inf
        self._everybody = InFlight()
        self._queue_stands = False
        """Whether anything has been refused since the queue was last short. Such a queue stands, and is kept to what
        the device needs (`_longest`).
        """
        self._callers: dict[Hashable, InFlight] = {}
        self._told: dict[Hashable, Told] = {}
        """What callers were refused with since the counts last changed in a way that could make room. Until the next
        such change, each refusal holds.
        """
        self.pace = Pace()
        """How fast requests are computed, and how much of a batch they fill, as learnt from whoever computes them and
        forms batches.
        """

    @property
    def requests(self) -> int:
        """The requests in flight."""
        return self._everybody.requests

    @property
    def bytes(self) -> int:
        """The bytes of the requests in flight."""
        return self._everybody.bytes

    @property
    def flops(self) -> int:
        """The FLOPs of the requests not computed yet."""
        return self._everybody.flops

    def bytes_of_callers(self) -> dict[Hashable, int]:
        """The bytes in flight of every caller that has any requests in flight."""
        return {caller: usage.bytes for caller, usage in self._callers.items()}

    def awaits(self, kind: str) -> bool:
        """Whether a request of that kind has not been computed yet."""
        return kind in self._everybody.work.kinds

    @property
    def seconds(self) -> float:
        """How long the requests not computed yet should take."""
        return self.pace.seconds(self._everybody.work)

    @property
    def longest_seconds(self) -> float:
        """The most that `seconds` may be at present before more requests are refused. If it is more than that already,
        this is `seconds` itself. Infinity is no bound.
        """
        waiting, seconds, needed = self._everybody.waiting, self.seconds, self._needed_seconds
        none_stands = waiting <= ALWAYS_WAIT // 4 or seconds < needed / 4  # the next request resets `_queue_stands`
        if waiting < ALWAYS_WAIT:
            # `ALWAYS_WAIT` requests may wait, however slow they are. Those to come are taken to be like those waiting.
            needed = max(needed, seconds * ALWAYS_WAIT / max(waiting, 1))
        if none_stands or self._max_queue_time == inf:
            return max(needed, self._max_queue_time)
        return max(seconds, self._longest(seconds, needed))

    def check(self, caller: Hashable, size: int) -> None:
        """Raises Overloaded if there is no room for `size` more bytes of a caller. Nothing else has to be known of the
        request, so that a refusal takes little work.
        """
        if (why := self.refusal(caller, size)) is not None:
            raise Overloaded(why)

    def refusal(self, caller: Hashable, size: int) -> NoRoom | None:
        """What `check` would raise, as a value: to raise and catch an error takes as long as to find out that there is
        no room.
        """
        told = self._told.get(caller)
        if told is not None and size >= told.size and told.changes == self.pace.changes:
            return self._refused(told.why)
        why = self._lacks(caller, size)
        if why is None:
            return None
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        least = size if why.bound == "bytes" else 0  # other refusals do not depend on the size
        self._told[caller] = Told(why, least, self.pace.changes)
        return self._refused(why)

    def _refused(self, why: NoRoom) -> NoRoom:
        """Takes note that a request is refused, whatever for."""
        self._queue_stands = True
        return why

    def _lacks(self, caller: Hashable, size: int) -> NoRoom | None:
        """What a caller is told if there is no room for `size` more bytes of it; None if there is."""
        everybody, own = self._everybody, self._callers.get(caller, NOTHING)
        if everybody.requests >= self._max_requests:
            return self._full("requests", self._max_requests)
        if everybody.bytes + size > self._max_bytes:
            return self._full("bytes", self._max_bytes)
        if own.requests > SHARE * (self._max_requests - everybody.requests):
            return self._has_its_share("requests", self._max_requests, own)
        if own.bytes > SHARE * (self._max_bytes - everybody.bytes):
            return self._has_its_share("bytes", self._max_bytes, own)
        if own.flops > SHARE * (self._max_flops - everybody.flops):
            return self._has_its_share("flops", self._max_flops, own)
        if everybody.waiting >= ALWAYS_WAIT:
            return self._lacks_time(own) if self._max_queue_time < inf else None
        if everybody.waiting <= ALWAYS_WAIT // 4:
            self._queue_stands = False
        return None

    def _lacks_time(self, own: InFlight) -> NoRoom | None:
        """What a caller is told whose next request would wait too long; None if it would not. It would if two things
        take longer than a queue may: all that waits, and the caller's own requests at an equal share of the device. But
        as many as would be its part of `ALWAYS_WAIT` may wait however slow they are, whatever others have waiting.
        """
        seconds, needed = self.seconds, self._needed_seconds
        if seconds < needed / 4:
            self._queue_stands = False
        longest = self._longest(seconds, needed)
        if seconds < longest:
            return None
        callers = len(self._callers) + (own is NOTHING)
        if own.waiting < ALWAYS_WAIT // callers:
            return None
        if (self.pace.seconds(own.work) + self.pace.request_seconds) * callers < longest:
            return None
        if callers > 1 and own.waiting:
            return self._has_its_share("queue_time", _rounded(longest), own)
        return self._full("queue_time", _rounded(longest))

    @property
    def _needed_seconds(self) -> float:
        """How many seconds of work must wait so that the device does not run out of it."""
        return self.pace.request_seconds * max(ALWAYS_WAIT, ALWAYS_BATCHES / self.pace.request_share)

    def _longest(self, seconds: float, needed: float) -> float:
        """How many seconds a queue may take that now takes `seconds`. One that comes and goes may take
        `max_queue_time`. A standing queue helps nobody: it may take what the device needs, or as long as `ALWAYS_WAIT`
        requests do.
        """
        needed = max(needed, seconds * ALWAYS_WAIT / max(self._everybody.waiting, ALWAYS_WAIT))
        return needed if self._queue_stands else max(needed, self._max_queue_time)

    def admit(self, caller: Hashable, size: int, flops: int, reply_bytes: int, kind: str) -> None:
        """Counts in a request of a kind of work: its bytes (its reply's included) and FLOPs. Raises Overloaded, with
        nothing counted, if there is no room now, and InvalidRequest if there never will be.
        """
        self._check_whole(size, flops, reply_bytes)
        self.check(caller, size)
        if self._everybody.flops + flops > self._max_flops:
            raise Overloaded(self._refused(self._full("flops", self._max_flops)))
        own = self._callers.get(caller)
        if own is None:
            own = self._callers[caller] = InFlight()
            self._told.clear()  # shares are smaller now
        elif self._told and self._is_above_average(flops, kind):
            self._told.clear()
        for usage in (self._everybody, own):
            usage.requests += 1
            usage.bytes += size
            usage.waiting += 1
            usage.waiting_bytes += size
            usage.flops += flops
            usage.work.add(kind, flops)

    def _is_above_average(self, flops: int, kind: str) -> bool:
        """Whether a request may take longer than the average of those waiting. Then it lengthens the time for which a
        queue may last (`ALWAYS_WAIT` requests may wait, however slow they are), and there may be room for a caller that
        was refused.
        """
        everybody = self._everybody
        kinds = everybody.work.kinds
        return len(kinds) != 1 or kind not in kinds or flops * everybody.waiting > everybody.flops

    def has_room_for(self, caller: Hashable, size: int, requests: int) -> bool:
        """Whether nothing waits, and that many requests of a caller, of `size` bytes together, fit into the bounds and
        into the caller's share. False is no refusal: `admit` may still take them.
        """
        everybody, own = self._everybody, self._callers.get(caller, NOTHING)
        left, bytes_left = self._max_requests - everybody.requests - requests, self._max_bytes - everybody.bytes - size
        return (
            own.requests + requests <= SHARE * left
            and own.bytes + size <= SHARE * bytes_left
            and not everybody.waiting
            and caller not in self._told
        )

    def admit_computed(self, caller: Hashable, size: int, requests: int) -> None:
        """Counts in requests of a caller for which there is room, already computed, of `size` bytes together."""
        self._queue_stands = False
        self.hold(caller, size, requests)

    def hold(self, caller: Hashable, size: int, requests: int) -> None:
        """Counts in requests of a caller for which there is room, of `size` bytes together, and not what computing them
        takes: that is over, or not known yet.
        """
        own = self._callers.get(caller)
        if own is None:
            own = self._callers[caller] = InFlight()
        self._told.clear()
        for usage in (self._everybody, own):
            usage.requests += requests
            usage.bytes += size

    def recount(
        self, caller: Hashable, before: tuple[int, int], now: tuple[int, int], reply_bytes: int, kind: str
    ) -> None:
        """Recounts a request that has not been computed, whose bytes and FLOPs differ from those at admission. Raises
        what `admit` does, with nothing recounted.
        """
        self._check_whole(*now, reply_bytes)
        size, flops = now[0] - before[0], now[1] - before[1]
        if size > 0 and self._everybody.bytes + size > self._max_bytes:
            raise Overloaded(self._refused(self._full("bytes", self._max_bytes)))
        if flops > 0 and self._everybody.flops + flops > self._max_flops:
            raise Overloaded(self._refused(self._full("flops", self._max_flops)))
        self._told.clear()
        for usage in (self._everybody, self._callers[caller]):
            usage.bytes += size
            usage.waiting_bytes += size
            usage.flops += flops
            usage.work.remove(kind, before[1])
            usage.work.add(kind, now[1])

    def computed(self, caller: Hashable, size: int, flops: int, kind: str) -> None:
        """Counts out the FLOPs of a request that has been computed, or will not be; its bytes no longer wait."""
        self._told.clear()
        for usage in (self._everybody, self._callers[caller]):
            usage.waiting -= 1
            usage.waiting_bytes -= size
            usage.flops -= flops
            usage.work.remove(kind, flops)

    def again(self, caller: Hashable, size: int, flops: int, kind: str) -> None:
        """Counts in the FLOPs of a request that is to be computed once more. It is still admitted."""
        self._told.clear()
        for usage in (self._everybody, self._callers[caller]):
            usage.waiting += 1
            usage.waiting_bytes += size
            usage.flops += flops
            usage.work.add(kind, flops)

    def shrink(self, caller: Hashable, size: int) -> None:
        """Counts out bytes of a request of a caller that has been computed: all but its reply's."""
        self._told.clear()
        for usage in (self._everybody, self._callers[caller]):
            usage.bytes -= size

    def release(self, caller: Hashable, size: int, requests: int = 1) -> None:
        """Counts out requests of a caller, of `size` bytes together, whose replies have been sent."""
        own = self._callers[caller]
        self._told.clear()
        for usage in (self._everybody, own):
            usage.requests -= requests
            usage.bytes -= size
        if not own.requests:
            del self._callers[caller]

    def _check_whole(self, size: int, flops: int, reply_bytes: int) -> None:
        """Raises InvalidRequest if a request is larger than a whole bound."""
        if reply_bytes > self._max_reply_bytes:
            expected = f"a request with a reply of at most {self._max_reply_bytes} bytes"
            raise InvalidRequest("", expected, f"{reply_bytes} bytes", LIMIT_EXCEEDED, limit="max_message_bytes")
        if size > self._max_bytes:
            expected = f"a request of at most {self._max_bytes} bytes with its reply (twice, if larger)"
            raise InvalidRequest("", expected, f"{size} bytes", LIMIT_EXCEEDED, limit="max_bytes")
        if flops > self._max_flops:
            expected = f"a request of at most {self._max_flops} FLOPs"
            raise InvalidRequest("", expected, f"{flops} FLOPs", LIMIT_EXCEEDED, limit="max_flops")

    def _full(self, bound: str, limit: float) -> NoRoom:
        return full(bound, limit, self._delay(bound, self._everybody))

    def _has_its_share(self, bound: str, limit: float, own: InFlight) -> NoRoom:
        return share_exceeded(bound, limit, self._delay(bound, own, len(self._callers)))

    def _delay(self, bound: str, usage: InFlight, callers: int = 1) -> float:
        """Seconds until half of what waits should be computed, if that many callers share the device. Where most bytes
        are those of replies, computing makes no room, and the delay is longer.
        """
        seconds = self.pace.seconds(usage.work) * callers
        unread = bound == "bytes" and 2 * usage.waiting_bytes < usage.bytes
        least = UNREAD_RETRY_DELAY if unread else MIN_RETRY_DELAY
        return _rounded(min(max(seconds / 2, least), MAX_RETRY_DELAY))


def _rounded(seconds: float) -> float:
    """A reported time, to two digits: it is an estimate, and errors that are alike are put into words once."""
    return float(f"{seconds:.2g}")
