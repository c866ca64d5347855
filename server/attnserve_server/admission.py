"""Who comes in: bounds what is in flight by count, bytes and cost, before anything is queued.

What is refused is told how long the work before it will take at the rate that has been measured. A request larger than
a whole bound can never come in; that is the caller's mistake, not load.
"""

from __future__ import annotations

from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest, Overloaded

MIN_RETRY_DELAY = 0.005
MAX_RETRY_DELAY = 10.0
RATE_MEMORY = 0.9
"""The weight that earlier batches keep in the measured rate at each new one."""


class Admission:
    """Counts what is in flight: requests and bytes from admission to reply, FLOPs until they are computed."""

    def __init__(self, max_requests: int, max_bytes: int, max_flops: int, max_reply_bytes: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_flops = max_flops
        self._max_reply_bytes = max_bytes if max_reply_bytes is None else max_reply_bytes
        self._recent_flops = 0.0
        self._recent_seconds = 0.0
        self.requests = 0
        self.bytes = 0
        self.flops = 0

    def admit(self, size: int, flops: int, reply_bytes: int = 0) -> None:
        """Counts a request of so many bytes (its reply's included) and FLOPs in. Raises Overloaded, with nothing
        counted, if there is no room now, and InvalidRequest if there never will be.
        """
        if size > self._max_bytes:
            raise InvalidRequest(
                "", f"a request of at most {self._max_bytes} bytes with its reply", f"{size} bytes", LIMIT_EXCEEDED
            )
        if reply_bytes > self._max_reply_bytes:
            expected = f"what has a reply of at most {self._max_reply_bytes} bytes"
            raise InvalidRequest("", expected, f"{reply_bytes} bytes", LIMIT_EXCEEDED)
        if flops > self._max_flops:
            raise InvalidRequest("", f"a request of at most {self._max_flops} FLOPs", f"{flops} FLOPs", LIMIT_EXCEEDED)
        if self.requests >= self._max_requests:
            raise Overloaded("requests", self._max_requests, self._delay())
        if self.bytes + size > self._max_bytes:
            raise Overloaded("bytes", self._max_bytes, self._delay())
        if self.flops + flops > self._max_flops:
            raise Overloaded("flops", self._max_flops, self._delay())
        self.requests += 1
        self.bytes += size
        self.flops += flops

    def computed(self, flops: int, seconds: float) -> None:
        """Counts FLOPs out that have been computed in some time (0: that will not be computed)."""
        self.flops -= flops
        if seconds > 0 and flops > 0:
            self._recent_flops = self._recent_flops * RATE_MEMORY + flops
            self._recent_seconds = self._recent_seconds * RATE_MEMORY + seconds

    def release(self, size: int) -> None:
        """Counts a request out whose reply has left."""
        self.requests -= 1
        self.bytes -= size

    def _delay(self) -> float:
        """Seconds until half of what is in flight should be done."""
        if not self._recent_flops:
            return MIN_RETRY_DELAY
        seconds = self.flops * self._recent_seconds / self._recent_flops
        return min(max(seconds / 2, MIN_RETRY_DELAY), MAX_RETRY_DELAY)
