"""How many calls a full server has room for: how many a stream may have unanswered, learnt from refusals and answers.

In: refusals, answers, how many calls are unanswered. Out: how many more may be sent, and whether a call can be answered
in its time at all. Until a server refuses a call there is no bound. A refusal sets it to the number of calls that the
server did take; each answer while others wait raises it a little, so that more room is found, at the price of a few
refusals. A server that took none is asked by a single call when it should have room, then by twice as many each time,
until it refuses one; after too many refusals in a row nothing waits for it any more. (TCP's congestion window, with
slow start and additive increase: Jacobson 1988, Chiu and Jain 1989.) No I/O, no clock.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

from attnserve._errors import OverloadedError
from attnserve._servers.room import repeated, unasked

FORGOTTEN_AFTER: Final = 10.0
"""A bound is forgotten when so many seconds have passed without a refusal, and nothing waits."""

GROWTH: Final = 1 / 32
"""The least by which an answer raises the bound: a wide one, of small calls, would hardly grow by one in a whole round.
"""

RATE_WINDOW_S: Final = 10.0
"""Answers of about so many seconds decide how fast a server is taken to be."""
TOLD_S: Final = 1.0
"""What a server says of its speed when it first refuses a call counts as much as answers of so many seconds."""


class Window:
    """The bound of one stream, and of its successors to the same server."""

    __slots__ = (
        "_answers",
        "_answers_at",
        "_began",
        "_in_a_row",
        "_limit",
        "_rate",
        "_refusal",
        "_refused_at",
        "_retries",
        "_starting",
        "opens",
    )

    def __init__(self, retries: int) -> None:
        """`retries`: how often a server that has none of the calls is asked again before it is given up."""
        self._retries = retries
        self.forget()

    def forget(self) -> None:
        """Starts anew, without a bound: the server may be another."""
        self._limit = inf
        self.opens = 0.0
        """When the server is to be asked again, if it has none of the calls."""
        self._in_a_row = 0
        self._starting = False
        self._refusal: OverloadedError | None = None
        self._refused_at = 0.0
        self._began = self._answers_at = 0.0
        self._answers = 0.0
        self._rate = 0.0

    @property
    def refusal(self) -> OverloadedError | None:
        """The server's last refusal; None while there is no bound."""
        return self._refusal

    @property
    def given_up(self) -> bool:
        """Whether the server has refused too many calls in a row while it had none, so that none is to wait for it."""
        return self._in_a_row > self._retries

    def refused(self, error: OverloadedError, unanswered: int, pause: float, now: float) -> None:
        """Notes that the server had no room for a call, while it had so many others. If it had none, it is asked again
        after `pause`, or after what it says, doubled each time in a row.
        """
        if self._refusal is None:
            # Half of what waits should be computed after the delay, so all of it, and this stream's share, after twice.
            self._rate = max(1, unanswered) / (2 * max(error.retry_delay or 0.0, pause))
            self._began = self._answers_at = now
            self._answers = 0.0
        self._refusal = OverloadedError(str(error), code=error.code, details=error.details)  # without frames
        self._refused_at = now
        self._limit = max(1.0, unanswered)
        self._starting = not unanswered
        if not unanswered and now >= self.opens:
            self.opens = now + max(pause, (error.retry_delay or 0.0) * 2.0 ** min(self._in_a_row, 5))
            self._in_a_row += 1

    def answered(self, calls: int, waiting: int, now: float) -> None:
        """Notes that calls have been answered while so many wait to be sent."""
        if self._refusal is None or not calls:
            return
        self._in_a_row = 0
        self.opens = 0.0
        self._answers = self._recent(now) + calls
        self._answers_at = now
        if waiting:
            self._limit += calls * (1.0 if self._starting else max(1.0 / self._limit, GROWTH))

    def room(self, unanswered: int, now: float) -> int:
        """How many more calls may be sent."""
        if self._refusal is None:
            return 1 << 30
        if not unanswered and now < self.opens:
            return 0
        return max(0, int(self._limit) - unanswered)

    def passed(self, now: float) -> bool:
        """Whether the last refusal was so long ago that it says nothing of new calls."""
        return now - self._refused_at > FORGOTTEN_AFTER

    def hopeless(self, ahead: int, now: float, deadline: float) -> OverloadedError | None:
        """The error for a call with so many ahead of it, if these take more than half of its time, as far as is known
        (the other half is for the server), or if the server has been given up.
        """
        if self._refusal is None:
            return None
        if self.given_up and now < self.opens:
            return unasked(self._refusal, now - self._refused_at, self.opens - now)
        # Answers have come since `_began`, so of less time at first; what was told is forgotten like them.
        fades = exp((self._began - now) / RATE_WINDOW_S)
        answers = self._recent(now) + self._rate * TOLD_S * fades
        seconds = RATE_WINDOW_S * (1.0 - fades) + TOLD_S * fades
        wait, longest = ahead * seconds / answers, (deadline - now) / 2
        if wait <= longest:
            return None
        why = f"{self._refusal}; {ahead} calls of this client, ahead of this one, should take {wait:.2g} s"
        return repeated(self._refusal, why, wait - longest)

    def _recent(self, now: float) -> float:
        return self._answers * exp((self._answers_at - now) / RATE_WINDOW_S)
