"""When requests are sent: each reply followed by the next (closed loop), or at random times, come what may (open loop).

In: a function that sends a request, by its number and the time from which its latency counts. Out: calls of it, on the
event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import selectors
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Protocol, TypeAlias

import numpy as np

Due: TypeAlias = tuple[int, float]
"""The number of a request to be sent, and the time, of `perf_counter`, from which its latency counts."""
Send: TypeAlias = Callable[[int, float], None]
"""Sends what is due."""


class Arrivals(Protocol):
    """What a load generator asks when to send; used once."""

    def begin(self, send: Send) -> None:
        """Requests are sent from now on, by the running loop."""

    def answered(self) -> Due | None:
        """A request was answered; what is to be sent at once, if anything is."""

    def end(self) -> None:
        """Nothing more is to be sent."""


class ClosedLoop:
    """So many in flight, in turn: each reply is followed by the next request."""

    def __init__(self, numbers: Sequence[int], in_flight: int) -> None:
        self._numbers: Iterator[int] = itertools.cycle(numbers)
        self._in_flight = in_flight

    def begin(self, send: Send) -> None:
        """Sends as many as are to be in flight."""
        for _ in range(self._in_flight):
            send(*self.answered())

    def answered(self) -> Due:
        """The next, now."""
        return next(self._numbers), perf_counter()

    def end(self) -> None:
        """Changes nothing: what is not answered is followed by nothing."""


class OpenLoop:
    """Poisson arrivals: numbers in turn, at `rate` a second on average for so many seconds, whatever is answered.

    The times are drawn with a seed, alike for every server. A request that is sent late is late from when it was due.
    """

    def __init__(self, numbers: Sequence[int], rate: float, seconds: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        times = np.cumsum(random.exponential(1 / rate, int(rate * seconds * 1.5) + 100))
        self.times: list[float] = times[times < seconds].tolist()
        self._numbers = list(itertools.islice(itertools.cycle(numbers), len(self.times)))
        self.begun = 0.0
        """When it began, of `perf_counter`; `times` count from there, in seconds."""
        self.late: list[float] = []
        """By how much each was handed to the load generator after it was due, in seconds."""
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, send: Send) -> None:
        """Starts a timer for the first; that of a `precise_loop` is not rounded up to whole milliseconds."""
        loop = asyncio.get_running_loop()
        self.begun = perf_counter()
        between_clocks = loop.time() - self.begun

        def send_due() -> None:
            while self._sent < len(self.times):
                due = self.begun + self.times[self._sent]
                if (late := perf_counter() - due) < 0:
                    self._timer = loop.call_at(due + between_clocks, send_due)
                    return
                number = self._numbers[self._sent]
                self._sent += 1
                self.late.append(late)
                send(number, due)

        send_due()

    def answered(self) -> None:
        """Changes nothing."""
        return

    def end(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are as precise as the system's: a thread that kept the time instead would take the
    interpreter from the loop, and time from the servers that are measured, at each request.
    """
    return asyncio.SelectorEventLoop(_PreciseSelector())


class _PreciseSelector(selectors.DefaultSelector):
    """Waits to the microsecond, where epoll knows whole milliseconds alone."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select((self,), (), (), timeout)
            timeout = 0
        return super().select(timeout)
