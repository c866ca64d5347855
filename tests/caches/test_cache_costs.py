"""The cost of an operation on a cache: on arrival by the length that operations before it are to leave, at its turn by
the length that it finds.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any, cast

import numpy as np
import pytest
from cache_bench import Bench, bench
from caller import Reference, attend_request
from cases import Case
from limits import LIMITS
from stores import store_of

from attnserve_server.access.callers import anybody
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.operations import Truncate
from attnserve_server.caches.request import CachedRequest, read_attend
from attnserve_server.caches.shape import CacheDtype, CacheShape
from attnserve_server.caches.store import Truncation
from attnserve_server.caches.work import CacheHost, Use
from attnserve_server.errors import Cancelled, FailedPrecondition, InvalidRequest, Overloaded
from attnserve_server.scheduling.entry import Entry, Outcome
from attnserve_server.scheduling.pace import Amount

__all__ = ["bench"]


async def cost_of(bench: Bench, length: int) -> tuple[int, int]:
    """The cost and the bytes of attention to an otherwise unused cache of `length` tokens."""
    cache = bench.create(length)
    entry = bench.attend(cache, scores=True)
    await bench.output(entry)
    await bench.device.until_entered()
    bench.store.delete(cache)
    return entry.cost, entry.size


async def hold(bench: Bench, cache: Cache, appended: int = 0) -> Entry:
    """An attention to a cache that runs until `may_run` is set."""
    bench.device.may_run.clear()
    entry = bench.attend(cache, seed=1, appended=appended)
    await bench.device.until_entered()
    return entry


def learning(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The requests of each batch that is learnt from, and their cost."""
    learn, learnt = bench.admission.pace.learn, []

    def noted(batch: Amount, seconds: float) -> None:
        whole = batch.together()
        learnt.append((whole.requests, whole.flops))
        learn(batch, seconds)

    monkeypatch.setattr(bench.admission.pace, "learn", noted)
    return learnt


async def test_it_is_counted_over_what_those_before_it_leave(bench: Bench) -> None:
    """Appends, attention with appends and truncations, each more than once: waiting operations count, and so do those
    that run already, but not twice.
    """
    assert (await cost_of(bench, 40)) > (await cost_of(bench, 39)), "each token counts"
    costs = {length: await cost_of(bench, length) for length in (4, 6, 36, 2, 42)}
    cache = bench.create(3)
    running = await hold(bench, cache, appended=1)
    readers = [bench.attend(cache, scores=True)]
    changes = []
    for change in (
        lambda: bench.attend(cache, seed=2, appended=2),
        lambda: bench.append(cache, 3, 30),
        lambda: bench.truncate(cache, 2),
        lambda: bench.append(cache, 4, 40),
        lambda: bench.truncate(cache, 42),
    ):
        changes.append(change())
        readers.append(bench.attend(cache, scores=True))
    expected = [costs[length] for length in (4, 6, 36, 2, 42, 42)]
    assert [(entry.cost, entry.size) for entry in readers] == expected
    in_flight = [running, *changes, *readers]
    assert bench.admission.flops == sum(entry.cost for entry in in_flight)
    bench.device.may_run.set()
    assert isinstance(await bench.outcome(running), Outcome)
    for entry, length in zip(readers, (4, 6, 36, 2, 42, 42), strict=True):
        assert list((await bench.output(entry)).cache_lengths) == [length]
    assert [(entry.cost, entry.size) for entry in readers] == expected, "they met what was foreseen"
    assert cache.coming_length(0) == cache.length(0) == 42
    await bench.finished()


async def test_it_is_counted_anew_if_it_meets_another_length(bench: Bench) -> None:
    """An operation before it that was to change the cache was cancelled, or failed."""
    short, long, longest = [await cost_of(bench, length) for length in (4, 44, 84)]
    cache = bench.create(3)
    running = await hold(bench, cache, appended=1)
    given_up = bench.append(cache, 2, 40)
    refused = bench.attend(cache, seed=3, appended=40, expected_length=44)
    foreseen = bench.append(cache, 4, 40, expected_length=7)
    impossible = bench.truncate(cache, 1000)
    reader = bench.attend(cache, scores=True)
    assert (reader.cost, reader.size) == longest, "what cannot happen as things are is not counted in"
    bench.engine.cancel([given_up])
    assert isinstance(await bench.outcome(given_up), Cancelled)
    behind = bench.attend(cache, scores=True)
    assert (behind.cost, behind.size) == long
    bench.device.may_run.set()
    assert isinstance(await bench.outcome(running), Outcome)
    for entry in (refused, foreseen):
        assert isinstance(await bench.outcome(entry), FailedPrecondition)
    assert isinstance(await bench.outcome(impossible), InvalidRequest)
    for entry in (reader, behind):
        assert list((await bench.output(entry)).cache_lengths) == [4]
        assert (entry.cost, entry.size) == short
    await bench.finished()


