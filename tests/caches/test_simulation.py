"""A day of a busy server, without memory: the pool stays usable, and layers stay in long runs of adjacent pages.

Conversations begin with a prompt, grow a token at a time next to each other, are forked, cut back, deleted or left to
their leases. The pool is nearly full most of the day: a new conversation then makes an old one end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from stores import Store, store_of

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.errors import CacheFull
from attnserve_server.caches.shape import CacheShape
from attnserve_server.errors import NotFound

DAY = 24 * 3600
PAGE_BYTES = 4096
PAGES = 2048
SHAPES = (
    CacheShape(num_kv_heads=2, head_dim=16, value_dim=16, layers=2, dtype="bfloat16"),  # 32 tokens a page
    CacheShape(num_kv_heads=2, head_dim=16, value_dim=16, layers=1, dtype="float32"),  # 16 tokens a page
    CacheShape(num_kv_heads=1, head_dim=16, value_dim=16, layers=3, dtype="bfloat16"),  # 64 tokens a page
)
CONCURRENT = 8
"""Caches that grow at the same time."""


@dataclass
class Day:
    """What random callers do in one day, and the results."""

    random: Random
    crowded: float
    """The share of the pool that is free when callers begin to delete."""
    store: Store = field(default_factory=lambda: store_of(PAGES, 10_000, page_bytes=PAGE_BYTES))
    caches: list[Cache] = field(default_factory=list)
    appends: int = 0
    refusals: int = 0
    pages: int = 0
    runs: int = 0

    def live(self) -> None:
        """The whole day, in steps of some seconds, with a look at the pool every hour."""
        now, looked = 0.0, 0.0
        while now < DAY:
            now += self.random.expovariate(1 / 30)
            self.step(now)
            if now > looked + 3600:
                looked = now
                self.caches = [cache for cache in self.caches if not cache.gone]
                self.measure_runs()
                self.fill_up(now)

    def step(self, now: float) -> None:
        random, store = self.random, self.store
        event = random.random()
        if event < 0.06 or not self.caches:
            self.caches.append(store.create(random.choice(SHAPES), random.choice([None, 600.0, 7200.0]), now))
            self.append(self.caches[-1], int(random.lognormvariate(5.5, 1.2)) + 1, now)
        elif event < 0.86:
            growing = random.sample(self.caches, min(CONCURRENT, len(self.caches)))
            for _ in range(random.choice([1, 4, 16])):
                for cache in growing:
                    self.append(cache, random.choice([1, 1, 1, 1, 1, 48]), now)
        elif (chosen := self.found(random.choice(self.caches), now)) is None:
            return
        elif event < 0.92:
            self.caches.append(store.fork_one(chosen, random.choice([None, 3600.0]), now))
        elif event < 0.96:
            store.truncate_one(chosen, random.randint(0, max(chosen.lengths)))
        else:
            store.delete(chosen)
        while store.free_pages < self.crowded * PAGES:
            store.delete(random.choice(self.caches))
            self.caches = [cache for cache in self.caches if not cache.gone]

    def found(self, cache: Cache, now: float) -> Cache | None:
        try:
            return self.store.get(cache.name, now)
        except NotFound:
            self.caches.remove(cache)
            return None

    def append(self, cache: Cache, tokens: int, now: float) -> None:
        """One operation: `tokens` tokens to each layer. It may be refused only if too few pages are left."""
        if cache not in self.caches or self.found(cache, now) is None:
            return
        layers = range(cache.shape.layers)
        self.appends += 1
        try:
            reservation = self.store.reserve([(cache, layer, tokens) for layer in layers], now)
        except CacheFull:
            self.refusals += 1
            per_page = cache.shape.tokens_per_page(PAGE_BYTES)
            # Including a copy of each last page, which others may hold too.
            assert self.store.free_pages < sum(-(-(n + tokens) // per_page) - n // per_page for n in cache.lengths)
            return
        self.store.hold(cache, now)
        self.store.place(reservation, now)
        self.store.cancel(reservation)
        self.store.release(cache, now)

    def measure_runs(self) -> None:
        for pages in self.layers():
            self.pages += len(pages)
            self.runs += len(pages) - sum(after == before + 1 for before, after in pairwise(pages))

    def layers(self) -> Iterator[list[int]]:
        for cache in self.caches:
            yield from (list(cache.pages(layer)) for layer in range(cache.shape.layers))

    def fill_up(self, now: float) -> None:
        """One append to one cache can take all free pages; then 95 % of the pool's bytes hold tokens."""
        store, shape = self.store, SHAPES[1]
        filler = store.create(shape, None, now)
        tokens = store.free_pages * shape.tokens_per_page(PAGE_BYTES)
        reservation = store.reserve([(filler, 0, tokens)], now)
        [placement] = store.place(reservation, now)
        store.cancel(reservation)
        assert sum(write.tokens for write in placement.writes) == tokens
        assert self.bytes_with_tokens([*self.caches, filler]) >= 0.95 * PAGES * PAGE_BYTES
        store.delete(filler)

    def bytes_with_tokens(self, caches: list[Cache]) -> int:
        """Shared pages count once."""
        filled: dict[int, int] = {}
        for cache in caches:
            per_page = cache.shape.tokens_per_page(PAGE_BYTES)
            for layer, length in enumerate(cache.lengths):
                for index, page in enumerate(cache.pages(layer)):
                    tokens = min(length - index * per_page, per_page)
                    filled[page] = max(filled.get(page, 0), tokens * cache.shape.token_bytes)
        return sum(filled.values())


@pytest.mark.parametrize(
    ("seed", "crowded", "least_run"),
    [(1, 0.0, 1.5), (2, 0.05, 5.0), (3, 0.15, 12.0)],
)
def test_a_day(seed: int, crowded: float, least_run: float) -> None:
    """Refusals only when pages run out, at least 95 % of the pool usable in every hour, and long runs.

    The mean run shrinks as the pool fills, and is shortest where it is always full and most appends are refused.
    """
    day = Day(Random(seed), crowded)
    day.live()
    store = day.store
    assert day.appends > 50_000
    assert min(store.counts.forks, store.counts.truncations, store.counts.deletions) > 50
    assert day.pages / day.runs > least_run
    for cache in day.caches:
        store.delete(cache)
    assert (store.free_pages, store.reserved_pages, store.tokens) == (PAGES, 0, 0)
