"""Aliases: a caller's own names of caches, by which any of its processes finds them."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from cached_cases import caller
from caller import Caller, tokens
from stores import SHAPE, store_of

from attnserve_server.errors import InvalidRequest

__all__ = ["caller"]


def test_an_alias_finds_the_cache_that_it_was_given_to(caller: Caller) -> None:
    name = caller.create(alias="user:42", ttl=60)
    caller.append(name, *tokens(0, 5))
    assert caller.create(alias="user:42", ttl=7) == name
    other = caller.create(alias="ユーザー:43")
    listed = {cache.name: cache for cache in caller.list().caches}
    assert (listed[name].alias, list(listed[name].lengths), listed[name].ttl.seconds) == ("user:42", [5], 60)
    assert (listed[other].alias, list(listed[other].lengths)) == ("ユーザー:43", [0])
    fork = caller.fork(name)
    assert (caller.get(name).alias, fork.alias) == ("user:42", ""), "an alias is one cache's"
    assert caller.create(alias="user:42") == name
    caller.delete(name, other)
    assert caller.create(alias="user:42") not in {name, other, fork.name}


def test_a_wrong_alias_is_an_error(caller: Caller) -> None:
    caller.create(alias="wide")
    for fields, said in (
        ({"alias": "wide", "width": 16}, "alias: expected that of a cache with head_dim 16, value_dim 16, found that"),
        ({"alias": "é" * 129}, "alias: expected at most 256 bytes, found 258"),
        ({"alias": "wide", "request_id": b"1"}, "request_id: expected none beside an alias, found 1 bytes"),
    ):
        with pytest.raises(grpc.RpcError, match=said) as caught:
            caller.create(**fields)  # type: ignore[arg-type]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert caller.create(alias="é" * 128)


def test_an_alias_is_its_owners() -> None:
    store = store_of(4)
    made = {owner: store.create(SHAPE, None, 0.0, owner, alias="it") for owner in ("me", "you", None)}
    assert len(set(made.values())) == 3
    for owner, cache in made.items():
        assert store.create(SHAPE, None, 1.0, owner, alias="it") is cache
    assert store.counts.created == 3
    with pytest.raises(InvalidRequest, match="alias"):
        store.create(replace(SHAPE, layers=2), None, 1.0, "me", alias="it")


def test_finding_a_cache_by_its_alias_renews_its_lease() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, 10.0, 0.0, alias="it")
    assert store.create(SHAPE, 1.0, 9.0, alias="it") is cache
    assert store.create(SHAPE, 1.0, 18.0, alias="it") is cache
    successor = store.create(SHAPE, 1.0, 28.0, alias="it")
    assert (cache.gone, store.counts.evictions["lease"], successor.ttl) == (True, 1, 1.0)
    assert store.create(SHAPE, 1.0, 28.5, alias="it") is successor


def test_a_cache_in_use_is_found_after_its_lease() -> None:
    store = store_of(4)
    cache = store.create(SHAPE, 10.0, 0.0, alias="it")
    store.hold(cache, 0.0)
    assert store.create(SHAPE, 10.0, 99.0, alias="it") is cache


def test_what_was_found_by_its_alias_takes_no_place() -> None:
    store = store_of(4, 1)
    cache = store.create(SHAPE, None, 0.0, alias="it")
    assert store.create(SHAPE, None, 0.0, alias="it") is cache
    store.delete(cache)
    assert store.create(SHAPE, None, 0.0, alias="it") is not cache
