"""How many calls a full server has room for: how many a stream may have unanswered, learnt from refusals and answers.

In: refusals, answers, how many calls are unanswered. Out: how many more may be sent, and whether a call can be answered
in its time at all. No I/O, no clock.

- Until a server refuses a call, there is no bound.
- A refusal sets the bound to the number of calls that the server did take.
- Each answer, while other calls wait, raises the bound a little. That finds more room, at the price of a few refusals.
  Each time that calls sent beyond the bound are refused, it grows by half as much from then on; once such calls are
  taken, it grows as before.
- If no answer comes, one more call is sent as a probe when the server should have room. After each probe that is
  refused, the next one waits longer: what the server computes may take long.
- If the server has none of the stream's calls and refuses too many in a row, nothing waits for it any more.

This is TCP's congestion window, with slow start and additive increase (Jacobson 1988, Chiu and Jain 1989).
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

from attnserve._errors import OverloadedError
from attnserve._servers.room import LONGEST, repeated, unasked

FORGOTTEN_AFTER: Final = 10.0
"""A bound is forgotten when so many seconds have passed without a refusal, and nothing waits."""

GROWTH: Final = 1 / 32
"""The least by which an answer raises the bound. Without it, a wide bound would grow by one only after as many answers.
"""

MOST_CAUTION: Final = 3
"""How often the growth is halved at most, while calls beyond the bound are refused again and again."""

PROVEN: Final = 1.25
"""Once the bound has grown by so much, it was too low: a call sent beyond it would have been refused by now."""

LEAST_PAUSE: Final = 0.1
"""How many seconds without an answer to wait at least before a call is sent beyond the bound."""
MOST_DOUBLINGS: Final = 5
"""How often the pause before a probe is doubled at most, as one probe after the other is refused."""

SERVED_WITHIN: Final = 5.0
"""So many seconds of a call's time, or half of it if that is less, are for the server, not to wait in the client."""
MEMORY_S: Final = 10.0
"""Answers of about so many seconds decide how fast a server is taken to be."""
TOLD_S: Final = 1.0
"""What a server says of its speed counts as much as answers of so many seconds."""

_FEWEST: Final = 1e-9
"""Answers, where there have been none for very long."""


class Speed:
    """How fast a server answers. Only answers while calls wait count: at other times their number shows how many calls
    were made, not how many the server can answer.
    """

    __slots__ = ("_answers", "_at", "_known", "_learnt", "_seconds")

    def __init__(self) -> None:
        self._answers = self._seconds = self._at = 0.0
        self._known = self._learnt = False

    def told(self, calls: int, seconds: float, now: float) -> None:
        """The server says that it needs so long for some calls. Holds until its speed is known from its answers."""
        if not (self._learnt and self._known):
            self._answers, self._seconds, self._at = TOLD_S * calls / seconds, TOLD_S, now
            self._known = True

    def begin(self, now: float, anew: bool = False) -> None:
        """Calls wait from now on; `anew`, if what is known may be out of date."""
        self._at = now
        if anew:
            self._answers = self._seconds = 0.0
            self._known = self._learnt = False

    def answered(self, calls: int, now: float) -> None:
        """Calls have been answered while others waited."""
        if self._known or self._learnt:
            self._age(now)
            self._answers += calls
            self._known = True
        else:  # it is not known how long these took: counting begins now
            self.begin(now)
        self._learnt = True

    def seconds_for(self, calls: int, now: float) -> float:
        """How long so many calls should take; 0 if nothing is known."""
        if not self._known:
            return 0.0
        self._age(now)
        return calls * self._seconds / max(self._answers, _FEWEST)

    def _age(self, now: float) -> None:
        fades = exp((self._at - now) / MEMORY_S)
        self._answers *= fades
        self._seconds = self._seconds * fades + MEMORY_S * (1.0 - fades)
        self._at = now


