"""Several caches forked or truncated in one request to a real server: all or none, at its turn in all of them."""

from __future__ import annotations

import gc
import secrets
import tracemalloc
from typing import Any

import calls
import grpc
import pytest
from cache_bench import Bench, bench
from cached_cases import caller
from caller import Caller, tokens
from conftest import Server
from google.rpc import error_details_pb2
from stores import SHAPE, append, store_of

from attnserve.v1 import caches_pb2
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.operations import Fork, Truncate
from attnserve_server.caches.store import MOST_TRUNCATIONS, Truncation
from attnserve_server.caches.work import Use
from attnserve_server.errors import FailedPrecondition, InvalidRequest, NotFound, Overloaded
from attnserve_server.requests.work import Work
from attnserve_server.scheduling.entry import Entry, Outcome

__all__ = ["bench", "caller"]


def of_lengths(caller: Caller, *lengths: int, **fields: Any) -> list[str]:
    """Caches with as many tokens."""
    names = [caller.create(**fields) for _ in lengths]
    for name, length in zip(names, lengths, strict=True):
        caller.append(name, *tokens(1, length))
    return names


def lengths_of(caller: Caller, names: list[str]) -> list[int]:
    return [caller.get(name).lengths[0] for name in names]


def refused(ask: Any) -> tuple[grpc.StatusCode, list[str], dict[str, str]]:
    """The code of an error, the fields that it names, and its metadata."""
    with pytest.raises(grpc.RpcError) as caught:
        ask()
    error: Any = caught.value
    status, fields = calls.status_of(error), []
    if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        fields = [each.field for each in calls.detail(status, error_details_pb2.BadRequest).field_violations]
    return error.code(), fields, dict(calls.detail(status, error_details_pb2.ErrorInfo).metadata)


def cut(name: str, length: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "length": length, **fields}


def test_each_is_cut_off_at_its_own_length(caller: Caller) -> None:
    names = of_lengths(caller, 40, 33, 5)
    told = caller.truncations(
        cut(names[0], 32, expected_length=40), cut(names[1], 33, expected_length=33), cut(names[2], 0)
    )
    assert [(cache.name, *cache.lengths) for cache in told] == list(zip(names, (32, 33, 0), strict=True))
    assert lengths_of(caller, names) == [32, 33, 0]


def test_none_is_cut_off_if_one_cannot_be(caller: Caller) -> None:
    names = of_lengths(caller, 4, 6, 8)
    good = cut(names[0], 1)
    code, _, metadata = refused(lambda: caller.truncations(good, cut(names[1], 1, expected_length=7), cut(names[2], 1)))
    assert (code, metadata) == (grpc.StatusCode.FAILED_PRECONDITION, {"name": names[1], "length": "6"})
    for bad, field in (
        (cut(names[1], 7), "truncations[1].length"),
        ({"name": names[1]}, "truncations[1].length"),
        (cut("", 1), "truncations[1].name"),
        (cut(names[0], 2), "truncations[1].name"),
    ):
        assert refused(lambda bad=bad: caller.truncations(good, bad))[:2] == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert refused(lambda: caller.truncations(good, cut("nobody", 1)))[0] == grpc.StatusCode.NOT_FOUND
    for count in (0, 257):
        many = [cut(names[0], 1)] * count
        assert refused(lambda many=many: caller.truncations(*many))[1] == ["truncations"]
    assert lengths_of(caller, names) == [4, 6, 8]


def test_a_group_that_is_sent_again_is_known(caller: Caller) -> None:
    """Whatever has been appended since, and whichever of the caches is asked about first."""
    names = of_lengths(caller, 4, 6)
    cuts = [cut(name, 2, truncation_id=number) for number, name in enumerate(names, 1)]
    caller.truncations(*cuts)
    caller.append(names[0], *tokens(2, 3))
    for order, length in ((cuts, "5"), (cuts[::-1], "2")):
        name = str(order[0]["name"])
        assert refused(lambda order=order: caller.truncations(*order))[2] == {
            "name": name, "length": length, "truncated": "true"
        }  # fmt: skip
    assert lengths_of(caller, names) == [5, 2]


