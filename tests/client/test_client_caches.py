"""Caches of both clients, over both transports, against a peer that keeps them: what is sent, what is known of lengths,
and that nothing is appended twice, whatever becomes of replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeAlias

import grpc
import ml_dtypes
import numpy as np
import pytest
from cache_keeper import Keeper, attention
from calls import PATIENCE_S
from peers import good, peer

from attnserve import (
    AsyncCache,
    AsyncClient,
    AttnServeError,
    Cache,
    CacheInfo,
    Client,
    ClientClosedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
    _cli,
)
from attnserve._caches import AsyncCaches
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

Transport: TypeAlias = Literal["stream", "unary"]
Array: TypeAlias = np.ndarray[Any, Any]

H, D = 2, 3


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


KEYS, VALUES = normal(0, 1, H, 20, D), normal(1, 1, H, 20, D)
QUERY = normal(2, 1, H, 1, D)


def part(begin: int, end: int) -> tuple[Array, Array]:
    return KEYS[:, :, begin:end], VALUES[:, :, begin:end]


def reference(length: int, query: Array = QUERY, causal: bool = False) -> Array:
    """The attention to the first tokens of KEYS and VALUES."""
    return attention(query[0], KEYS[0, :, :length], VALUES[0, :, :length], causal)[None]


class Blocking:
    """An AsyncClient, or what it gives, as if it were for threads: one loop runs what is asked, until it is done."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self.target = target
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        return self._call(value) if inspect.ismethod(value) else self._wrapped(value)

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            async def run() -> Any:
                plain = {name: self._bare(value) for name, value in options.items()}
                result = method(*arguments, **plain)
                return await result if inspect.isawaitable(result) else result

            return self._wrapped(self.runner.run(run()))

        return call

    def _bare(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._bare(item) for item in value]
        return value.target if isinstance(value, Blocking) else value

    def _wrapped(self, value: Any) -> Any:
        return Blocking(value, self.runner) if isinstance(value, AsyncCache | AsyncCaches) else value


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def address(keeper: Keeper) -> Iterator[str]:
    with keeper.serve() as address:
        yield address


@pytest.fixture(params=["stream", "unary"])
def transport(request: pytest.FixtureRequest) -> Transport:
    name: Transport = request.param
    return name


@pytest.fixture(params=[Client, AsyncClient], ids=["Client", "AsyncClient"])
def client(request: pytest.FixtureRequest, address: str, transport: Transport) -> Iterator[Any]:
    if request.param is Client:
        with Client(address, transport=transport, timeout=PATIENCE_S) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        async_client = AsyncClient(address, transport=transport, timeout=PATIENCE_S)
        yield Blocking(async_client, runner)
        runner.run(async_client.close())


def test_a_cache_from_its_beginning_to_its_end(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D, ttl=1.5)
    assert (cache.name, cache.length, cache.lengths) == ("cache-0", 0, (0,))
    assert (cache.num_kv_heads, cache.head_dim, cache.value_dim, cache.layers) == (H, D, D, 1)
    assert (cache.dtype, cache.ttl) == ("float32", 1.5)
    assert cache.append(*part(0, 5)) == 5
    assert cache.append(KEYS[0, :, 5:8], VALUES[0, :, 5:8]) == 8
    assert cache.append(KEYS[0, :, 8:9].swapaxes(0, 1), VALUES[0, :, 8:9].swapaxes(0, 1), layout="length_first") == 9
    assert cache.length == 9

    result = cache.attend(QUERY)
    np.testing.assert_allclose(result.output, reference(9), atol=1e-6)
    assert (result.cache_lengths, cache.length) == ((9,), 9)
    queries = normal(3, 1, H, 2, D)
    result = cache.attend(queries, *part(9, 11), causal=True)
    np.testing.assert_allclose(result.output, reference(11, queries, True), atol=1e-6)
    assert (result.cache_lengths, cache.length) == ((11,), 11)

    branch = cache.fork()
    assert (branch.name, branch.length, branch.ttl) == ("cache-1", 11, 1.5)
    branch.append(KEYS[:, :, :4], VALUES[:, :, 4:8])
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(11), atol=1e-6)
    assert (cache.length, branch.length) == (11, 15)
    cache.truncate(7)
    assert cache.length == 7
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(7), atol=1e-6)
    assert cache.info().bytes == 7 * 2 * H * D * 8

    assert [info.name for info in client.caches.list()] == ["cache-0", "cache-1"]
    cache.delete()
    cache.delete()
    client.caches.delete(branch.name)
    assert keeper.caches == {}
    with pytest.raises(NotFoundError):
        cache.attend(QUERY)


