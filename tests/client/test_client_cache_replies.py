"""Replies about caches that cannot be true: callers get an error that says so, and the SDK takes over none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from cache_keeper import Keeper, Refusal
from cached import QUERY, D, H, address, client, keeper, normal, part, transport
from google.protobuf.duration_pb2 import Duration

from attnserve import Client, FailedPreconditionError, OverloadedError, ProtocolError
from attnserve.v1 import caches_pb2 as pb

__all__ = ["address", "client", "keeper", "transport"]


def changes(change: Callable[[Any], object]) -> Callable[[Any, grpc.ServicerContext], object]:
    """Changes a reply before it is sent."""
    return lambda answer, context: change(answer)


def told(answer: Any) -> pb.Cache:
    """The cache that a reply describes, or the first of them."""
    cache: pb.Cache = answer.cache if hasattr(answer, "cache") else answer.caches[0]
    return cache


@pytest.mark.parametrize("length", [0, 2, 4, 2**64 - 1])
def test_an_append_after_which_a_layer_has_another_length(client: Any, keeper: Keeper, length: int) -> None:
    """Zero is what an empty message says."""
    cache = client.create_cache(H, D)
    cache.append(*part(0, 2))
    keeper.after["Append"] = changes(lambda answer: setattr(answer, "length", length))
    with pytest.raises(ProtocolError, match=rf"^length: expected 3, the server replied with {length}$"):
        cache.append(*part(2, 3))
    assert cache.length == 2
    del keeper.after["Append"]
    with pytest.raises(FailedPreconditionError) as caught:  # it was carried out, whatever the reply said
        cache.append(*part(2, 3))
    assert caught.value.actual_length == 3
    cache.refresh()
    assert cache.append(*part(3, 4)) == 4


def test_an_attention_after_which_a_cache_has_another_length(client: Any, keeper: Keeper) -> None:
    caches = [client.create_cache(H, D) for _ in range(2)]
    caches[0].append(*part(0, 2))
    query, key, value = normal(0, 2, H, 1, D), normal(1, 2, H, 1, D), normal(2, 2, H, 1, D)

    def shorten(answer: Any) -> None:
        answer.cache_lengths[1] -= 1

    keeper.after["Attend"] = changes(shorten)
    with pytest.raises(ProtocolError, match=r"^cache_lengths: expected 1, the server replied with 0$"):
        client.attend(query, key, value, caches=caches)
    assert [cache.length for cache in caches] == [2, 0]


def test_an_attention_that_reads_a_cache_of_another_length(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D)
    cache.append(*part(0, 2))

    def lengthen(answer: Any) -> None:
        answer.cache_lengths[0] = 7

    keeper.after["Attend"] = changes(lengthen)
    with pytest.raises(ProtocolError, match=r"^cache_lengths: expected 2, the server replied with 7$"):
        cache.attend(QUERY)
    assert cache.length == 2


def test_a_layer_after_which_a_cache_has_another_length(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(1, D, layers=2)

    def lengthen(answer: Any) -> None:
        answer.cache_lengths[0] += 1

    keeper.after["Apply"] = changes(lengthen)
    with pytest.raises(ProtocolError, match=r"^cache_lengths: expected 4, the server replied with 5$"):
        client.apply("decoder", normal(8, 1, 4, D), cache=cache)
    assert cache.lengths == (0, 0)


OTHERS: dict[str, tuple[object, str]] = {
    "name": ("", "one without a name"),
    "num_kv_heads": (H + 1, f"num_kv_heads: expected {H}, the server replied with {H + 1}"),
    "head_dim": (D + 1, f"head_dim: expected {D}, the server replied with {D + 1}"),
    "value_dim": (0, f"value_dim: expected {D}, the server replied with 0"),
    "dtype": (99, r"dtype: expected 'float32', the server replied with 'unknown \(99\)'"),
    "layers": (2, "of no layers"),
}
"""Values that a cache of this shape does not have, and what is said of them."""


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.parametrize("method", ["Create", "Fork", "Truncate", "Get"])
def test_the_description_of_another_cache(client: Any, keeper: Keeper, method: str, field: str) -> None:
    cache = client.create_cache(H, D)
    cache.append(*part(0, 2))
    value, said = OTHERS[field]
    keeper.after[method] = changes(lambda answer: setattr(told(answer), field, value))
    asks = {
        "Create": [lambda: client.create_cache(H, D)],
        "Fork": [cache.fork],
        "Truncate": [lambda: cache.truncate(1)],
        "Get": [cache.info, cache.refresh],
    }
    for ask in asks[method]:
        with pytest.raises(ProtocolError, match=said):
            ask()
    assert cache.length == 2


def test_a_cache_of_another_name(client: Any, keeper: Keeper) -> None:
    """The names are shown in part."""
    cache = client.create_cache(H, D)
    for method in ("Get", "Truncate"):
        keeper.after[method] = changes(lambda answer: setattr(told(answer), "name", "another"))
    asks: list[Callable[[], object]] = [cache.info, cache.refresh, lambda: cache.truncate(0)]
    asks += [lambda: client.open_cache(cache.name), lambda: client.caches.get(cache.name)]
    for ask in asks:
        with pytest.raises(ProtocolError, match=r"^name: expected 'cach…', the server replied with 'anot…'$"):
            ask()


def test_a_cache_with_more_layers(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D)

    def widen(answer: Any) -> None:
        told(answer).layers += 1
        told(answer).lengths.append(0)

    for method in ("Create", "Fork", "Truncate", "Get"):
        keeper.after[method] = changes(widen)
    asks: list[Callable[[], object]] = [cache.info, cache.refresh, lambda: cache.truncate(0), cache.fork]
    for ask in [*asks, lambda: client.create_cache(H, D)]:
        with pytest.raises(ProtocolError, match=r"^layers: expected 1, the server replied with 2$"):
            ask()
    assert cache.lengths == (0,)


def test_a_fork_that_is_the_cache_itself(client: Any, keeper: Keeper) -> None:
    cache = client.create_cache(H, D)
    keeper.after["Fork"] = changes(lambda answer: setattr(answer.caches[0], "name", cache.name))
    with pytest.raises(ProtocolError, match=r"^name: expected that of another cache, .* with that of a forked one or "):
        cache.fork()


def test_forks_that_are_the_same_cache(client: Any, keeper: Keeper) -> None:
    caches = [client.create_cache(H, D) for _ in range(2)]
    keeper.after["Fork"] = changes(lambda answer: setattr(answer.caches[1], "name", answer.caches[0].name))
    with pytest.raises(ProtocolError, match=r"a forked one or of an earlier fork$"):
        client.caches.fork(caches)


@pytest.mark.parametrize("method", ["Fork", "Truncate"])
@pytest.mark.parametrize("found", [0, 1, 3])
def test_another_number_of_caches(client: Any, keeper: Keeper, method: str, found: int) -> None:
    caches = [client.create_cache(H, D) for _ in range(2)]
    caches[0].append(*part(0, 2))

    def change(answer: Any) -> None:
        told = [*answer.caches, *answer.caches]
        del answer.caches[:]
        answer.caches.extend(told[:found])

    keeper.after[method] = changes(change)
    with pytest.raises(ProtocolError, match=rf"^caches: expected 2, the server replied with {found}$"):
        client.caches.fork(caches) if method == "Fork" else client.caches.truncate(caches, 0)
    assert [cache.length for cache in caches] == [2, 0]


@pytest.mark.parametrize("length", [0, 2])
def test_a_truncation_after_which_the_longest_layer_has_another_length(
    client: Any, keeper: Keeper, length: int
) -> None:
    cache = client.create_cache(H, D, layers=2)
    cache.append(*part(0, 2))

    def lengthen(answer: Any) -> None:
        answer.caches[0].lengths[0] = length

    keeper.after["Truncate"] = changes(lengthen)
    with pytest.raises(
        ProtocolError, match=rf"^lengths: expected the longest to be 1, the server replied with \[{length}, 0\]$"
    ):
        cache.truncate(1)
    assert cache.lengths == (2, 0)


def test_a_new_cache_that_is_not_empty(client: Any, keeper: Keeper) -> None:
    """The client gives it up, as one that it did not get."""

    def fill(answer: Any) -> None:
        answer.cache.lengths[0] = 2**64 - 1

    keeper.after["Create"] = changes(fill)
    with pytest.raises(ProtocolError, match=r"^lengths: expected the longest to be 0, "):
        client.create_cache(H, D)


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda cache: cache.Clear(),
        lambda cache: cache.ClearField("name"),
        lambda cache: cache.ClearField("lengths"),
        lambda cache: cache.lengths.append(1),
    ],
    ids=["nothing", "no name", "no lengths", "too many lengths"],
)
def test_a_list_with_what_is_no_cache(client: Any, keeper: Keeper, nonsense: Callable[[Any], object]) -> None:
    for _ in range(2):
        client.create_cache(H, D)
    keeper.after["List"] = changes(lambda answer: nonsense(answer.caches[1]))
    for ask in (client.caches.list, client.caches.pool):
        with pytest.raises(ProtocolError, match="the server replied with no cache"):
            ask()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ttl", Duration(seconds=-1), "ttl: expected no less than 0 seconds, the server replied with -1"),
        ("remaining", Duration(nanos=-500_000_000), "remaining: expected no less than 0 seconds, .* with -0.5"),
        ("shared_bytes", 2**64 - 1, f"shared_bytes: expected at most 0, the server replied with {2**64 - 1}"),
    ],
)
def test_a_cache_with_less_than_nothing(client: Any, keeper: Keeper, field: str, value: Any, said: str) -> None:
    cache = client.create_cache(H, D)
    keeper.after["Get"] = changes(lambda answer: answer.cache.MergeFrom(pb.Cache(**{field: value})))
    keeper.after["List"] = changes(lambda answer: answer.caches[0].MergeFrom(pb.Cache(**{field: value})))
    for ask in (cache.info, cache.refresh, client.caches.list):
        with pytest.raises(ProtocolError, match=f"^{said}$"):
            ask()


def test_a_pool_with_more_room_than_it_has(client: Any, keeper: Keeper) -> None:
    keeper.after["List"] = changes(lambda answer: setattr(answer, "free_bytes", answer.pool_bytes + 1))
    with pytest.raises(ProtocolError, match=r"^free_bytes: expected at most \d+, the server replied with \d+$"):
        client.caches.pool()


NO_NUMBERS = ["9" * 5000, "9" * 20, "", "-1", "+1", " 1", "1 ", "1\n", "1_0", "01", "1.0", "1e3", "0x1", "٣", "¹"]


def test_numbers_of_errors_that_no_server_writes(address: str, keeper: Keeper) -> None:
    """Python reads some of them, and refuses one that is too long to be converted quickly."""

    def refuse(code: grpc.StatusCode, key: str, number: str) -> Callable[[Any], object]:
        def method(request: Any) -> None:
            raise Refusal(code, **{key: number})

        return method

    with Client(address, retries=0) as client:
        cache = client.create_cache(H, D)
        for number in NO_NUMBERS:
            keeper.before["Append"] = refuse(grpc.StatusCode.FAILED_PRECONDITION, "length", number)
            with pytest.raises(FailedPreconditionError) as unexpected:
                cache.append(*part(0, 1))
            assert unexpected.value.actual_length is None, number
            keeper.before["Attend"] = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "free_bytes", number)
            with pytest.raises(OverloadedError) as full:
                cache.attend(QUERY)
            assert full.value.free_bytes is None, number
