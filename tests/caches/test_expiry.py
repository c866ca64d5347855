"""Caches whose lease has ended: they are evicted some at a time, while others have the event loop; and nobody finds
them, or lacks their room, meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from stores import PAGE_BYTES, SHAPE, append, store_of

from attnserve_server.caches import expiry
from attnserve_server.caches.expiry import Expiry
from attnserve_server.errors import NotFound

CACHES = 5


class Leased:
    """A store of caches with a page each, whose leases have all ended, but for that of the last one."""

    def __init__(self) -> None:
        self.store = store_of(CACHES, max_caches=CACHES)
        self.caches = [self.store.create(SHAPE, 10.0 + (n == CACHES - 1), 0.0) for n in range(CACHES)]
        for cache in self.caches:
            append(self.store, cache, 1)
        self.expiry = Expiry(self.store, lambda: 10.0)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Callable[[], None]]]:
    """How long the loop is left to others, and what is to follow; and each cache takes a slice."""
    pauses: list[tuple[float, Callable[[], None]]] = []

    class Loop:
        def call_later(self, seconds: float, do: Callable[[], None]) -> object:
            pauses.append((seconds, do))
            return do

    monkeypatch.setattr(expiry, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    return pauses


def test_few_are_evicted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SLICE_SECONDS", 60.0)
    leased = Leased()
    leased.expiry.look()
    assert len(leased.store) == 1
    assert leased.store.free_bytes == (CACHES - 1) * PAGE_BYTES
    assert leased.store.counts.evictions["lease"] == CACHES - 1
    leased.expiry.look()
    assert len(leased.store) == 1


def test_many_are_evicted_while_the_loop_turns(pauses: list[tuple[float, Callable[[], None]]]) -> None:
    leased = Leased()
    leased.expiry.look()
    for left in range(CACHES - 1, 0, -1):
        assert len(leased.store) == left
        leased.expiry.look()
        assert len(leased.store) == left, "to look again does not evict more"
        ((_, go_on),) = pauses
        pauses.clear()
        go_on()
    assert not pauses
    assert len(leased.store) == 1, "that one's lease has not ended"
    leased.caches[-1].expires = 0.0
    leased.expiry.look()
    assert len(leased.store) == 0, "it can begin again"


@pytest.mark.parametrize(("took", "pause"), [(0.002, 0.018), (20.0, 2.7)])
def test_the_longer_it_took_the_longer_others_have(
    monkeypatch: pytest.MonkeyPatch, pauses: list[tuple[float, Callable[[], None]]], took: float, pause: float
) -> None:
    """But a process that was suspended meanwhile does not stop for long."""
    now = iter([0.0, took])
    monkeypatch.setattr(expiry, "perf_counter", lambda: next(now))
    Leased().expiry.look()
    assert [seconds for seconds, _ in pauses] == [pytest.approx(pause)]


async def test_it_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody asks."""
    monkeypatch.setattr(expiry, "EVERY_S", 0.001)
    leased = Leased()
    leased.expiry.begin()
    assert len(leased.store) == 1
    leased.caches[-1].expires = 0.0
    async with asyncio.timeout(60):
        while len(leased.store):  # noqa: ASYNC110 - a store tells no event
            await asyncio.sleep(0.001)
    leased.expiry.end()


def test_when_it_has_ended_it_evicts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Mock] = []

    class Loop:
        def call_later(self, seconds: float, do: Callable[[], None]) -> Mock:
            timers.append(Mock())
            return timers[-1]

    monkeypatch.setattr(expiry, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    leased = Leased()
    leased.expiry.begin()
    leased.expiry.end()
    assert len(timers) == 2, "it was to look again, and to evict the rest"
    for timer in timers:
        timer.cancel.assert_called_once()


@pytest.mark.usefixtures("pauses")
def test_what_has_not_been_evicted_yet_is_gone_all_the_same() -> None:
    leased = Leased()
    leased.expiry.look()
    second, last = leased.caches[1], leased.caches[-1]
    assert len(leased.store) == CACHES - 1
    assert leased.store.list(None, 10.0) == [last]
    with pytest.raises(NotFound):
        leased.store.get(second.name, 10.0, None)
    for _ in range(CACHES - 1):
        append(leased.store, leased.store.create(SHAPE, None, 10.0), 1, now=10.0)
    assert len(leased.store) == CACHES
    assert not last.gone
