"""Callers that ask one question after the other until they are told to stop, and check every answer."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from attnserve import AsyncClient, AttnServeError, Client, Transport
from benchmarks.chaos.questions import Array, Question, Verdict

TRANSPORTS: Final[tuple[Transport, ...]] = ("stream", "unary")

PATIENCE_S: Final = 120.0
"""How long callers may take to end, once they are told to."""

PAUSE_S: Final = 0.01
"""How long a caller rests between two questions. On a shared machine, servers need time to recover beside callers."""


class Tally:
    """Counts the outcomes of questions. Any number of threads may use it."""

    def __init__(self) -> None:
        self.right = 0
        self.wrong = 0
        self.anothers = 0
        self.errors: Counter[str] = Counter()
        """How often a question failed with an error, by the error's class."""
        self.longest = 0.0
        """How long the slowest answer or error took, in seconds."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def failed(self) -> int:
        """How many questions got an error."""
        return self.errors.total()

    def question(self) -> Question:
        """A question that has not been asked before."""
        return Question.numbered(next(self._numbers))

    def ask(self, client: Client, question: Question) -> None:
        """Asks a question, and counts its outcome."""
        begin = perf_counter()
        try:
            result = client.attend(question.query, question.key, question.value, causal=question.causal)
        except AttnServeError as error:
            self.take(question, error, begin)
        else:
            self.take(question, result.output, begin)

    def take(self, question: Question, outcome: Array | Exception, begin: float) -> None:
        """Counts the outcome of a question that was asked at `begin`."""
        verdict = None if isinstance(outcome, Exception) else question.judge(outcome)
        with self._lock:
            self.longest = max(self.longest, perf_counter() - begin)
            self.right += verdict is Verdict.RIGHT
            self.wrong += verdict is Verdict.WRONG
            self.anothers += verdict is Verdict.ANOTHERS
            if isinstance(outcome, Exception):
                self.errors[type(outcome).__name__] += 1

    def until(self, count: int) -> None:
        """Waits until so many more answers have been right. TimeoutError if they do not come."""
        until_all([self], count)


def until_all(tallies: Iterable[Tally], count: int) -> None:
    """Waits until so many more answers of each have been right. TimeoutError if they do not come."""
    wanted, deadline = [(tally, tally.right + count) for tally in tallies], perf_counter() + PATIENCE_S
    for tally, goal in wanted:
        while (missing := goal - tally.right) > 0:
            if perf_counter() > deadline:
                raise TimeoutError(f"{missing} of {count} answers did not come; errors: {tally.errors}")
            threading.Event().wait(0.01)


@contextmanager
def running(threads: Sequence[threading.Thread], stop: threading.Event) -> Iterator[None]:
    """Runs threads while the block runs, and then stops them. Raises TimeoutError if one of them hangs."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    if hanging := [thread.name for thread in threads if thread.is_alive()]:
        raise TimeoutError(f"{hanging[0]} hangs")


@contextmanager
def in_threads(client: Client, callers: int, tally: Tally) -> Iterator[None]:
    """So many callers of a client, each a thread, while the block runs."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(PAUSE_S):
            tally.ask(client, tally.question())

    threads = [threading.Thread(target=ask, name=f"caller-{number}") for number in range(callers)]
    with running(threads, stop):
        yield


@contextmanager
def in_tasks(address: str, callers: int, tally: Tally, **setup: Any) -> Iterator[None]:
    """So many callers of an AsyncClient, each a task, while the block runs; `setup` is the client's. Their event loop
    has a thread of its own.
    """
    stop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def ask(client: AsyncClient, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            question, begin = tally.question(), perf_counter()
            try:
                result = await client.attend(question.query, question.key, question.value, causal=question.causal)
            except AttnServeError as error:
                tally.take(question, error, begin)
            else:
                tally.take(question, result.output, begin)
            await asyncio.sleep(PAUSE_S)

    async def ask_all() -> None:
        stopped = asyncio.Event()
        stop.set_result((asyncio.get_running_loop(), stopped))
        async with AsyncClient(address, **setup) as client:
            await asyncio.gather(*(ask(client, stopped) for _ in range(callers)))

    with ThreadPoolExecutor(1, "callers") as thread:
        asking = thread.submit(asyncio.run, ask_all())
        loop, stopped = stop.result(PATIENCE_S)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(stopped.set)
            asking.result(PATIENCE_S)