def test_layers_have_lengths_of_their_own(client: Any) -> None:
    cache = client.create_cache(H, D, layers=3)
    cache.append(*part(0, 4), layer=1)
    cache.attend(QUERY, *part(0, 6), layer=2)
    assert (cache.length, cache.lengths) == (0, (0, 4, 6))
    np.testing.assert_allclose(cache.attend(QUERY, layer=1).output, reference(4), atol=1e-6)
    cache.truncate(5)
    assert cache.lengths == (0, 4, 5)


def test_many_caches_in_one_call(client: Any) -> None:
    caches = [client.create_cache(H, D, layers=2) for _ in range(3)]
    for number, cache in enumerate(caches):
        cache.append(*part(0, number + 1), layer=1)
    query, key, value = normal(5, 3, H, 1, D), normal(6, 3, H, 1, D), normal(7, 3, H, 1, D)
    result = client.attend(query, key, value, caches=caches, cache_layer=1, causal=True)
    assert result.cache_lengths == (2, 3, 4)
    assert [cache.lengths for cache in caches] == [(0, 2), (0, 3), (0, 4)]
    for number in range(3):
        keys = np.concatenate([KEYS[0, :, : number + 1], key[number]], 1)
        values = np.concatenate([VALUES[0, :, : number + 1], value[number]], 1)
        expected = attention(query[number], keys, values, True)
        np.testing.assert_allclose(result.output[number], expected, atol=1e-6)
    again = client.attend(query, caches=caches, cache_layer=1)
    np.testing.assert_array_equal(again.output, result.output)


def test_a_layer_keeps_its_keys_in_caches(client: Any, keeper: Keeper) -> None:
    caches = [client.create_cache(1, D, layers=2) for _ in range(2)]
    input = normal(8, 2, 4, D)
    result = client.apply("decoder", input, caches=caches, lengths=[4, 2])
    assert (result.cache_lengths, [cache.lengths for cache in caches]) == ((4, 2), [(4, 4), (2, 2)])
    np.testing.assert_allclose(result.output[1, 0], input[1, :2].sum(0), rtol=1e-5)
    result = client.apply("decoder", input[:1, :1], cache=caches[0], causal=True)
    assert caches[0].lengths == (5, 5)
    sent = keeper.asked[-1][1]
    assert (sent.caches[0].name, sent.caches[0].expected_length, sent.caches[0].layer) == ("cache-0", 4, 0)
    assert (sent.causal, sent.alignment) == (True, pb.ALIGNMENT_UNSPECIFIED)


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (False, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (True, (True, pb.ALIGNMENT_UNSPECIFIED)),
        ("top_left", (True, pb.ALIGNMENT_TOP_LEFT)),
        ("bottom_right", (True, pb.ALIGNMENT_BOTTOM_RIGHT)),
    ],
)
def test_what_causal_says_of_a_cache(client: Any, keeper: Keeper, causal: Any, expected: tuple[bool, int]) -> None:
    """Bottom right is what servers make of no alignment: a new token sees all that came before it."""
    cache = client.create_cache(H, D)
    cache.attend(QUERY, *part(0, 3), causal=causal, softcap=30.0)
    sent = keeper.asked[-1][1]
    assert ((sent.causal, sent.alignment), sent.softcap) == (expected, 30.0)
    assert sent.caches[0].expected_length == 0