async def test_what_was_counted_anew_is_learnt_from(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = bench.create(3)
    running = await hold(bench, cache)
    cut, reader = bench.truncate(cache, 0), bench.attend(cache)
    foreseen = reader.cost
    bench.engine.cancel([cut])
    learnt, worker, costs = learning(bench, monkeypatch), bench.engine.worker, []
    run = worker.run
    monkeypatch.setattr(worker, "run", lambda *batch: (costs.append(worker.cost), run(*batch)))
    bench.device.may_run.set()
    for entry in (running, reader):
        await bench.check(entry, (0, 3))
    await bench.finished()
    assert reader.cost > foreseen
    assert learnt == [(1, running.cost), (1, reader.cost)]
    assert costs == [reader.cost]
    assert bench.admission.pace.batches == 2


async def test_what_cannot_run_is_not_learnt_from(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it count in what the device has to do."""
    caches = bench.create(3), bench.create(3)
    learnt = learning(bench, monkeypatch)
    bench.device.may_run.clear()
    refused, reader = bench.attend(caches[0], expected_length=9), bench.attend(caches[1])
    await bench.device.until_entered()
    assert bench.engine.worker.cost == reader.cost
    bench.device.may_run.set()
    assert isinstance(await bench.outcome(refused), FailedPrecondition)
    await bench.check(reader, (0, 3))
    await bench.finished()
    assert learnt == [(1, reader.cost)]


@pytest.mark.parametrize("bound", ["bytes", "flops"])
async def test_it_may_lack_room_for_what_it_meets(bench: Bench, bound: str) -> None:
    """Then it is refused as it would have been on arrival, its append is undone, and others go on."""
    few, many = await cost_of(bench, 1), await cost_of(bench, 301)
    cache = bench.create(300)
    running = await hold(bench, cache)
    cut = bench.truncate(cache, 0)
    readers = [bench.attend(cache, seed=n, appended=1, scores=True) for n in range(3)]
    bench.engine.cancel([cut])
    bench.admission.admit("another", 10 * many[1], 10 * many[0])
    if bound == "bytes":
        bench.admission._max_bytes = bench.admission.bytes - running.size + (many[1] - few[1]) // 2
    else:
        bench.admission._max_flops = bench.admission.flops - running.cost + (many[0] - few[0]) // 2
    bench.device.may_run.set()
    assert isinstance(await bench.outcome(running), Outcome)
    outcomes = [await bench.outcome(entry) for entry in readers]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
    assert refused
    assert {outcome.bound for outcome in refused} == {bound}
    assert all(isinstance(outcome, Overloaded | Outcome) for outcome in outcomes)
    bench.admission.computed("another", 10 * many[1], 10 * many[0])
    bench.admission.release("another", 10 * many[1])
    assert cache.length(0) == 300 + len(readers) - len(refused)
    await bench.check(bench.attend(cache), (0, 300), *((n, 1) for n in range(3) if outcomes[n] not in refused))
    await bench.finished()


async def test_it_may_be_more_than_one_request_may_cost(bench: Bench) -> None:
    cache = bench.create(300)
    running = await hold(bench, cache)
    cut = bench.truncate(cache, 0)
    reader = bench.attend(cache, seed=1, appended=1)
    assert isinstance(reader.request, CachedRequest)
    most = 10 * reader.request.extent.flops  # and it finds 300 times as many
    reader.request.limits = replace(LIMITS, max_request_flops=most)
    bench.engine.cancel([cut])
    bench.device.may_run.set()
    assert isinstance(await bench.outcome(running), Outcome)
    refused = await bench.outcome(reader)
    assert isinstance(refused, InvalidRequest)
    assert refused.reason == "LIMIT_EXCEEDED"
    assert cache.length(0) == 300
    await bench.finished()


async def test_what_is_announced_of_several_layers_ends_with_whoever_announced_it(bench: Bench) -> None:
    """A truncation shortens the layers that are longer, whether it arrives alone or behind others."""
    store = bench.store
    cache = store.create(CacheShape(2, 8, 8, 3, "float32"), None, 0.0)
    reservation = store.reserve([(cache, 0, 9), (cache, 1, 2)], 0.0)
    store.place(reservation, 0.0)
    store.cancel(reservation)
    operations = [
        Truncate(bench.host, (Use(cache, 0, 0, None),), 0, [Truncation(cache, length, 0)]) for length in (4, 1)
    ]
    seen = []
    for operation in operations:
        operation.enter()
        seen.append([cache.coming_length(layer) for layer in range(3)])
    assert seen == [[4, 2, 0], [1, 1, 0]]
    operations[0].leave()
    operations[1].begin()
    assert cache.lengths == [1, 1, 0]
    assert [cache.coming_length(layer) for layer in range(3)] == [1, 1, 0]
    operations[1].leave()
    assert cache.users == 0


async def test_a_truncation_that_is_sent_again_announces_no_room(bench: Bench) -> None:
    """It cuts off nothing, even if the cache has grown to the length that it expects; another one does."""
    cache = bench.store.create(CacheShape(2, 8, 8, 1, "float32"), None, 0.0)
    bench.store.truncate_one(cache, 0, truncation_id=7)
    reservation = bench.store.reserve([(cache, 0, 9)], 0.0)
    bench.store.place(reservation, 0.0)
    bench.store.cancel(reservation)
    for truncation_id, coming in ((7, 9), (8, 4)):
        operation = Truncate(bench.host, (Use(cache, 0, 0, 9),), 0, [Truncation(cache, 4, truncation_id)])
        operation.enter()
        assert cache.coming_length(0) == coming
        operation.leave()


def test_the_effort_of_a_query_is_what_it_reads_in_the_dtype_that_caches_store() -> None:
    host = CacheHost(store_of(16, 10, page_bytes=1 << 16), cast(Any, None), "")
    query = np.zeros((8, 1, 64), np.float32)
    stored: tuple[CacheDtype, ...] = ("float32", "bfloat16")
    efforts = {}
    for dtype in stored:
        cache = host.store.create(CacheShape(8, 64, 64, 1, dtype), None, monotonic())
        message = attend_request(Case(query, query, query), [Reference(cache.name, 0, None)], None).SerializeToString()
        request = read_attend(host, anybody("here"), message, 0, len(message), LIMITS)
        assert isinstance(request, CachedRequest)
        request.count([2048])
        efforts[dtype] = request.effort
    read = 2048 * 8 * (64 + 64) * 4
    assert efforts == {"float32": read, "bfloat16": read // 2}
