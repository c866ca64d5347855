"""Operations on caches in the engine: their order, what is held meanwhile, and what a failure leaves behind."""

from __future__ import annotations

import itertools
import math
from time import monotonic, perf_counter
from typing import Any

import pytest
from cache_bench import PAGE_BYTES, PAGES, PATIENCE_S, Bench, bench

from attnserve_server.caches.errors import CacheFull
from attnserve_server.errors import (
    Cancelled,
    ComputationFailed,
    DeadlineExceeded,
    DeviceFailed,
    FailedPrecondition,
    NotFound,
)
from attnserve_server.scheduling.entry import Entry, Outcome
from attnserve_server.scheduling.pace import Amount

__all__ = ["bench"]


async def test_others_do_not_wait_for_those_that_wait_for_one_cache(bench: Bench) -> None:
    """While a long operation on one cache runs, three more wait for it, the second also for another cache, and whatever
    needs that one queues behind it; an operation on a cache that none waits for runs before them.
    """
    busy, shared, free = bench.create(3), bench.create(3), bench.create(3)
    bench.device.may_run.clear()
    running = bench.attend(busy, seed=1, appended=1)
    await bench.device.until_entered()
    second = bench.attend(busy, seed=2, appended=1)
    both = bench.attend(busy, shared, seed=3, appended=1)
    behind = bench.attend(shared, seed=4, appended=1)
    elsewhere = bench.attend(free, seed=5, appended=1)
    assert bench.engine.waiting_for_turns == 3
    assert bench.engine.bytes_waiting_for_turns == sum(entry.received_bytes for entry in (second, both, behind))
    assert (busy.length(0), shared.length(0), free.length(0)) == (4, 3, 3), "only what runs has taken effect"
    bench.device.may_run.set()
    await bench.check(elsewhere, (0, 3), (5, 1))
    await bench.check(running, (0, 3), (1, 1))
    await bench.check(second, (0, 3), (1, 1), (2, 1))
    await bench.check(behind, (0, 3), (3, 1), (4, 1))
    assert [*(await bench.output(both)).cache_lengths] == [6, 4]
    places = [bench.order.index(entry) for entry in (running, second, both, behind)]
    assert places == sorted(places)
    assert bench.order.index(elsewhere) < bench.order.index(both)
    await bench.finished()


async def test_what_needs_no_device_is_no_batch(bench: Bench) -> None:
    cache = bench.create(3)
    await bench.forked(bench.fork(cache))
    assert isinstance(await bench.outcome(bench.truncate(cache, 2)), Outcome)
    assert bench.metrics.registry.get_sample_value("attnserve_batch_requests_count") == 0
    assert isinstance(await bench.outcome(bench.attend(cache)), Outcome)
    assert bench.metrics.registry.get_sample_value("attnserve_batch_requests_count") == 1
    await bench.finished()


async def test_those_who_only_read_a_cache_do_not_wait_for_each_other(bench: Bench) -> None:
    """They are one batch; but an append between them waits for the readers before it, and those behind wait for it."""
    cache = bench.create(3)
    bench.device.may_run.clear()
    readers = [bench.attend(cache) for _ in range(3)]
    append = bench.attend(cache, seed=1, appended=1)
    behind = [bench.attend(cache) for _ in range(2)]
    assert bench.engine.waiting_for_turns == 3
    assert cache.length(0) == 3
    bench.device.may_run.set()
    for entries, parts in ((readers, [(0, 3)]), ([append], [(0, 3), (1, 1)]), (behind, [(0, 3), (1, 1)])):
        for entry in entries:
            await bench.check(entry, *parts)
            assert (await bench.output(entry)).batch_size == len(entries)
    await bench.finished()


async def test_what_is_seen_of_a_cache_is_final(bench: Bench) -> None:
    """A look waits for operations before it, even if their callers have gone, and not for those behind it."""
    cache = bench.create(3)
    bench.device.may_run.clear()
    given_up = bench.attend(cache, seed=1, appended=1)
    await bench.device.until_entered()
    bench.engine.cancel([given_up])  # too late: it runs
    looks = [bench.look(cache)]
    bench.attend(cache, seed=2, appended=5)
    looks.append(bench.look(cache))
    assert bench.engine.waiting_for_turns == 3
    bench.device.may_run.set()
    assert [await bench.seen(look) for look in looks] == [4, 9]
    await bench.finished()