def test_forks_of_several(caller: Caller) -> None:
    """In the order of the names, as many as are named, with the ttl of each cache unless there is another."""
    one, other = of_lengths(caller, 40, 5)
    [lasting] = of_lengths(caller, 3, ttl=50)
    forks = caller.forks([other, one, other, lasting])
    assert [list(fork.lengths) for fork in forks] == [[5], [40], [5], [3]]
    assert len({one, other, lasting, *(fork.name for fork in forks)}) == 7
    assert [fork.ttl.seconds for fork in forks] == [0, 0, 0, 50]
    assert [fork.ttl.seconds for fork in caller.forks([one, lasting], ttl={"seconds": 9})] == [9, 9]
    caller.append(forks[0].name, *tokens(3, 2))
    assert lengths_of(caller, [other, *(fork.name for fork in forks)]) == [5, 7, 40, 5, 3]


def test_forks_that_are_sent_again(caller: Caller) -> None:
    """They are the same, whether or not what they were forked from still exists; once some are gone, there are none."""
    names = of_lengths(caller, 4, 6)
    made = [fork.name for fork in caller.forks([*names, names[0]], request_id=b"it")]
    assert [fork.name for fork in caller.forks([*names, names[0]], request_id=b"it")] == made
    for others in (names, [*reversed(names), names[0]], [names[0]] * 3):
        assert refused(lambda others=others: caller.forks(others, request_id=b"it"))[1] == ["request_id"]
    caller.delete(names[1])
    assert [fork.name for fork in caller.forks([*names, names[0]], request_id=b"it")] == made
    caller.delete(made[2])
    code, _, metadata = refused(lambda: caller.forks([*names, names[0]], request_id=b"it"))
    assert (code, metadata) == (grpc.StatusCode.NOT_FOUND, {"name": made[2]})
    caller.delete(*made)
    assert refused(lambda: caller.forks([*names, names[0]], request_id=b"it"))[2] == {"name": names[1]}


def test_forks_that_nobody_waits_for(caller: Caller) -> None:
    names = of_lengths(caller, 4, 6)
    made = caller.forks(names, request_id=b"given up")
    caller.give_up(b"given up")
    for fork in made:
        assert refused(lambda fork=fork: caller.get(fork.name))[0] == grpc.StatusCode.NOT_FOUND
    assert refused(lambda: caller.forks(names, request_id=b"given up"))[0] == grpc.StatusCode.CANCELLED