@pytest.mark.parametrize("dtype", ["bfloat16", np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)])
def test_what_is_created(client: Any, keeper: Keeper, dtype: Any) -> None:
    cache = client.create_cache(num_kv_heads=4, head_dim=64, value_dim=32, layers=2, dtype=dtype, ttl=0.25)
    assert (cache.value_dim, cache.layers, cache.dtype, cache.ttl) == (32, 2, str(dtype), 0.25)
    sent = keeper.asked[-1][1]
    assert (sent.dtype, sent.ttl.ToMilliseconds()) == (tensor_pb2.DataType.Value(f"DATA_TYPE_{dtype}".upper()), 250)
    fork = cache.fork(ttl=9)
    assert (fork.ttl, fork.value_dim, fork.lengths) == (9.0, 32, (0, 0))
    client.create_cache(1, 1)
    assert {field.name for field, _ in keeper.asked[-1][1].ListFields()} == {
        "num_kv_heads",
        "head_dim",
        "layers",
        "dtype",
        "request_id",
    }


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 1.5}, "head_dim"),
        ({"value_dim": -1}, "value_dim"),
        ({"layers": 0}, "layers"),
        ({"dtype": "int64"}, "dtype"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"ttl": 1e300}, "ttl"),
        ({"ttl": "long"}, "ttl"),
    ],
)
def test_what_cannot_be_created(client: Any, keeper: Keeper, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.create_cache(**({"num_kv_heads": H, "head_dim": D} | options))
    assert caught.value.field == field
    assert keeper.asked == []


def test_what_no_cache_takes(client: Any, keeper: Keeper) -> None:
    cache, other = client.create_cache(H, D, layers=2), client.create_cache(H, D)
    again = client.open_cache(cache.name)
    keeper.asked.clear()
    refused: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
        (cache.append, (*part(0, 2),), {"layer": 2}, "layer"),
        (cache.append, (*part(0, 2),), {"layout": "packed"}, "layout"),
        (cache.append, (KEYS[0, 0], VALUES[0, 0]), {}, "key"),
        (cache.append, (KEYS, np.concatenate([VALUES, VALUES])), {}, "value"),
        (cache.append, (KEYS.astype(int), VALUES), {}, "key"),
        (cache.append, part(0, 2), {"timeout": -1}, "timeout"),
        (cache.truncate, (-1,), {}, "length"),
        (cache.attend, (QUERY, KEYS), {}, "value"),
        (cache.attend, (QUERY, None, VALUES), {}, "key"),
        (cache.attend, (QUERY,), {"layer": -1}, "cache_layer"),
        (client.attend, (QUERY,), {}, "key"),
        (client.attend, (QUERY,), {"caches": []}, "caches"),
        (client.attend, (QUERY,), {"caches": [cache, "cache-0"]}, "caches"),
        (client.attend, (QUERY,), {"caches": [cache, again]}, "caches"),
        (client.attend, (QUERY,), {"caches": [cache, other], "cache_layer": 1}, "cache_layer"),
        (client.apply, ("decoder", QUERY), {"cache": cache, "caches": [cache]}, "caches"),
    ]
    for method, arguments, options, field in refused:
        with pytest.raises(InvalidRequestError) as caught:
            method(*arguments, **options)
        assert caught.value.field == field, (arguments, options)
    assert keeper.asked == []
    with pytest.raises(InvalidRequestError):
        cache.truncate(1)  # longer than every layer: the server says so


def test_a_cache_of_another_client(address: str) -> None:
    with Client(address) as one, Client(address) as other:
        cache = one.create_cache(H, D)
        with pytest.raises(InvalidRequestError, match="of this client"):
            other.attend(QUERY, caches=[cache])
        for nowhere in ("", "127.0.0.1:65536", "\ud800:1"):
            with pytest.raises(InvalidRequestError, match="address: expected"):
                other.open_cache(cache.name, address=nowhere)
        opened = other.open_cache(cache.name)
        opened.append(*part(0, 3))
        with pytest.raises(FailedPreconditionError) as caught:
            cache.append(*part(0, 2))
        assert (caught.value.actual_length, caught.value.resent, cache.length) == (3, False, 0)
        assert cache.refresh() == opened.info()
        assert cache.append(*part(3, 5)) == 5


@pytest.mark.parametrize("losses", [1, 2])
def test_an_append_whose_reply_is_lost_is_not_doubled(client: Any, keeper: Keeper, losses: int) -> None:
    cache = client.create_cache(H, D)
    cache.append(*part(0, 2))
    keeper.asked.clear()
    keeper.lose = ["Append"] * losses
    assert cache.append(*part(2, 5)) == 5
    assert keeper.methods() == ["Append"] * (losses + 1)
    assert (cache.length, list(keeper.caches[cache.name].describe().lengths)) == (5, [5])
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(5), atol=1e-6)