async def test_what_computes_nothing_does_not_wait_for_the_device(bench: Bench) -> None:
    """Operations on a cache are done while the attention to another one is computed."""
    busy, cache = bench.create(3), bench.create(20)
    bench.device.may_run.clear()
    running = bench.attend(busy)
    await bench.device.until_entered()
    fork, cut, look = bench.fork(cache), bench.truncate(cache, 7), bench.look(cache)
    queued = bench.append(cache, seed=1, count=5)
    behind = bench.look(cache)
    assert [(await bench.forked(fork)).length(0), await bench.seen(look)] == [20, 7]
    assert isinstance(await bench.outcome(cut), Outcome)
    assert bench.order == [fork, cut, look]
    assert bench.engine.waiting_for_turns == 1, "who looks at what is appended waits for it"
    bench.device.may_run.set()
    await bench.check(running, (0, 3))
    assert isinstance(await bench.outcome(queued), Outcome)
    assert await bench.seen(behind) == 12
    await bench.finished()


async def test_what_computes_nothing_is_in_time_however_busy_the_device_is(bench: Bench) -> None:
    busy, cache = bench.create(3), bench.create(20)
    first = bench.attend(busy)
    await bench.check(first, (0, 3))
    await bench.device.until_entered()
    slow = Amount()
    slow.add(first.kind, first.cost)
    for _ in range(20):
        bench.admission.pace.learn(slow, 100 * PATIENCE_S)
    bench.device.may_run.clear()
    running = bench.attend(busy)
    await bench.device.until_entered()
    assert await bench.seen(bench.look(cache, deadline=perf_counter() + PATIENCE_S)) == 20
    bench.device.may_run.set()
    await bench.check(running, (0, 3))
    await bench.finished()


async def test_replies_describe_a_cache_as_it_is_at_their_turn(bench: Bench) -> None:
    """However much is done to it in the same turn of the event loop, before any reply is written."""
    cache = bench.create(20)
    bench.device.may_run.clear()
    running = bench.attend(cache, seed=1, appended=5)
    await bench.device.until_entered()
    first, fork, second = bench.truncate(cache, 17), bench.fork(cache), bench.truncate(cache, 9)
    bench.device.may_run.set()
    await bench.check(running, (0, 20), (1, 5))
    await bench.outcome(second)
    bench.store.delete(cache)
    assert [await bench.cut(first), await bench.cut(second)] == [17, 9]
    assert (await bench.forked(fork)).length(0) == 17
    await bench.finished()


async def test_what_computes_nothing_is_not_done_for_nobody(bench: Bench) -> None:
    """Whether the caller has gone, or its deadline has passed when the turn comes."""
    busy, cache = bench.create(3), bench.create(20)
    bench.device.may_run.clear()
    running = bench.attend(busy)
    await bench.device.until_entered()
    cut = bench.truncate(cache, 7)
    bench.engine.cancel([cut])
    late = bench.look(cache, deadline=perf_counter())
    seen = bench.look(cache)
    assert isinstance(await bench.outcome(cut), Cancelled)
    assert isinstance(await bench.outcome(late), DeadlineExceeded)
    assert await bench.seen(seen) == 20
    bench.device.may_run.set()
    await bench.check(running, (0, 3))
    await bench.finished()


async def test_a_bug_met_by_what_computes_nothing_leaves_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(bench.engine._pending, "run_without_device", fail)
    assert isinstance(await bench.outcome(bench.look(bench.create(3))), DeviceFailed)
    assert bench.engine.failure == "the engine failed"


async def test_hundreds_that_compute_nothing_have_their_turns_one_after_the_other(bench: Bench) -> None:
    """They wait for one cache, and each lets the next one on."""
    cache = bench.create(3)
    bench.device.may_run.clear()
    running = bench.attend(cache, seed=1, appended=5)
    await bench.device.until_entered()
    cuts = [bench.truncate(cache, max(8 - place, 0)) for place in range(500)]
    bench.device.may_run.set()
    await bench.check(running, (0, 3), (1, 5))
    for entry in cuts:
        assert isinstance(await bench.outcome(entry), Outcome)
    assert cache.length(0) == 0
    await bench.finished()