def test_there_is_room_for_all_forks_or_for_none(start_server: Any) -> None:
    server: Server = start_server("--max-caches", "5")
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        names = of_lengths(caller, 1, 2)
        code, _, metadata = refused(lambda: caller.forks([*names, *names]))
        assert (code, metadata["bound"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "caches")
        assert len(caller.list().caches) == 2
        assert len(caller.forks([*names, names[0]])) == 3
        assert len(caller.list().caches) == 5


def test_a_callers_share_of_the_caches_counts_all_forks() -> None:
    """As many as one by one, whatever is made together."""

    def most(at_once: int) -> int:
        store = store_of(4, max_caches=101)
        cache = store.create(SHAPE, None, 0.0, "me")
        try:
            while True:
                store.fork([cache] * at_once, [None] * at_once, 0.0, b"", None)
        except Overloaded:
            return len(store)

    assert [most(1), most(2), most(88), most(89)] == [89, 89, 89, 1]


def test_room_for_several_forks_is_made_by_evictions() -> None:
    store = store_of(4, max_caches=4)
    lasting = store.create(SHAPE, None, 0.0)
    expired = [store.create(SHAPE, 1.0, 0.0) for _ in range(3)]
    assert len(store.fork([lasting, lasting], [None, None], 5.0, b"", None)) == 2
    assert [cache.gone for cache in expired] == [True, True, False]
    with pytest.raises(Overloaded):
        store.fork([lasting, lasting], [None, None], 6.0, b"", None)
    assert all(cache.gone for cache in expired), "there was not enough room all the same"


def test_a_store_cuts_all_or_none() -> None:
    store = store_of(8)
    caches = [store.create(SHAPE, None, 0.0) for _ in range(2)]
    for cache in caches:
        append(store, cache, 10)
    with pytest.raises(InvalidRequest, match=r"truncations\[1\]\.length"):
        store.truncate([Truncation(caches[0], 1, 0), Truncation(caches[1], 11, 0)], None)
    assert [cache.lengths for cache in caches] == [[10], [10]]
    store.truncate([Truncation(caches[0], 1, 0), Truncation(caches[1], 9, 0)], None)
    assert ([cache.lengths for cache in caches], store.tokens, store.counts.truncations) == ([[1], [9]], 10, 2)
    store.delete(caches[0])
    with pytest.raises(NotFound):
        store.wait_to_cut([Truncation(cache, 1, 0) for cache in reversed(caches)], True)
    with pytest.raises(NotFound):
        store.wait_to_fork(caches)
    store.delete(caches[1])
    assert (store.free_pages, store.reserved_pages) == (8, 0), "what was refused holds nothing"


def submitted(
    bench: Bench, caches: list[Cache], lengths: list[int] | None = None, expected: int | None = None
) -> Entry:
    """A truncation of caches, or without lengths a fork."""
    uses = tuple(Use(cache, 0, 0, expected) for cache in caches)
    if lengths is None:
        return bench.submit(Fork(bench.host, uses, 0, [*caches, caches[0]], None, b""))
    cuts = [Truncation(cache, length, 0) for cache, length in zip(caches, lengths, strict=True)]
    return bench.submit(Truncate(bench.host, uses, 0, cuts))


async def test_a_group_waits_for_its_turn_in_each_cache(bench: Bench) -> None:
    """An append is on its way to one of two caches: what comes behind it finds what it leaves, in both."""
    caches = [bench.create(3), bench.create(5)]
    bench.device.may_run.clear()
    running = bench.attend(caches[1], seed=1, appended=4)
    await bench.device.until_entered()
    fork, cuts = submitted(bench, caches), submitted(bench, caches, [2, 8])
    behind = bench.look(caches[0])
    assert bench.engine.waiting_for_turns == 3
    bench.device.may_run.set()
    await bench.check(running, (0, 5), (1, 4))
    outcome = await bench.outcome(fork)
    assert isinstance(outcome, Outcome)
    pieces, _ = fork.request.encode(outcome.result, outcome.phases, outcome.batch_size)
    forks = caches_pb2.CacheServiceForkResponse.FromString(b"".join(pieces)).caches
    assert [list(each.lengths) for each in forks] == [[3], [9], [3]]
    assert isinstance(await bench.outcome(cuts), Outcome)
    assert await bench.seen(behind) == 2
    assert [cache.length(0) for cache in caches] == [2, 8]
    await bench.finished()


async def test_a_group_that_fails_at_its_turn_changes_nothing(bench: Bench) -> None:
    """What stood ahead of it in one cache has left another length than is expected."""
    caches = [bench.create(5), bench.create(5)]
    bench.device.may_run.clear()
    running = bench.attend(caches[1], seed=1, appended=4)
    await bench.device.until_entered()
    cuts = submitted(bench, caches, [2, 2], expected=5)
    bench.device.may_run.set()
    await bench.check(running, (0, 5), (1, 4))
    error = await bench.outcome(cuts)
    assert isinstance(error, FailedPrecondition)
    assert "truncations[1] has 9 tokens, not 5" in str(error)
    assert [cache.length(0) for cache in caches] == [5, 9]
    await bench.finished()


@pytest.mark.parametrize(("lengths", "expected"), [([0, 6], None), ([6, 0], None), ([0, 0], 9)])
async def test_what_stands_behind_a_group_that_must_fail_is_promised_its_pages(
    bench: Bench, lengths: list[int], expected: int | None
) -> None:
    """One cache is too short for what is asked, or has another length: no cache of the group will be cut off, so an
    append behind it counts on the length that is there.
    """
    caches = [bench.create(5), bench.create(5)]
    bench.device.may_run.clear()
    running = [bench.attend(cache, seed=1) for cache in caches]
    await bench.device.until_entered()
    cuts = submitted(bench, caches, lengths, expected)
    assert [cache.coming_length(0) for cache in caches] == [5, 5]
    behind = [bench.append(cache, seed=2, count=3, expected_length=5) for cache in caches]
    for cache in caches:
        assert cache.coming_length(0) == 8
        assert cache.layers[0].promised == cache.layers[0].pages_for(3)
    bench.device.may_run.set()
    for entry in running:
        await bench.check(entry, (0, 5))
    assert isinstance(await bench.outcome(cuts), FailedPrecondition if expected else InvalidRequest)
    for entry in behind:
        assert isinstance(await bench.outcome(entry), Outcome)
    assert [cache.length(0) for cache in caches] == [8, 8]
    await bench.finished()


async def test_what_lost_a_cache_before_it_is_admitted_holds_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [bench.create(3) for _ in range(3)]
    submit = bench.submit

    def submit_later(request: Work) -> Entry:
        bench.store.delete(caches[2])
        return submit(request)

    monkeypatch.setattr(bench, "submit", submit_later)
    with pytest.raises(NotFound):
        bench.attend(*caches)
    assert [cache.users for cache in caches] == [0, 0, 0]
    assert bench.admission.requests == 0


def test_one_id_shows_that_all_were_cut(caller: Caller) -> None:
    """Also behind a cache whose own id has been forgotten, and whose length is another by now."""
    names = of_lengths(caller, 4, 6)
    cuts = [cut(name, 2, expected_length=length, truncation_id=9) for name, length in zip(names, (4, 6), strict=True)]
    caller.truncations(*cuts)
    for number in range(MOST_TRUNCATIONS):
        caller.truncate(names[0], 2, truncation_id=100 + number)
    assert refused(lambda: caller.truncations(*cuts))[2] == {"name": names[1], "length": "2", "truncated": "true"}


def test_no_more_than_there_may_be(start_server: Any) -> None:
    """What can never be done is no matter of waiting for room, and evicts nothing."""
    server: Server = start_server("--max-caches", "5", "--max-cache-layers", "16385")
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        [name] = of_lengths(caller, 1)
        assert refused(lambda: caller.forks([name] * 6))[:2] == (grpc.StatusCode.INVALID_ARGUMENT, ["names"])
        deep = [caller.create(layers=8192), caller.create(layers=8192)]
        assert refused(lambda: caller.forks([*deep, name]))[:2] == (grpc.StatusCode.INVALID_ARGUMENT, ["names"])
        cuts = [cut(each, 0) for each in (*deep, name)]
        assert refused(lambda: caller.truncations(*cuts))[1] == ["truncations"]
        assert len(caller.forks(deep)) == 2
        assert len(caller.truncations(*cuts[:2])) == 2
        caller.delete(*(each.name for each in caller.list().caches))
        deeper = caller.create(layers=16385)  # one may have as many layers as it likes
        assert len(caller.fork(deeper).lengths) == len(caller.truncate(deeper, 0).lengths) == 16385


def test_forks_that_are_gone_take_no_memory_for_those_that_are_left() -> None:
    """A search that goes on with one of many beams, again and again."""
    store = store_of(4, max_caches=1000)
    trunk = store.create(SHAPE, None, 0.0)

    def go_on(steps: int) -> None:
        for _ in range(steps):
            _, *others = store.fork([trunk] * 100, [None] * 100, 0.0, secrets.token_bytes(16), None)
            for other in others:
                store.delete(other)

    go_on(10)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    go_on(50)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(store) == 61
    assert grown < 50 * 20_000, "names of a hundred take 8 KB, and a hundred caches 60"