@pytest.mark.parametrize("lose", [["Attend"], ["Attend"] * 2, ["Attend"] * 3])
def test_an_attention_that_appends_is_not_doubled(client: Any, keeper: Keeper, lose: list[str]) -> None:
    """Lost are the reply to the append, the refusal of the second append, and the reply without keys and values."""
    caches = [client.create_cache(H, D) for _ in range(2)]
    caches[0].append(*part(0, 4))
    query, key, value = normal(5, 2, H, 2, D), normal(6, 2, H, 2, D), normal(7, 2, H, 2, D)
    keeper.asked.clear()
    keeper.lose = list(lose)
    result = client.attend(query, key, value, caches=caches, causal=True)
    sent = [request for _, request in keeper.asked]
    assert [request.HasField("key") for request in sent[:2]] == [True, True]
    assert [reference.expected_length for reference in sent[-1].caches] == [6, 2]
    assert not sent[-1].HasField("key")
    assert not sent[-1].HasField("value")
    assert (result.cache_lengths, [cache.length for cache in caches]) == ((6, 2), [6, 2])
    keys, values = np.concatenate([KEYS[0, :, :4], key[0]], 1), np.concatenate([VALUES[0, :, :4], value[0]], 1)
    np.testing.assert_allclose(result.output[0], attention(query[0], keys, values, True), atol=1e-6)
    np.testing.assert_allclose(result.output[1], attention(query[1], key[1], value[1], True), atol=1e-6)


def test_an_attention_that_reads_is_asked_for_again(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D)
    cache.append(*part(0, 4))
    keeper.lose = ["Attend"]
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(4), atol=1e-6)


@pytest.mark.parametrize("lose", [["Apply"], ["Apply", "Apply"], ["Apply", "Truncate"]])
def test_a_layer_is_applied_again_from_where_its_caches_were(client: Any, keeper: Keeper, lose: list[str]) -> None:
    caches = [client.create_cache(1, D, layers=2) for _ in range(2)]
    input = normal(8, 2, 4, D)
    first = client.apply("decoder", input, caches=caches, lengths=[4, 0])
    keeper.lose = list(lose)
    result = client.apply("decoder", input, caches=caches, lengths=[0, 3])
    assert (result.cache_lengths, [cache.lengths for cache in caches]) == ((4, 3), [(4, 4), (3, 3)])
    assert [list(kept.describe().lengths) for kept in keeper.caches.values()] == [[4, 4], [3, 3]]
    np.testing.assert_array_equal(result.output[0], first.output[0])
    np.testing.assert_allclose(result.output[1, 0], input[1, :3].sum(0), rtol=1e-5)


@pytest.mark.parametrize("losses", [1, 2])
def test_a_truncation_whose_reply_is_lost(client: Any, keeper: Keeper, losses: int) -> None:
    cache = client.create_cache(H, D, layers=2)
    cache.append(*part(0, 9), layer=1)
    keeper.lose = ["Truncate"] * losses
    cache.truncate(4)
    assert cache.lengths == (0, 4)
    assert cache.append(*part(4, 5), layer=1) == 5


def test_another_ones_append_is_not_taken_for_ours(client: Any, keeper: Keeper) -> None:
    """Ours was lost before it was carried out, and the cache is longer, but not by as much as ours would make it."""
    cache = client.create_cache(H, D)

    def somebody_else(request: Any) -> None:
        keeper.before.clear()
        keeper.caches[cache.name].append(0, KEYS[0, :, :2], VALUES[0, :, :2])

    keeper.before["Append"] = keeper.before["Attend"] = somebody_else
    keeper.lose = ["Append"]
    with pytest.raises(FailedPreconditionError) as caught:
        cache.append(*part(0, 3))
    assert (caught.value.actual_length, caught.value.resent, cache.length) == (2, True, 0)
    cache.refresh()
    assert cache.length == 2


