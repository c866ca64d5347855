"""When requests are sent: each reply followed by the next (closed loop), or at random times, come what may (open loop).

In: a function that sends a request, by its number and the time from which its latency counts. Out: calls of it, on the
event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, sleep
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
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, send: Send) -> None:
        """Starts a thread that watches the clock: event loops round their timers up to whole milliseconds."""
        loop, begun = asyncio.get_running_loop(), perf_counter()
        self.begun = begun

        def deliver(number: int, due: float) -> None:
            self.late.append(perf_counter() - due)
            send(number, due)

        def run() -> None:
            for number, after in zip(self._numbers, self.times, strict=True):
                due = begun + after
                if (left := due - perf_counter()) > 0:
                    sleep(left)
                if self._over.is_set():
                    return
                loop.call_soon_threadsafe(deliver, number, due)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def answered(self) -> None:
        """Changes nothing."""
        return

    def end(self) -> None:
        """Ends the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