async def test_a_fork_that_waits_is_made_though_its_cache_is_deleted(bench: Bench) -> None:
    cache = bench.create(3)
    bench.device.may_run.clear()
    running = bench.attend(cache, seed=1, appended=2)
    await bench.device.until_entered()
    waiting = bench.fork(cache)
    bench.store.delete(cache)
    with pytest.raises(NotFound):
        bench.fork(cache)
    bench.device.may_run.set()
    await bench.check(running, (0, 3), (1, 2))
    fork = await bench.forked(waiting)
    await bench.check(bench.attend(fork), (0, 3), (1, 2))
    await bench.finished()


async def test_what_is_undone_is_never_seen(bench: Bench) -> None:
    cache = bench.create(3)
    bench.device.may_run.clear()
    bench.device.failures = 1
    failed = bench.attend(cache, seed=1, appended=2)
    await bench.device.until_entered()
    assert cache.length(0) == 5
    look = bench.look(cache)
    bench.device.may_run.set()
    assert await bench.seen(look) == 3
    assert isinstance(await bench.outcome(failed), ComputationFailed)
    await bench.finished()


async def test_who_looks_does_not_wait_for_who_reads(bench: Bench) -> None:
    cache = bench.create(3)
    bench.device.may_run.clear()
    running = bench.attend(cache)
    await bench.device.until_entered()
    assert await bench.seen(bench.look(cache)) == 3
    assert running not in bench.order
    bench.device.may_run.set()
    await bench.check(running, (0, 3))
    await bench.finished()


async def test_looking_keeps_no_cache_alive(bench: Bench) -> None:
    """It does not renew the lease, and a cache that was deleted meanwhile is not found."""
    cache = bench.create(3, ttl=100.0)
    expires = cache.expires
    assert await bench.seen(bench.look(cache)) == 3
    assert cache.expires == expires
    bench.device.may_run.clear()
    running = bench.attend(cache, seed=1, appended=1)
    await bench.device.until_entered()
    look = bench.look(cache)
    bench.store.delete(cache)
    bench.device.may_run.set()
    assert isinstance(await bench.outcome(look), NotFound)
    await bench.check(running, (0, 3), (1, 1))
    await bench.finished()


async def test_who_is_cancelled_while_waiting_changes_nothing_and_lets_others_on(bench: Bench) -> None:
    cache = bench.create(3)
    bench.device.may_run.clear()
    first = bench.attend(cache, seed=1, appended=1)
    await bench.device.until_entered()
    given_up, last = bench.attend(cache, seed=2, appended=30), bench.attend(cache, seed=3, appended=1)
    bench.engine.cancel([given_up])
    assert isinstance(await bench.outcome(given_up), Cancelled)  # at once, and not when its turn comes
    assert bench.engine.waiting_for_turns == 1
    bench.device.may_run.set()
    await bench.check(first, (0, 3), (1, 1))
    await bench.check(last, (0, 3), (1, 1), (3, 1))
    await bench.finished()


async def test_who_expects_another_length_when_its_turn_has_come_changes_nothing(bench: Bench) -> None:
    """What counts is the length at its turn, not on arrival."""
    cache = bench.create(3)
    bench.device.may_run.clear()
    first = bench.attend(cache, seed=1, appended=2, expected_length=3)
    await bench.device.until_entered()
    doubled = bench.attend(cache, seed=1, appended=2, expected_length=3)
    next_one = bench.attend(cache, seed=2, appended=1, expected_length=5)
    bench.device.may_run.set()
    refused = await bench.outcome(doubled)
    assert isinstance(refused, FailedPrecondition)
    assert "5 tokens, not 3" in str(refused)
    await bench.check(first, (0, 3), (1, 2))
    await bench.check(next_one, (0, 3), (1, 2), (2, 1))
    await bench.finished()


async def test_a_batch_of_which_nothing_could_run_is_over(bench: Bench) -> None:
    """It does not keep callers from starting afresh, once nobody waits."""
    assert isinstance(await bench.outcome(bench.attend(bench.create(3), expected_length=9)), FailedPrecondition)
    await bench.finished()


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("length", [0, 3, 8])
async def test_an_append_whose_attention_fails_is_taken_back(bench: Bench, forked: bool, length: int) -> None:
    """The cache is as before, whether its last page was its own or shared; what follows builds on that."""
    cache = bench.create(length)
    sibling = bench.store.fork_one(cache, None, 0.0) if forked else None
    used = bench.store.used_bytes
    bench.device.failures = 1
    failed = bench.attend(cache, seed=1, appended=20)
    assert isinstance(await bench.outcome(failed), ComputationFailed)
    assert cache.length(0) == length
    assert bench.store.used_bytes == used
    await bench.check(bench.attend(cache, seed=2, appended=3), (0, length), (2, 3))
    if sibling is not None:
        await bench.check(bench.attend(sibling, seed=4, appended=1), (0, length), (4, 1))
    await bench.finished()