def test_an_equal_length_on_the_first_try_is_no_success(client: Any, keeper: Keeper) -> None:
    """Somebody else has appended as many tokens. Ours are not there."""
    cache = client.create_cache(H, D)
    keeper.caches[cache.name].append(0, KEYS[0, :, :3], VALUES[0, :, :3])
    for operation in (cache.append, lambda key, value: cache.attend(QUERY, key, value)):
        with pytest.raises(FailedPreconditionError) as caught:
            operation(*part(5, 8))
        assert (caught.value.actual_length, caught.value.resent) == (3, False)
    assert (cache.length, keeper.methods()[1:]) == (0, ["Append", "Attend"])


def test_what_makes_a_cache_makes_one_however_often_it_is_sent(client: Any, keeper: Keeper) -> None:
    """A second one would be a cache that nobody knows of."""
    keeper.lose = ["Create", "Create", "Fork"]
    cache = client.create_cache(H, D)
    cache.append(*part(0, 3))
    fork = cache.fork()
    assert keeper.methods() == ["Create"] * 3 + ["Append"] + ["Fork"] * 2
    assert fork.lengths == (3,)
    assert {info.name for info in client.caches.list()} == {cache.name, fork.name}
    assert client.create_cache(H, D).name not in {cache.name, fork.name}


def test_what_may_have_been_done_is_refused_rather_than_doubled(client: Any, keeper: Keeper) -> None:
    """The caller's time ran out, and the append came through."""
    cache = client.create_cache(H, D)
    released, done = threading.Event(), threading.Event()
    keeper.before["Append"] = lambda request: released.wait(PATIENCE_S)
    keeper.after["Append"] = lambda answer, context: done.set()
    with pytest.raises(DeadlineExceededError):
        cache.append(*part(0, 3), timeout=1.0)
    assert cache.length == 0
    released.set()
    assert done.wait(PATIENCE_S)
    with pytest.raises(FailedPreconditionError) as caught:
        cache.append(*part(0, 3))
    assert caught.value.actual_length == 3
    assert cache.refresh().lengths == cache.lengths == (3,)


@pytest.mark.parametrize("query", [None, QUERY], ids=["append", "attend"])
def test_a_server_that_is_killed_between_append_and_reply(keeper: Keeper, transport: Transport, query: Any) -> None:
    """The next server on the port has the caches. What was in flight is sent again, and nothing is doubled."""
    appended = threading.Event()

    def hang(answer: Any, context: grpc.ServicerContext) -> None:
        ended = threading.Event()
        if context.add_callback(ended.set):
            appended.set()
            ended.wait(PATIENCE_S)

    with contextlib.ExitStack() as first, ThreadPoolExecutor(1) as threads:
        address = first.enter_context(keeper.serve())
        with Client(address, transport=transport, retries=8) as client:
            cache = client.create_cache(H, D)
            assert cache.append(*part(0, 1)) == 1
            keeper.after["Append"] = keeper.after["Attend"] = hang
            operation: Callable[..., Any] = cache.append if query is None else partial(cache.attend, query)
            future = threads.submit(operation, *part(1, 4))
            assert appended.wait(PATIENCE_S)
            keeper.after.clear()
            first.close()
            with keeper.serve(int(address.rpartition(":")[2])):
                result = future.result()
                assert cache.length == 4
                if query is not None:
                    np.testing.assert_allclose(result.output, reference(4), atol=1e-6)
                assert cache.append(*part(4, 6)) == 6
                np.testing.assert_allclose(cache.attend(QUERY).output, reference(6), atol=1e-6)


def test_threads_append_to_one_cache_in_some_order(address: str, keeper: Keeper, transport: Transport) -> None:
    with Client(address, transport=transport) as client, ThreadPoolExecutor(8) as threads:
        cache = client.create_cache(H, D)
        other = client.create_cache(H, D)

        def append(number: int) -> int:
            if number % 3:
                return cache.append(*part(0, number % 4 + 1))
            caches = [cache, other] if number % 2 else [other, cache]
            keys = [np.concatenate([tensor, tensor]) for tensor in part(0, 1)]
            result = client.attend(normal(9, 2, H, 1, D), *keys, caches=caches)
            return result.cache_lengths[caches.index(cache)]

        lengths = list(threads.map(append, range(60)))
    assert len(set(lengths)) == 60  # each saw a length of its own: none was refused, none was doubled
    assert max(lengths) == cache.length == sum(number % 4 + 1 if number % 3 else 1 for number in range(60))
    assert other.length == 20
    assert "FAILED_PRECONDITION" not in str(keeper.asked)


