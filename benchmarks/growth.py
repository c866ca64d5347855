"""Costs that must not depend on a cache's length: an append of one token, and a fork; and what sharing by forks saves.

In: a server, and a number of tokens. Out: times of an operation with little and with much in the cache, in process (the
store that decides and the pool that holds the bytes, without a network) and over the wire (the SDK).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Final, TypeVar

import numpy as np
import torch

from attnserve import Cache as RemoteCache
from attnserve import Client
from attnserve_server.caches.attend import attend_cache
from attnserve_server.caches.cache import Cache, Origin
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.query import CacheQuery
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.store import CacheStore
from attnserve_server.devices.device import open_device
from attnserve_server.host.cpus import usable_cpus
from benchmarks.workload import HEAD_DIM, HEADS

PAGE_BYTES: Final = 1 << 18
FORKS: Final = 50
STEPPED: Final = 64
"""The number of caches in a joint step."""
STEP_TOKENS: Final = 8192
"""The tokens of each of them."""
STEPS: Final = 20
SHAPE: Final = CacheShape(HEADS, HEAD_DIM, HEAD_DIM, 1, "float32")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Growth:
    """The median time of an operation with little in the cache and with much, in microseconds."""

    name: str
    little: str
    much: str
    little_us: float
    much_us: float


def growth(address: str, tokens: int, progress: Callable[[str], None] = lambda _: None) -> list[Growth]:
    """Measures appends of single tokens, up to `tokens`, and forks; over the wire only a tenth of the appends.

    The server at `address` must have room for the tokens.
    """
    progress("appends in process")
    found = _in_process(tokens)
    progress("steps of forks in process")
    found.append(_steps(min(tokens, STEP_TOKENS)))
    with Client(address) as client:
        key, value = (np.ones((HEADS, 1, HEAD_DIM), np.float32) for _ in range(2))
        with client.create_cache(HEADS, HEAD_DIM) as cache, client.create_cache(HEADS, HEAD_DIM) as empty:
            progress("appends over the wire")
            found.append(_appends("append, over the wire", tokens // 10, lambda: cache.append(key, value)))
            for begin in range(tokens // 10, tokens, 4096):
                many = np.ones((HEADS, min(4096, tokens - begin), HEAD_DIM), np.float32)
                cache.append(many, many)
            progress("forks over the wire")
            found.append(
                _forks("fork, over the wire", tokens, lambda: _remote_fork(empty), lambda: _remote_fork(cache))
            )
    return found


def _remote_fork(cache: RemoteCache) -> Callable[[], None]:
    return cache.fork().delete


def _in_process(tokens: int) -> list[Growth]:
    pool_bytes = (-(-tokens // SHAPE.tokens_per_page(PAGE_BYTES)) + FORKS + 2) * PAGE_BYTES
    store = CacheStore(pool_bytes, PAGE_BYTES, FORKS + 2, SHAPE.layers)
    pool = PagePool(pool_bytes, PAGE_BYTES, torch.device("cpu"), None)
    empty, full = (store.create(SHAPE, None, monotonic(), Origin(None)) for _ in range(2))
    key, value = (torch.ones(HEADS, 1, HEAD_DIM) for _ in range(2))

    def append() -> None:
        reservation = store.reserve([(full, 0, 1)], monotonic(), foreseen=True, source="key")
        pool.write(SHAPE, store.place(reservation, monotonic(), [0])[0], key, value)
        store.cancel(reservation)

    def fork(cache: Cache) -> Callable[[], None]:
        [forked] = store.fork([cache], [None], monotonic(), b"", None)
        return lambda: store.delete(forked)

    appended = _appends("append, in process", tokens, append)
    return [appended, _forks("fork, in process", tokens, lambda: fork(empty), lambda: fork(full))]


def _steps(tokens: int) -> Growth:
    """A step of many forks of one cache, each with one token of its own, and of as many caches that share nothing."""
    pool_bytes = (STEPPED + 1) * (-(-tokens // SHAPE.tokens_per_page(PAGE_BYTES)) + 1) * PAGE_BYTES
    store = CacheStore(pool_bytes, PAGE_BYTES, 2 * STEPPED + 1, SHAPE.layers)
    pool = PagePool(pool_bytes, PAGE_BYTES, torch.device("cpu"), None)
    device = open_device("cpu", usable_cpus(), 0, "auto")
    query = torch.randn(1, HEADS, 1, HEAD_DIM)

    def append(cache: Cache, count: int) -> Cache:
        reservation = store.reserve([(cache, 0, count)], monotonic(), foreseen=True, source="key")
        key, value = (torch.randn(HEADS, count, HEAD_DIM) for _ in range(2))
        pool.write(SHAPE, store.place(reservation, monotonic(), [0])[0], key, value)
        store.cancel(reservation)
        return cache

    def step(caches: list[Cache]) -> Callable[[], object]:
        pages = [cache.pages(0) for cache in caches]
        length = caches[0].length(0)
        queries = [CacheQuery(query, SHAPE, own, length, HEAD_DIM**-0.5) for own in pages]
        return lambda: attend_cache(queries, pool, device)

    def times(caches: list[Cache]) -> float:
        run = step(caches)
        run()
        return statistics.median(_timed(run)[0] for _ in range(STEPS)) * 1e6

    trunk = append(store.create(SHAPE, None, monotonic(), Origin(None)), tokens)
    forks = [append(fork, 1) for fork in store.fork([trunk] * STEPPED, [None] * STEPPED, monotonic(), b"", None)]
    shared = times(forks)
    for cache in (trunk, *forks):
        store.delete(cache)
    own = times([append(store.create(SHAPE, None, monotonic(), Origin(None)), tokens + 1) for _ in range(STEPPED)])
    device.close()
    return Growth(
        f"step of {STEPPED}, in process", f"forks of one of {tokens:,} tokens", f"{tokens:,} each", shared, own
    )


def _appends(name: str, tokens: int, append: Callable[[], object]) -> Growth:
    """Appends tokens one by one, and compares the first tenth with the last."""
    gc.collect()
    times = [_timed(append)[0] for _ in range(tokens)]
    tenth = max(1, tokens // 10)
    first, last = (statistics.median(part) * 1e6 for part in (times[:tenth], times[-tenth:]))
    return Growth(name, f"the first {tenth:,} tokens", f"the last of {tokens:,}", first, last)


def _forks(
    name: str, tokens: int, little: Callable[[], Callable[[], None]], much: Callable[[], Callable[[], None]]
) -> Growth:
    """Forks an empty cache and a full one in turn; what each call returns undoes the fork, which is not timed."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(FORKS):
        for taken, fork in zip(times, (little, much), strict=True):
            seconds, undo = _timed(fork)
            taken.append(seconds)
            undo()
    empty, full = (statistics.median(taken) * 1e6 for taken in times)
    return Growth(name, "an empty cache", f"{tokens:,} tokens", empty, full)


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    begin = perf_counter()
    result = call()
    return perf_counter() - begin, result