class Window:
    """The bound of one stream, and of its successors to the same server."""

    __slots__ = (
        "_bound",
        "_caution",
        "_in_a_row",
        "_limit",
        "_probing",
        "_refusal",
        "_refused_at",
        "_retries",
        "_shut",
        "_starting",
        "probe_at",
        "speed",
    )

    def __init__(self, retries: int) -> None:
        """`retries`: how often a server that has none of the calls is asked again before it is given up."""
        self._retries = retries
        self.forget()

    def forget(self) -> None:
        """Starts anew, without a bound: the server may be another."""
        self._limit = self._bound = inf
        """`_limit`: how many calls may be unanswered. `_bound`: the same as it was set by the last refusal, from which
        it grows.
        """
        self._caution = 0
        """How often in a row the server has refused calls that were sent beyond `_bound`."""
        self.probe_at = 0.0
        """When a probe is sent, whatever the bound, if no call is answered before."""
        self._probing = True
        """Whether the probe has been sent, so that the server's next refusal is the answer to it."""
        self._in_a_row = 0
        """How many probes have been refused, one after the other."""
        self._shut = False
        """Whether the server had none of the calls when it refused the last, and has answered none since."""
        self._starting = False
        """Whether the server had none of the calls at the last refusal: then each answer raises the bound by one."""
        self._refusal: OverloadedError | None = None
        self._refused_at = 0.0
        self.speed = Speed()

    @property
    def refusal(self) -> OverloadedError | None:
        """The server's last refusal; None while there is no bound."""
        return self._refusal

    @property
    def given_up(self) -> bool:
        """Whether the server has refused too many calls in a row while it had none, so that none is to wait for it."""
        return self._shut and self._in_a_row > self._retries

    def refused(self, error: OverloadedError, unanswered: int, pause: float, now: float) -> None:
        """Notes that the server had no room for a call, while it had `unanswered` others; the call waits for `pause`
        seconds.
        """
        told = error.retry_delay or 0.0
        if self._probing:  # the first refusal; others, of calls in the same message, may follow
            self.probe_at = now + max(pause, told * 2.0 ** min(self._in_a_row, MOST_DOUBLINGS))
            self._probing = False
            self._in_a_row += 1
        if unanswered:
            # After the delay, half of what waits should be computed. So all of it, this stream's share included, should
            # be after twice the delay.
            self.speed.told(unanswered, 2 * max(told, 0.005), now)
        self._refusal = OverloadedError(str(error), code=error.code, details=error.details)  # without frames
        self._refused_at = now
        if self._limit > self._bound:  # likewise: from the second refusal on, they are equal
            self._caution = min(self._caution + 1, MOST_CAUTION) if unanswered <= self._bound else 0
        self._limit = self._bound = max(1.0, unanswered)
        self._shut = self._starting = not unanswered

    def answered(self, calls: int, waiting: int, now: float, *, taken: bool) -> None:
        """Notes that calls have been answered while so many wait to be sent. If the connection has not `taken` all that
        the bound allows, the server reads slowly instead of refusing, and the bound does not grow.
        """
        if self._refusal is None or not calls:
            return
        self._in_a_row = 0
        self._probing = self._shut = False
        self.probe_at = now + max(self._refusal.retry_delay or 0.0, LEAST_PAUSE)
        if waiting:
            self.speed.answered(calls, now)
            if self._limit >= self._bound + PROVEN:
                self._caution = 0
            if taken:
                growth = 1.0 if self._starting else max(1.0 / self._limit, GROWTH) / 2**self._caution
                self._limit += calls * growth

    def room(self, unanswered: int) -> float:
        """How many more calls may be sent, not counting the probe at `probe_at`."""
        return 0 if self._shut else self._limit - unanswered

    def probed(self, now: float) -> None:
        """Notes that a probe is sent now."""
        self._probing = True
        self.probe_at = now + LONGEST

    def passed(self, now: float) -> bool:
        """Whether the last refusal was so long ago that it says nothing of new calls."""
        return now - self._refused_at > FORGOTTEN_AFTER

    def hopeless(self, ahead: int, now: float, deadline: float) -> OverloadedError | None:
        """The error for a call with so many ahead of it, if these should take too much of its time, or if the server
        has been given up; None for neither, as far as is known.
        """
        if self._refusal is None:
            return None
        pause = self.probe_at - now if self._shut else 0.0
        if self.given_up and pause > 0:
            return unasked(self._refusal, now - self._refused_at, pause)
        wait, left = max(pause, self.speed.seconds_for(ahead, now)), deadline - now
        longest = max(left / 2, left - SERVED_WITHIN)
        if wait <= longest:
            return None
        why = f"{self._refusal}; {ahead} calls of this client, ahead of this one, should take {wait:.2g} s"
        return repeated(self._refusal, why, wait - longest)
