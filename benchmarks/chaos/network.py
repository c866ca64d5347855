"""A network that cuts, stalls and garbles the connections between callers and a server."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, Final, Literal

import numpy as np

from attnserve import AttnServeError, Cache, Client, FailedPreconditionError
from benchmarks.chaos.callers import Tally, in_tasks, in_threads, running
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.proxy import FAULTS, Proxy
from benchmarks.chaos.questions import TOLERANCE, Array, exact
from benchmarks.chaos.victim import Victim

PROMISE: Final = (
    "Connections that are cut, stalled, half closed or carry garbage, again and again: calls that only compute are "
    "retried and answered; nothing is appended to a cache twice, and nothing that was acknowledged is missing, whether "
    "there is one writer or several; no cache is made twice; no caller waits beyond its timeout."
)
CALLERS: Final = 3
DECODERS: Final = 3
WRITERS: Final[tuple[Literal["stream", "unary"], ...]] = ("stream", "unary", "stream")
"""The transports of the writers that append to one cache; each has a client of its own."""
TIMEOUT_S: Final = 40.0
PAUSE_S: Final = 0.2
"""The time between two faults: enough to connect again, and for some calls."""
RETRIES: Final = 30
KEEPALIVE: Final = (("grpc.keepalive_time_ms", 10_500), ("grpc.http2.ping_timeout_ms", 3_000))
"""Garbage may look like the beginning of a long frame, which swallows all that follows. Only pings reveal that."""
LEAST_S: Final = 4.0
LEAST_TOKENS: Final = 20
"""Decoders must append at least so many tokens in all, and so must writers: with fewer, the promises would say little.
"""
MORE_S: Final = 60.0
"""How much longer the experiment may take until they have, on a busy machine."""
FORK_EVERY: Final = 20
"""A decoder forks its cache once for every so many tokens: the first time after its first token."""
SHARE: Final = 0.1
"""The share of `minutes` that this experiment takes."""


@dataclass(eq=False)
class _Decoder:
    """Appends tokens to a cache of its own, one by one, and knows which are there."""

    cache: Cache
    tokens: list[tuple[Array, Array]] = field(default_factory=list)
    unclear: int = 0
    lost: int = 0
    wrong: int = 0
    forks: int = 0
    failed_forks: int = 0

    def step(self, random: np.random.Generator) -> None:
        """Appends a token, and attends to all of them."""
        query, key, value = random.standard_normal((3, 2, 1, 8), dtype=np.float32)
        try:
            result = self.cache.attend(query, key=key, value=value, causal=True, timeout=TIMEOUT_S)
        except AttnServeError:
            self.unclear += 1
            self._look(key, value)
            return
        self.tokens.append((key, value))
        self.wrong += not self._right(query, result.output)
        if len(self.tokens) % FORK_EVERY == 1:
            self._fork()

    def _fork(self) -> None:
        """Makes a fork, which is never deleted."""
        try:
            self.cache.fork(timeout=TIMEOUT_S)
            self.forks += 1
        except AttnServeError:
            self.failed_forks += 1

    def _look(self, key: Array, value: Array) -> None:
        """Finds out whether a token was appended although its call failed."""
        _refresh(self.cache)
        more = self.cache.length - len(self.tokens)
        if more == 1:
            self.tokens.append((key, value))
        self.lost += more not in (0, 1)

    def _right(self, query: Array, output: Array) -> bool:
        key, value = (np.concatenate([token[place] for token in self.tokens], axis=1) for place in (0, 1))
        return bool(np.abs(output - exact(query, key, value, False)).max() <= TOLERANCE)

    def check(self) -> bool:
        """Whether the cache has its tokens, each once."""
        query = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
        right = self._right(query, self.cache.attend(query).output)
        return right and self.cache.info().lengths == (len(self.tokens),)


@dataclass(eq=False)
class _Writer:
    """Appends tokens to a cache that others append to as well. Each token has a number that no other has."""

    cache: Cache
    numbers: Iterator[int]
    acknowledged: list[int] = field(default_factory=list)
    came_late: int = 0
    found: int = 0
    """How many tokens turned out to be there although their reply was lost and others had appended behind them."""
    refused: int | None = None
    """The number of a token that came too late and is certainly not there. It is appended next."""

    def step(self, random: np.random.Generator) -> None:
        """Appends a token, unless another writer was faster."""
        number = next(self.numbers) if self.refused is None else self.refused
        self.refused = None
        token = np.full((2, 1, 8), number, np.float32)
        try:
            if random.random() < 0.5:
                self.cache.append(token, token, timeout=TIMEOUT_S)
            else:
                self.cache.attend(token, key=token, value=token, causal=True, timeout=TIMEOUT_S)
        except FailedPreconditionError as error:
            self.came_late += 1
            if error.appended:
                self.found += 1
                self.acknowledged.append(number)
            elif not error.resent:
                self.refused = number
            _refresh(self.cache)
        except AttnServeError:
            _refresh(self.cache)
        else:
            self.acknowledged.append(number)


def _refresh(cache: Cache) -> None:
    """Asks for the length of a cache again and again, until there is an answer."""
    while True:
        try:
            cache.refresh(timeout=TIMEOUT_S)
        except AttnServeError:
            continue
        return


def _tokens(decoders: Sequence[_Decoder], writers: Sequence[_Writer]) -> tuple[int, int]:
    """How many tokens the decoders have appended, and how many the writers."""
    return sum(len(decoder.tokens) for decoder in decoders), sum(len(writer.acknowledged) for writer in writers)


def _numbers(cache: Cache) -> list[int]:
    """The numbers of the tokens that writers have appended, in their order."""
    query = np.zeros((2, 1, 8), np.float32)
    query[:, :, 0] = 1.0
    scores = cache.attend(query, scale=1.0, return_scores="raw").scores
    assert scores is not None
    return [int(number) for number in scores[0, 0]]


def run(minutes: float) -> list[Figure]:
    """Runs the experiment for a tenth of `minutes`."""
    with Victim("--log-level", "error") as victim, Proxy(victim.address) as proxy:
        tally, decoders, writers = _under_load(proxy, max(LEAST_S, SHARE * 60 * minutes))
        with Client(victim.address) as client:
            for decoder in decoders:
                decoder.cache = client.open_cache(decoder.cache.name)
            damaged = sum(not decoder.check() for decoder in decoders)
            written = Counter(_numbers(client.open_cache(writers[0].cache.name)))
            caches = len(client.caches.list())
        forks, failed_forks = (sum(getattr(each, name) for each in decoders) for name in ("forks", "failed_forks"))
        log = victim.stderr()
    by_decoders, by_writers = _tokens(decoders, writers)
    acknowledged = [number for writer in writers for number in writer.acknowledged]
    return [
        *(Figure(f"faults: {fault}", proxy.done[fault], at_least=1) for fault in FAULTS),
        Figure("calls answered", tally.right, at_least=50),
        exactly("calls that failed", tally.failed, 0),
        exactly("wrong answers", tally.wrong + tally.anothers + sum(decoder.wrong for decoder in decoders), 0),
        Figure("the longest call", round(tally.longest, 2), "s", at_most=TIMEOUT_S + 5),
        Figure("tokens appended", by_decoders, at_least=LEAST_TOKENS),
        Figure("appends whose outcome the caller was not told", sum(decoder.unclear for decoder in decoders)),
        exactly("tokens doubled or lost", sum(decoder.lost for decoder in decoders), 0),
        exactly("caches without exactly what was appended", damaged, 0),
        Figure("tokens that several writers appended to one cache", by_writers, at_least=LEAST_TOKENS),
        Figure(
            "their appends that came after another writer's", sum(writer.came_late for writer in writers), at_least=1
        ),
        Figure("of these, appended all the same, with another's behind", sum(writer.found for writer in writers)),
        exactly("their tokens lost", sum(not written[number] for number in acknowledged), 0),
        exactly("their tokens doubled", sum(times > 1 for times in written.values()), 0),
        Figure("caches forked", forks, at_least=1),
        exactly("forks that failed", failed_forks, 0),
        exactly("caches beyond those that were made", caches - forks - len(decoders) - 1, 0),
        exactly("tracebacks in the server's log", log.count("Traceback"), 0),
    ]


@contextmanager
def _stepping(appending: Sequence[_Decoder | _Writer]) -> Iterator[None]:
    """Has each of them make steps, in a thread of its own, while the block runs."""
    stop = threading.Event()

    def append(number: int, one: _Decoder | _Writer) -> None:
        random = np.random.default_rng(number)
        while not stop.is_set():
            one.step(random)

    threads = [threading.Thread(target=append, args=each, name=f"appending-{each[0]}") for each in enumerate(appending)]
    with running(threads, stop):
        yield


def _under_load(proxy: Proxy, seconds: float) -> tuple[Tally, list[_Decoder], list[_Writer]]:
    tally = Tally()
    with ExitStack() as stack:
        for transport in ("stream", "unary"):
            setup: Any = {"transport": transport, "retries": RETRIES, "timeout": TIMEOUT_S, "options": KEEPALIVE}
            client = stack.enter_context(Client(proxy.address, **setup))
            stack.enter_context(in_threads(client, CALLERS, tally))
            stack.enter_context(in_tasks(proxy.address, CALLERS, tally, **setup))
        client = stack.enter_context(Client(proxy.address, retries=RETRIES, options=KEEPALIVE))
        decoders = [_Decoder(client.create_cache(2, 8)) for _ in range(DECODERS)]
        name, numbers = client.create_cache(2, 8).name, itertools.count(1)
        writers = []
        for transport in WRITERS:
            client = stack.enter_context(Client(proxy.address, transport=transport, retries=RETRIES, options=KEEPALIVE))
            writers.append(_Writer(client.open_cache(name), numbers))
        stack.enter_context(_stepping([*decoders, *writers]))
        faults, end = itertools.cycle(FAULTS), monotonic() + seconds
        while (now := monotonic()) < end or (now < end + MORE_S and min(_tokens(decoders, writers)) < LEAST_TOKENS):
            sleep(PAUSE_S)
            proxy.do(next(faults))
    return tally, decoders, writers