def test_what_is_submitted_takes_effect_in_its_order(address: str, transport: Transport) -> None:
    with Client(address, transport=transport) as client:
        cache = client.create_cache(H, D)
        futures = [client.submit(QUERY, *part(step, step + 1), caches=cache) for step in range(20)]
        for step, future in enumerate(futures):
            assert future.result().cache_lengths == (step + 1,)
            np.testing.assert_allclose(future.result().output, reference(step + 1), atol=1e-6)


async def test_tasks_append_to_one_cache_in_their_order(address: str, transport: Transport) -> None:
    async with AsyncClient(address, transport=transport) as client, await client.create_cache(H, D) as cache:
        lengths = await asyncio.gather(*(cache.append(*part(step, step + 1)) for step in range(20)))
        assert lengths == list(range(1, 21))
        np.testing.assert_allclose((await cache.attend(QUERY)).output, reference(20), atol=1e-6)
        assert len(await client.caches.list()) == 1
    assert cache.length == 20


def test_queries_of_a_resident_memory_run_side_by_side(address: str, keeper: Keeper, transport: Transport) -> None:
    """The peer answers none of two before both are there; over a stream it reads one after the other."""
    with Client(address, transport=transport, streams=2) as client, ThreadPoolExecutor(2) as threads:
        cache = client.create_cache(H, D)
        cache.append(*part(0, 5))
        both = threading.Barrier(2)
        keeper.before["Attend"] = lambda request: both.wait(PATIENCE_S)
        for result in threads.map(cache.attend, [QUERY] * 2):
            np.testing.assert_allclose(result.output, reference(5), atol=1e-6)


def test_different_caches_do_not_wait_for_each_other(address: str, keeper: Keeper) -> None:
    with Client(address) as client, ThreadPoolExecutor(2) as threads:
        caches = [client.create_cache(H, D) for _ in range(2)]
        both = threading.Barrier(2)
        keeper.before["Append"] = lambda request: both.wait(PATIENCE_S)
        assert list(threads.map(lambda cache: cache.append(*part(0, 5)), caches)) == [5, 5]


def test_what_waits_for_its_turn_does_not_wait_beyond_its_timeout(address: str, keeper: Keeper) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        arrived.set()
        released.wait(PATIENCE_S)

    keeper.before["Append"] = hold
    with Client(address) as client, ThreadPoolExecutor(1) as threads:
        cache = client.create_cache(H, D)
        slow = threads.submit(cache.append, *part(0, 4), timeout=None)
        assert arrived.wait(PATIENCE_S)
        waiting = [client.submit(QUERY, caches=cache, timeout=timeout) for timeout in (0.3, 0.1, PATIENCE_S, None)]
        for future in waiting[:2]:
            with pytest.raises(DeadlineExceededError):
                future.result(PATIENCE_S)
        assert waiting[3].cancel()
        assert not waiting[2].done()
        released.set()
        np.testing.assert_allclose(waiting[2].result().output, reference(4), atol=1e-6)
        assert slow.result() == cache.append(*part(0, 1)) - 1 == 4
    assert keeper.methods() == ["Create", "Append", "Attend", "Append"]


async def test_a_task_that_is_cancelled_lets_go_of_its_turn(address: str, keeper: Keeper) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(request: Any) -> None:
        arrived.set()
        released.wait(PATIENCE_S)

    keeper.before["Attend"] = hold
    async with AsyncClient(address, transport="unary") as client:
        cache = await client.create_cache(H, D)
        stuck = asyncio.create_task(cache.attend(QUERY, *part(0, 3)))
        await asyncio.to_thread(arrived.wait, PATIENCE_S)
        waiting = asyncio.create_task(cache.append(*part(0, 3)))
        too_late = asyncio.create_task(cache.append(*part(0, 3), timeout=0.1))
        with pytest.raises(DeadlineExceededError):
            await too_late
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert await waiting == 3
        released.set()


