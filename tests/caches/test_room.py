"""Room for caches on a real server: a full pool, leases that end, the limit on caches, metrics, draining."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import accuracy
import calls
import grpc
import numpy as np
import pytest
from caller import Caller, Reference, attend_request, result, tokens
from cases import Case
from conftest import Models, Server
from decoders import create_cache
from google.rpc import error_details_pb2

from attnserve import Client, InvalidRequestError, OverloadedError

PAGE, PAGES = 4096, 16
POOL = ("--device", "cpu", "--cache-bytes", str(PAGE * PAGES), "--cache-page-bytes", str(PAGE), "--max-queue-time", "0")
PAGE_TOKENS = 32
"""Of 2 heads, 8 wide, float32."""

StartServer = Callable[..., Server]


def overloaded(error: Any, reason: str) -> tuple[error_details_pb2.ErrorInfo, float]:
    """The ErrorInfo of a RESOURCE_EXHAUSTED, and in how many seconds to retry."""
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    status = calls.status_of(error)
    info = calls.detail(status, error_details_pb2.ErrorInfo)
    assert info.reason == reason
    delay = calls.detail(status, error_details_pb2.RetryInfo).retry_delay
    return info, delay.seconds + delay.nanos * 1e-9


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with `POOL`, for tests that need nothing else of it."""
    server = Server(POOL, tmp_path_factory.mktemp("small") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


@pytest.fixture
def small(small_server: Server) -> Iterator[Server]:
    """The same, with an empty pool, which must be empty again at the end."""
    assert pool_pages(small_server) == [PAGES, 0, 0]
    yield small_server
    with grpc.insecure_channel(small_server.address) as channel:
        caller = Caller(channel)
        if names := [cache.name for cache in caller.list().caches]:
            caller.delete(*names)
    assert pool_pages(small_server) == [PAGES, 0, 0]


def pool_pages(server: Server) -> list[float]:
    """Pages that are free, reserved and used."""
    name = "attnserve_cache_pool_bytes"
    return [calls.metric(server.http_address, name, state=state) / PAGE for state in ("free", "reserved", "used")]


def evictions(server: Server) -> dict[str, float]:
    name = "attnserve_cache_evictions_total"
    return {reason: calls.metric(server.http_address, name, reason=reason) for reason in ("lease", "pages", "caches")}


def test_what_the_whole_pool_could_not_hold_is_an_error_of_its_field(small: Server) -> None:
    key, value = tokens(1, PAGES * PAGE_TOKENS + 1)
    with Client(small.address) as client, client.create_cache(2, 8) as cache:
        for ask in (lambda: cache.append(key, value), lambda: cache.attend(key[:, :1], key, value)):
            with pytest.raises(InvalidRequestError) as caught:
                ask()
            assert (caught.value.field, caught.value.reason) == ("key", "LIMIT_EXCEEDED")
            expected = (
                "key: expected at most 65536 bytes to append, the whole pool of the caches (cache_bytes), found 69632, "
            )
            assert str(caught.value).startswith(f"{expected}in whole pages, for 513 tokens")
        assert cache.append(key[:, :-1], value[:, :-1]) == PAGES * PAGE_TOKENS


def test_what_an_empty_pool_could_hold_lacks_room_whatever_its_cache_has(small: Server) -> None:
    """A last page that is shared would have to be copied; one that is not has room for some of the tokens."""
    key, value = tokens(2, PAGES * PAGE_TOKENS + 1)
    with Client(small.address, retries=0) as client, client.create_cache(2, 8) as cache:
        cache.append(*tokens(1, 1))
        for other in (cache, cache.fork()):
            with pytest.raises(OverloadedError) as full:
                other.append(key[:, :-1], value[:, :-1])
            assert full.value.free_bytes == (PAGES - 1) * PAGE
            with pytest.raises(InvalidRequestError, match="for 513 tokens"):
                other.append(key, value)


def test_what_the_whole_pool_could_not_hold_of_a_decoder_is_an_error_of_its_input(
    models: Models, start_server: StartServer
) -> None:
    layers = ("--layers", str(models.directory / "layers.toml"))
    server = start_server(*layers, "--cache-bytes", str(PAGE), "--cache-page-bytes", str(PAGE))
    with Client(server.address) as client, create_cache(client, "gpt2") as cache:
        with pytest.raises(InvalidRequestError, match=r"^input: expected at most 4096 bytes to append, ") as caught:
            client.apply("gpt2", np.array([1, 2, 3]), cache=cache)
        assert (caught.value.field, caught.value.reason) == ("input", "LIMIT_EXCEEDED")


def test_a_full_pool(small: Server) -> None:
    """The error says how much is free and when to retry, nothing changes, and after a delete there is room."""

    def refused() -> float:
        return calls.metric(small.http_address, "attnserve_rejected_requests_total", reason="cache_bytes")

    before = refused()
    with grpc.insecure_channel(small.address) as channel:
        caller = Caller(channel)
        one, other = caller.create(), caller.create()
        caller.append(one, *tokens(1, 10 * PAGE_TOKENS))
        query = np.ones((1, 2, 1, 8), np.float32)
        appended = tuple(part[None] for part in tokens(2, 7 * PAGE_TOKENS))
        for ask in (
            lambda: caller.append(other, *tokens(2, 7 * PAGE_TOKENS)),
            lambda: caller.attend(attend_request(Case(query, query, query), [other], appended)),  # type: ignore[arg-type]
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            info, delay = overloaded(caught.value, "CACHE_FULL")
            assert int(info.metadata["free_bytes"]) == 6 * PAGE == caller.list().free_bytes
            assert 0 < delay <= 10
            assert list(caller.get(other).lengths) == [0]
        with pytest.raises(grpc.RpcError) as caught:
            caller.append(other, *tokens(2, 17 * PAGE_TOKENS))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, "no waiting would help"  # type: ignore[attr-defined]
        assert refused() - before == 2
        assert caller.append(other, *tokens(2, 6 * PAGE_TOKENS)) == 6 * PAGE_TOKENS
        caller.delete(one)
        assert caller.append(other, *tokens(3, 10 * PAGE_TOKENS)) == 16 * PAGE_TOKENS
        key, value = (
            np.concatenate(parts, axis=1)[None]
            for parts in zip(tokens(2, 6 * PAGE_TOKENS), tokens(3, 10 * PAGE_TOKENS), strict=True)
        )
        case = Case(query, key, value)
        accuracy.check(case, result(caller.attend(attend_request(case, [other]))))


def test_a_full_pool_knows_what_it_has_carried_out(small: Server) -> None:
    """An append whose reply was lost is retried when the pool is full, of it: it is recognised, and not refused."""
    with grpc.insecure_channel(small.address) as channel:
        caller = Caller(channel)
        name, query = caller.create(), np.ones((2, 1, 8), np.float32)
        caller.append(name, *tokens(1, 16 * PAGE_TOKENS - 1))
        last, case = Reference(name, 0, 16 * PAGE_TOKENS - 1), Case(query, query, query)
        caller.attend(attend_request(case, [last], tokens(2, 1)))
        assert pool_pages(small) == [0, 0, 16]
        for again in (
            lambda: caller.attend(attend_request(case, [last], tokens(2, 1))),
            lambda: caller.append(name, *tokens(1, 16 * PAGE_TOKENS - 1), expected_length=0),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                again()
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
            info = calls.detail(calls.status_of(caught.value), error_details_pb2.ErrorInfo)
            assert info.metadata["length"] == str(16 * PAGE_TOKENS)
        with pytest.raises(grpc.RpcError) as caught:
            caller.attend(attend_request(case, [Reference(name, 0, 16 * PAGE_TOKENS)], tokens(2, 1)))
        overloaded(caught.value, "CACHE_FULL")


def test_leases(start_server: StartServer) -> None:
    """A cache whose lease has ended is not found; one that is used stays. Of the expired ones, the first are evicted,
    and no more than needed.
    """
    server = start_server(*POOL)
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        forever, short = caller.create(), caller.create(ttl=0.05)
        assert not caller.get(forever).HasField("ttl")
        assert not caller.get(forever).HasField("remaining")
        calls.until(lambda: not caller.exists(short), "the lease has ended")
        assert evictions(server) == {"lease": 1, "pages": 0, "caches": 0}
        long = caller.create(ttl=1000.5)
        described = caller.get(long)
        assert described.ttl.ToNanoseconds() == 1_000_500_000_000
        calls.until(lambda: caller.get(long).remaining.ToSeconds() < 1000, "asking renews nothing")
        begin = monotonic()
        caller.append(long, *tokens(0, 8 * PAGE_TOKENS))
        remaining = caller.get(long).remaining.ToNanoseconds() * 1e-9
        assert remaining >= 1000.49 - (monotonic() - begin), "its use renews a lease"
        assert caller.fork(long, ttl={"seconds": 7}).ttl.seconds == 7
        assert caller.fork(long).ttl == described.ttl
        first, second = caller.create(ttl=2), caller.create(ttl=2000.0)
        for name in (first, second):
            caller.append(name, *tokens(1, 4 * PAGE_TOKENS))
        assert pool_pages(server) == [0, 0, 16]
        refused = 0

        def has_room() -> bool:
            nonlocal refused
            try:
                caller.append(forever, *tokens(2, 4 * PAGE_TOKENS))
            except grpc.RpcError as error:
                _, delay = overloaded(error, "CACHE_FULL")
                refused += 1
                if delay > 2.5:
                    raise AssertionError(f"the next lease ends in 2 s, not {delay} s") from None
                return False
            return True

        calls.until(has_room, "the lease of the first has ended")
        assert evictions(server) == {"lease": 1, "pages": 1, "caches": 0}
        assert not caller.exists(first)
        assert caller.exists(second)


def test_a_lease_for_those_who_ask_for_none(start_server: StartServer) -> None:
    """Only for those, and for the forks of their caches."""
    server = start_server(*POOL, "--cache-ttl", "90s")
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        unsaid, said = caller.create(), caller.create(ttl=1000.0)
        assert [caller.get(name).ttl.seconds for name in (unsaid, said)] == [90, 1000]
        assert 0 < caller.get(unsaid).remaining.ToSeconds() <= 90
        assert [caller.fork(name).ttl.seconds for name in (unsaid, said)] == [90, 1000]
        assert caller.fork(unsaid, ttl={"seconds": 7}).ttl.seconds == 7


def test_as_many_caches_as_there_may_be(start_server: StartServer) -> None:
    server = start_server(*POOL, "--max-caches", "2")
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        one, _ = caller.create(), caller.create()
        for ask in (caller.create, lambda: caller.fork(one)):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            assert overloaded(caught.value, "OVERLOADED")[1] > 0
        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="caches") == 2
        assert calls.metric(server.http_address, "attnserve_caller_rejected_requests_total", caller="anonymous") == 2
        caller.delete(one)
        short = caller.create(ttl=0.05)

        def is_created() -> bool:
            try:
                caller.create()
            except grpc.RpcError as error:
                overloaded(error, "OVERLOADED")
                return False
            return True

        calls.until(is_created, "the lease of one has ended")
        assert evictions(server)["caches"] == 1
        assert not caller.exists(short)


def test_what_forks_share_counts_once_and_goes_with_the_last(small: Server) -> None:
    with grpc.insecure_channel(small.address) as channel:
        caller = Caller(channel)
        trunk = caller.create()
        caller.append(trunk, *tokens(0, 8 * PAGE_TOKENS + 5))
        forks = [caller.fork(trunk).name for _ in range(4)]
        assert pool_pages(small) == [7, 0, 9]
        assert calls.metric(small.http_address, "attnserve_cache_shared_bytes_saved") == 4 * 9 * PAGE
        assert caller.get(forks[0]).shared_bytes == caller.get(forks[0]).bytes == 9 * PAGE
        caller.append(forks[0], *tokens(1, 1))  # the last page is copied, the others stay shared
        assert pool_pages(small) == [6, 0, 10]
        assert caller.get(forks[0]).shared_bytes == 8 * PAGE
        caller.delete(trunk, *forks[:3])
        assert pool_pages(small) == [7, 0, 9]
        caller.delete(forks[3])
        assert pool_pages(small) == [16, 0, 0]


def test_metrics_tell_what_happened(start_server: StartServer) -> None:
    server = start_server(*POOL)

    def count(name: str) -> float:
        return calls.metric(server.http_address, f"attnserve_{name}")

    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        name = caller.create()
        caller.append(name, *tokens(0, 40))
        fork = caller.fork(name).name
        query = np.ones((2, 1, 8), np.float32)
        caller.attend(attend_request(Case(query, query, query), [fork], tokens(1, 2)))
        caller.truncate(fork, 10)
        with pytest.raises(grpc.RpcError):
            caller.append(fork, *tokens(0, 1), expected_length=11)
        assert [count("caches"), count("cache_tokens")] == [2, 50]
        totals = ("creations", "forks", "appends", "appended_tokens", "truncations", "deletions")
        assert [count(f"cache_{total}_total") for total in totals] == [1, 1, 2, 42, 1, 0]
        caller.delete(name)
        assert [count("caches"), count("cache_deletions_total")] == [1, 1]
        requests = "attnserve_requests_total"
        for operation, code, times in (
            ("append", "OK", 1),
            ("append", "FAILED_PRECONDITION", 1),
            ("fork", "OK", 1),
            ("truncate", "OK", 1),
            ("attend", "OK", 1),
        ):
            assert calls.metric(server.http_address, requests, operation=operation, code=code) == times


def test_steps_that_come_together_cost_what_they_would_one_after_the_other(small: Server) -> None:
    """Each attends to what those before it, in the same message, have appended."""

    def flops() -> float:
        return calls.metric(small.http_address, "attnserve_flops_total")

    before = flops()
    query, steps = np.ones((2, 1, 8), np.float32), 4 * PAGES  # these wait for pages that they fill together
    with grpc.insecure_channel(small.address) as channel:
        caller, stream = Caller(channel), calls.Stream(channel)
        name = caller.create()
        stream.send(
            *(calls.call(n, attend_request(Case(query, query, query), [name], tokens(n, 1))) for n in range(steps))
        )
        replies = {reply.id: reply for reply in stream.replies(steps)}
    assert not [reply.error for reply in replies.values() if reply.HasField("error")]
    assert [list(replies[n].attend.cache_lengths) for n in range(steps)] == [[n + 1] for n in range(steps)]
    one_key = 2 * 2 * (8 + 8)
    assert flops() - before == one_key * sum(range(1, steps + 1))


def test_draining_finishes_what_waits_for_its_turn(start_server: StartServer) -> None:
    """A server told to stop while one operation on a cache runs and others wait for the cache answers them all."""
    server = start_server("--device", "cpu")
    query = np.random.default_rng(99).standard_normal((8, 1024, 64)).astype(np.float32)
    key, value = tokens(0, 1024, 8, 64)
    # About half a second each, since no fast kernel computes float64, and too much for a batch of two.
    long_one = Case(query[:, :1000].astype(np.float64), key, value, {"softcap": 1.0})
    short = query[:, :1]
    with grpc.insecure_channel(server.address) as channel:
        caller, stream = Caller(channel), calls.Stream(channel)
        name = caller.create(8, 64)
        caller.append(name, key, value)
        requests = [attend_request(long_one, [name]) for _ in range(3)]
        requests += [
            attend_request(Case(short, short, short), [Reference(name, 0, 1024 + n)], tokens(9 + n, 1, 8, 64))
            for n in range(3)
        ]
        stream.send(*(calls.call(n, request) for n, request in enumerate(requests)))
        calls.until(
            lambda: calls.metric(server.http_address, "attnserve_in_flight_requests") > 0,
            "all have been admitted: they came in one message",
        )
        server.process.send_signal(signal.SIGTERM)
        replies = {reply.id: reply for reply in stream.rest()}
        assert set(replies) == set(range(len(requests)))
        for n in range(3):
            assert list(replies[n].attend.cache_lengths) == [1024], replies[n].error
        for n in range(3):
            parts = [(key, value), *(tokens(9 + m, 1, 8, 64) for m in range(n + 1))]
            keys, values = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
            accuracy.check(Case(short, keys, values), result(replies[3 + n].attend))
    assert server.stop() == 0, server.stderr()
