"""Lost replies to cache operations: the client finds out what was done, and nothing is done twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from cache_keeper import Keeper, Refusal, attention
from cached import KEYS, QUERY, VALUES, D, H, Transport, address, client, keeper, normal, part, reference, transport
from calls import PATIENCE_S, until

from attnserve import (
    Client,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)

__all__ = ["address", "client", "keeper", "transport"]


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


@pytest.mark.parametrize("losses", [1, 2])
def test_an_append_of_an_expected_length_is_not_doubled_either(client: Any, keeper: Keeper, losses: int) -> None:
    """Nor if the caller asks for it again because it may have run."""
    cache = client.create_cache(H, D)
    keeper.lose = ["Append"] * losses
    assert cache.append(*part(0, 2), expected_length=0) == 2
    with pytest.raises(FailedPreconditionError) as caught:
        cache.append(*part(0, 2), expected_length=0)
    assert (caught.value.actual_length, caught.value.appended) == (2, False)
    assert (cache.length, list(keeper.caches[cache.name].describe().lengths)) == (2, [2])
    np.testing.assert_allclose(cache.attend(QUERY).output, reference(2), atol=1e-6)


@pytest.mark.parametrize("lose", [["Attend"], ["Attend"] * 2, ["Attend"] * 3])
def test_an_attention_that_appends_is_not_doubled(client: Any, keeper: Keeper, lose: list[str]) -> None:
    """The replies lost are that to the append, the refusal of the second append, and that without keys and values."""
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


def test_a_layer_is_applied_until_a_reply_comes(client: Any, keeper: Keeper) -> None:
    """The replies lost are those to the first application, and to the one after the cache was truncated."""
    cache = client.create_cache(1, D, layers=2)

    def lose_one_more(request: Any) -> None:
        keeper.before.clear()
        keeper.lose.append("Apply")

    keeper.before["Truncate"] = lose_one_more
    keeper.lose = ["Apply"]
    input = normal(8, 1, 4, D)
    result = client.apply("decoder", input, cache=cache)
    assert keeper.methods().count("Truncate") == 2
    assert (result.cache_lengths, cache.lengths) == ((4,), (4, 4))
    np.testing.assert_allclose(result.output[0, 0], input[0].sum(0), rtol=1e-5)


@pytest.mark.parametrize("losses", [1, 2])
def test_a_truncation_whose_reply_is_lost(client: Any, keeper: Keeper, losses: int) -> None:
    cache = client.create_cache(H, D, layers=2)
    cache.append(*part(0, 9), layer=1)
    keeper.lose = ["Truncate"] * losses
    cache.truncate(4)
    assert cache.lengths == (0, 4)
    assert cache.append(*part(4, 5), layer=1) == 5


def test_what_makes_a_cache_makes_one_however_often_it_is_sent(client: Any, keeper: Keeper) -> None:
    """A second cache would be one that nobody knows of."""
    keeper.lose = ["Create", "Create", "Fork"]
    cache = client.create_cache(H, D)
    cache.append(*part(0, 3))
    fork = cache.fork()
    assert keeper.methods() == ["Create"] * 3 + ["Append"] + ["Fork"] * 2
    assert fork.lengths == (3,)
    assert {info.name for info in client.caches.list()} == {cache.name, fork.name}
    assert client.create_cache(H, D).name not in {cache.name, fork.name}


def test_what_may_have_been_done_is_refused_rather_than_doubled(client: Any, keeper: Keeper) -> None:
    """The caller's deadline passed, and the append was carried out."""
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
    """The next server on the port has the caches. Calls in flight are retried, and nothing is doubled."""
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


@pytest.mark.parametrize("method", ["Create", "Fork"])
def test_a_cache_whose_making_takes_too_long_is_not_left_behind(client: Any, keeper: Keeper, method: str) -> None:
    """The caller's deadline passed. Nobody knows the name of a cache that is made then."""
    first = client.create_cache(H, D)
    released, given_up = threading.Event(), threading.Event()
    keeper.after[method] = lambda answer, context: released.wait(PATIENCE_S)
    keeper.after["Delete"] = lambda answer, context: given_up.set()
    with pytest.raises(DeadlineExceededError):
        first.fork(timeout=1.0) if method == "Fork" else client.create_cache(H, D, timeout=1.0)
    # The event loop of an AsyncClient runs only during its calls here.
    until(lambda: client.caches.list() and given_up.is_set(), "the server is told")
    released.set()
    assert {info.name for info in client.caches.list()} == {first.name}


def test_a_cache_that_was_made_in_vain_is_not_left_behind(client: Any, keeper: Keeper) -> None:
    """The replies to all attempts are lost."""
    given_up = threading.Event()
    keeper.after["Delete"] = lambda answer, context: given_up.set()
    keeper.lose = ["Create"] * 10
    with pytest.raises(UnavailableError):
        client.create_cache(H, D)
    until(lambda: client.caches.list() is not None and given_up.is_set(), "the server is told")
    assert not keeper.caches


@pytest.mark.parametrize("method", ["Create", "Fork"])
def test_a_cache_that_was_made_before_a_refusal_is_not_left_behind(client: Any, keeper: Keeper, method: str) -> None:
    """The reply is lost, and the server, full by now, refuses the next attempt before it looks at the request id."""
    first = client.create_cache(H, D)
    given_up = threading.Event()

    def refuse(request: Any) -> None:
        if len(keeper.caches) > 1:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)

    keeper.before[method] = refuse
    keeper.after["Delete"] = lambda answer, context: given_up.set()
    keeper.lose = [method]
    with pytest.raises(OverloadedError) as caught:
        first.fork() if method == "Fork" else client.create_cache(H, D)
    assert caught.value.resent
    until(lambda: client.caches.list() is not None and given_up.is_set(), "the server is told")
    assert {info.name for info in client.caches.list()} == {first.name}


@pytest.mark.parametrize("method", ["Create", "Fork"])
def test_a_server_that_has_made_nothing_is_not_told_to_delete_it(client: Any, keeper: Keeper, method: str) -> None:
    """A full server has enough to do."""
    first = client.create_cache(H, D)

    def refuse(request: Any) -> None:
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)

    keeper.before[method] = refuse
    with pytest.raises(OverloadedError):
        first.fork() if method == "Fork" else client.create_cache(H, D)
    first.delete()
    assert keeper.methods() == ["Create", "Delete"]
    assert [list(request.request_ids) for name, request in keeper.asked if name == "Delete"] == [[]]


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_is_none_is_said_to_be_that(client: Any, timeout: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.create_cache(H, D, timeout=timeout)
    assert caught.value.field == "timeout"