def test_a_client_that_is_closed_lets_go_of_all_that_waits(address: str, keeper: Keeper) -> None:
    """More than a stack is deep."""
    released = threading.Event()
    keeper.before["Attend"] = lambda request: released.wait(PATIENCE_S)
    client = Client(address)
    cache = client.create_cache(H, D)
    futures = [client.submit(QUERY, *part(0, 1), caches=cache) for _ in range(3000)]
    client.close()
    released.set()
    assert {type(future.exception(PATIENCE_S)) for future in futures} == {ClientClosedError}
    with pytest.raises(ClientClosedError):
        cache.append(*part(0, 1))


def test_leaving_a_cache_deletes_it(address: str, keeper: Keeper) -> None:
    with Client(address) as client:
        with client.create_cache(H, D) as cache:
            assert list(keeper.caches) == [cache.name]
        assert keeper.caches == {}
        keeper.lose = ["Delete"] * 10
        with pytest.raises(UnavailableError), client.create_cache(H, D):
            pass
        keeper.lose = ["Delete"] * 10
        with pytest.raises(ZeroDivisionError), client.create_cache(H, D):
            raise ZeroDivisionError
        assert keeper.methods()[-4:] == ["Delete"] * 4


def test_a_cache_keeps_its_client(address: str) -> None:
    cache = Client(address).create_cache(H, D)
    gc.collect()
    assert isinstance(cache, Cache)
    assert cache.append(*part(0, 2)) == 2
    assert cache.bytes == 2 * 2 * H * D * 8


def test_a_future_that_is_done_keeps_no_client(address: str) -> None:
    client = Client(address)
    cache = client.create_cache(H, D)
    done, cancelled = client.submit(QUERY, *part(0, 1), caches=cache), client.submit(QUERY, caches=cache)
    cancelled.cancel()
    assert done.result().cache_lengths == (1,)
    gone = threading.Event()
    watch = weakref.ref(client, lambda _: gone.set())
    del client, cache
    while not gone.wait(0.05):  # what has delivered the result may hold it for a moment
        gc.collect()
    assert watch() is None


def test_nonsense(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D)
    keeper.after["Attend"] = lambda answer, context: answer.ClearField("cache_lengths")
    with pytest.raises(ProtocolError, match="0 lengths"):
        cache.attend(QUERY, *part(0, 2))
    keeper.caches[cache.name].info.layers = 2
    with pytest.raises(ProtocolError, match="of no layers"):
        cache.refresh()


def test_a_peer_without_caches() -> None:
    with peer(good) as address, Client(address) as client:
        with pytest.raises(AttnServeError) as caught:
            client.create_cache(H, D)
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        assert client.attend(QUERY, QUERY, QUERY).cache_lengths == ()


def test_the_command_lists_caches(address: str, keeper: Keeper, capsys: pytest.CaptureFixture[str]) -> None:
    assert _cli.main(["caches", address]) == 0
    assert capsys.readouterr().out == "no caches are open; 1,000 of 1,048,576 bytes are free\n"
    with Client(address) as client:
        client.create_cache(8, 64, value_dim=32, layers=4, dtype="bfloat16", ttl=600)
        client.create_cache(H, D).append(*part(0, 20))
    assert _cli.main(["caches", address]) == 0
    title, first, second, room = capsys.readouterr().out.splitlines()
    assert title.split() == ["name", "dtype", "heads", "layers", "tokens", "bytes", "shared", "ttl", "left"]
    assert first.split() == ["cache-0", "bfloat16", "8", "×", "64/32", "4", "0", "0", "0", "600", "s", "600", "s"]
    assert second.split() == ["cache-1", "float32", "2", "×", "3", "1", "20", "1,920", "0"]
    assert room == "1,000 of 1,048,576 bytes are free"
    assert _cli.main(["caches", address, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["bytes"], answer["free_bytes"]) == (1 << 20, 1000)
    fields = {field.name for field in dataclasses.fields(CacheInfo)}
    assert [set(cache) for cache in answer["caches"]] == [fields] * 2
    assert answer["caches"][1]["lengths"] == [20]
    assert (answer["caches"][0]["ttl"], answer["caches"][1]["ttl"]) == (600.0, None)
