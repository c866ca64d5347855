"""Limits log lines of a kind: to so many at once, and so many a second in the long run. Pure."""

from __future__ import annotations


class RateLimit:
    """A token bucket: it fills at a constant rate, up to its burst. Times are seconds of one clock."""

    __slots__ = ("_burst", "_filled", "_lines", "_rate", "left_out")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        """Full, as of now."""
        self._rate = rate
        self._burst = burst
        self._lines = burst
        self._filled = now
        self.left_out = 0
        """The lines that were not written; the caller reports and resets it."""

    def take(self, now: float) -> bool:
        """Whether a line may be written now; if not, it is counted."""
        self._lines = min(self._burst, self._lines + (now - self._filled) * self._rate)
        self._filled = now
        if self._lines < 1.0:
            self.left_out += 1
            return False
        self._lines -= 1.0
        return True
