"""When requests are sent: one after each reply (closed loop), or at random times regardless of replies (open loop).

In: a function that sends a request, given its number and the time from which its latency counts. Out: calls of it, on
the event loop.
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
"""The number of a request to send, and the time, by `perf_counter`, from which its latency counts."""
Send: TypeAlias = Callable[[int, float], None]
"""Sends a request that is due."""


class Arrivals(Protocol):
    """Tells a load generator when to send; used once."""

    def begin(self, send: Send) -> None:
        """Starts sending requests, on the running loop."""

    def answered(self) -> Due | None:
        """Notes that a request was answered; returns the request to send at once, if any."""

    def end(self) -> None:
        """Stops sending."""


class ClosedLoop:
    """A constant number of requests in flight, in turn: each reply is followed by the next request."""

    def __init__(self, numbers: Sequence[int], in_flight: int) -> None:
        self._numbers: Iterator[int] = itertools.cycle(numbers)
        self._in_flight = in_flight

    def begin(self, send: Send) -> None:
        """Sends the first requests, up to the number in flight."""
        for _ in range(self._in_flight):
            send(*self.answered())

    def answered(self) -> Due:
        """The next request, due now."""
        return next(self._numbers), perf_counter()

    def end(self) -> None:
        """Does nothing: without further calls of `answered`, nothing more is sent."""


class OpenLoop:
    """Poisson arrivals: numbers in turn, at `rate` per second on average for some seconds, regardless of answers.

    The times are drawn with a seed, the same for every server. The latency of a request that is sent late counts from
    when it was due.
    """

    def __init__(self, numbers: Sequence[int], rate: float, seconds: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        times = np.cumsum(random.exponential(1 / rate, int(rate * seconds * 1.5) + 100))
        self.times: list[float] = times[times < seconds].tolist()
        self._numbers = list(itertools.islice(itertools.cycle(numbers), len(self.times)))
        self.begun = 0.0
        """When it began, by `perf_counter`; `times` are in seconds from then."""
        self.late: list[float] = []
        """How long after it was due each request was handed to the load generator, in seconds."""
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, send: Send) -> None:
        """Starts a timer for the first request; on a `precise_loop` it is not rounded up to whole milliseconds."""
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
        """Does nothing."""
        return

    def end(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are as precise as the system's. A thread with timers would be worse: at each request,
    it would take the interpreter from the loop, and CPU time from the servers that are measured.
    """
    return asyncio.SelectorEventLoop(_PreciseSelector())


class _PreciseSelector(selectors.DefaultSelector):
    """Waits with microsecond precision; epoll waits for whole milliseconds only."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select((self,), (), (), timeout)
            timeout = 0
        return super().select(timeout)