async def test_of_a_batch_that_fails_only_the_guilty_append_is_taken_back(bench: Bench) -> None:
    """The batch fails, and of its requests run one by one, only the first."""
    one, other = bench.create(3), bench.create(3)
    bench.device.failures = 2
    first, second = bench.attend(one, seed=1, appended=2), bench.attend(other, seed=2, appended=2)
    assert isinstance(await bench.outcome(first), ComputationFailed)
    await bench.check(second, (0, 3), (2, 2))
    assert (one.length(0), other.length(0)) == (3, 5)
    await bench.finished()


async def test_nothing_in_use_is_evicted(bench: Bench) -> None:
    """A lease that ended long ago does not matter while an operation runs on the cache, or waits to."""
    cache = bench.create(40 * 8, ttl=60.0)
    bench.device.may_run.clear()
    running = bench.attend(cache)
    await bench.device.until_entered()
    waiting = bench.attend(cache, seed=1, appended=1)
    cache.expires = -math.inf
    other = bench.create()
    with pytest.raises(CacheFull) as refused:
        bench.append(other, 2, 30 * 8)
    assert int(refused.value.metadata["free_bytes"]) < 30 * PAGE_BYTES
    assert bench.store.get(cache.name, monotonic()) is cache
    bench.device.may_run.set()
    await bench.check(running, (0, 40 * 8))
    await bench.check(waiting, (0, 40 * 8), (1, 1))
    assert cache.expires > 0, "its lease begins anew with the end of its use"
    cache.expires = -math.inf
    assert isinstance(await bench.outcome(bench.append(other, 2, 30 * 8)), Outcome)
    assert cache.gone
    await bench.check(bench.attend(other), (2, 30 * 8))
    await bench.finished()


async def test_a_deleted_cache_stays_for_what_was_admitted(bench: Bench) -> None:
    """Its pages are free only once the last operation on it is over."""
    cache = bench.create(50 * 8)
    bench.device.may_run.clear()
    running = bench.attend(cache)
    await bench.device.until_entered()
    waiting = bench.attend(cache, seed=1, appended=1)
    bench.store.delete(cache)
    other = bench.create()
    with pytest.raises(CacheFull):
        bench.append(other, 2, 30 * 8)
    bench.device.may_run.set()
    await bench.check(running, (0, 50 * 8))
    await bench.check(waiting, (0, 50 * 8), (1, 1))
    assert isinstance(await bench.outcome(bench.append(other, 2, 30 * 8)), Outcome)
    await bench.check(bench.attend(other), (2, 30 * 8))
    await bench.finished()


async def test_what_was_admitted_never_lacks_room(bench: Bench) -> None:
    """Appends to forks that share a partial page: each needs a copy of it, for which a page is reserved."""
    cache = bench.create(8 * 20 + 5)
    forks = [bench.store.fork_one(cache, None, 0.0) for _ in range(8)]
    bench.device.may_run.clear()
    running = bench.attend(bench.create(1))
    await bench.device.until_entered()
    admitted: list[tuple[int, Entry]] = []

    def append_on_and_on() -> None:
        for seed in itertools.count(1):
            admitted.append((seed, bench.append(forks[seed % 8], seed, 6)))  # noqa: PERF401 - until one is refused

    with pytest.raises(CacheFull):
        append_on_and_on()
    assert bench.store.reserved_pages * 10 > PAGES
    bench.device.may_run.set()
    await bench.output(running)
    for _, entry in admitted:
        assert isinstance(await bench.outcome(entry), Outcome)
    for place, fork in enumerate(forks):
        own = [(seed, 6) for seed, _ in admitted if seed % 8 == place]
        await bench.check(bench.attend(fork), (0, 8 * 20 + 5), *own)
    await bench.finished()
