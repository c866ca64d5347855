"""Attention to caches that meets NaN or infinities runs once more, by itself, at its real cost, in the same turn.

The engine is the real one, and so is the native kernel. Requests without caches: `scheduling/test_engine_again.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import torch
from cache_bench import QUERY, SHAPE, Bench, bench
from caller import Reference, attend_request, tokens
from cases import Case
from limits import LIMITS

from attnserve_server.access.callers import anybody
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.request import CachedRequest, read_attend
from attnserve_server.caches.run import run_batch
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import Cancelled
from attnserve_server.native import library
from attnserve_server.requests.work import BatchResult
from attnserve_server.scheduling.entry import Entry, Outcome

__all__ = ["bench"]

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


@pytest.fixture(autouse=True)
async def native(bench: Bench) -> AsyncIterator[None]:
    """The device has the native kernel."""
    native = CpuDevice(1, -1, library.best("auto"))
    bench.device.native = native.native
    yield
    native.close()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[CachedRequest]]:
    """The batches that have run."""
    seen: list[list[CachedRequest]] = []

    def run(pool: PagePool, device: CpuDevice, batch: Sequence[CachedRequest]) -> BatchResult:
        seen.append(list(batch))
        return run_batch(pool, device, batch)

    monkeypatch.setattr("attnserve_server.caches.run.run_batch", run)
    return seen


def attend(bench: Bench, *caches: Cache, seed: int = 0, appended: int = 0, query: float = 0.0) -> Entry:
    """As `Bench.attend`, with something added to the last query."""
    given = np.stack([QUERY] * len(caches))
    given[-1] += np.float32(query)
    key, value = tokens(seed, appended)
    pair = (np.stack([key] * len(caches)), np.stack([value] * len(caches))) if appended else None
    message = attend_request(Case(given, given, given), [Reference(cache.name) for cache in caches], pair)
    data = message.SerializeToString()
    return bench.submit(read_attend(bench.host, anybody("here"), data, 0, len(data), LIMITS))


def spoil(bench: Bench, cache: Cache) -> None:
    """Puts a NaN into the first value of a cache."""
    key, value = map(torch.from_numpy, tokens(0, 1))
    reservation = bench.store.reserve([(cache, 0, 1)], 0.0)
    bench.host.pages.write(SHAPE, bench.store.place(reservation, 0.0)[0], key, value * torch.nan)
    bench.store.cancel(reservation)


async def outcomes(bench: Bench, entries: Sequence[Entry]) -> list[Outcome]:
    found = [await bench.outcome(entry) for entry in entries]
    assert all(isinstance(outcome, Outcome) for outcome in found), found
    return [outcome for outcome in found if isinstance(outcome, Outcome)]


@pytest.mark.parametrize("appended", [0, 1, 3])
async def test_they_run_apart_and_hold_up_nobody_in_their_batch(
    bench: Bench, batches: list[list[CachedRequest]], appended: int
) -> None:
    caches = [bench.create(5) for _ in range(4)]
    spoil(bench, caches[2])
    lengths = [cache.length(0) for cache in caches]
    entries = [attend(bench, cache, seed=7, appended=appended) for cache in caches]
    cost, kind, group = entries[2].cost, entries[2].kind, entries[2].group
    assert group == entries[0].group, "nobody knows before"
    found = await outcomes(bench, entries)
    assert batches == [[entry.request for entry in entries], [entries[2].request]]
    assert entries[2].cost > 10 * cost
    assert entries[2].kind != kind, "how long it takes is learnt apart"
    assert [outcome.batch_size for outcome in found] == [3, 3, 1, 3]
    assert [cache.length(0) for cache in caches] == [length + appended for length in lengths], "appended once"
    for n, (entry, outcome) in enumerate(zip(entries, found, strict=True)):
        assert np.isnan(np.frombuffer(outcome.result.output, np.float32)).any() == (n == 2)
        if n != 2:
            await bench.check(entry, (0, 5), *([(7, appended)] if appended else []))
    await bench.finished()


@pytest.mark.parametrize("sequences", [1, 3])
async def test_of_a_request_those_sequences_are_computed_again(
    bench: Bench, batches: list[list[CachedRequest]], sequences: int
) -> None:
    """And they have the bits that they have without a native kernel."""
    caches = [bench.create(5) for _ in range(sequences)]
    entry = attend(bench, *caches, query=np.inf)
    (outcome,) = await outcomes(bench, [entry])
    assert len(batches) == 2
    output = np.frombuffer(outcome.result.output, np.float32).reshape(sequences, -1)
    assert list(np.isnan(output).all(1)) == [False] * (sequences - 1) + [True]
    bench.device.native = None
    (plain,) = await outcomes(bench, [attend(bench, caches[-1], query=np.inf)])
    assert output[-1].tobytes() == bytes(plain.result.output)
    await bench.finished()


async def test_they_keep_their_turn(bench: Bench, batches: list[list[CachedRequest]]) -> None:
    """Appends to the same cache come after them, whatever happens to other requests meanwhile."""
    cache, other = bench.create(5), bench.create(5)
    spoil(bench, cache)
    entries = [attend(bench, cache, appended=1), attend(bench, cache, appended=1), attend(bench, other)]
    await outcomes(bench, entries)
    assert [[entries.index(entry) for entry in entries if entry.request in batch] for batch in batches] == [
        [0, 2],
        [0],
        [1],
        [1],
    ]
    assert cache.length(0) == 8
    await bench.finished()


async def test_who_leaves_meanwhile_is_not_computed_again(
    bench: Bench, batches: list[list[CachedRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not run again, and its append is undone before the next one's turn."""
    cache = bench.create(5)
    spoil(bench, cache)
    again = bench.admission.again

    def leave(*counted: object) -> None:
        again(*counted)  # type: ignore[arg-type]
        monkeypatch.undo()
        bench.engine.cancel([entry])

    monkeypatch.setattr(bench.admission, "again", leave)
    entry = attend(bench, cache, appended=3)
    assert isinstance(await bench.outcome(entry), Cancelled)
    assert cache.length(0) == 6
    reader = attend(bench, cache, appended=1)
    (outcome,) = await outcomes(bench, [reader])
    assert outcome.batch_size == 1
    assert cache.length(0) == 7
    await bench.finished()
