"""Caches that others change too, or that an operation which was given up has changed: nothing of that is taken for what
was asked for, and nothing of ours is doubled.
"""

from __future__ import annotations

import threading
from typing import Any

import grpc
import numpy as np
import pytest
from cache_keeper import Keeper, LostReply, Refusal
from cached import KEYS, QUERY, VALUES, D, H, address, client, keeper, normal, part, transport
from calls import PATIENCE_S

from attnserve import (
    DeadlineExceededError,
    FailedPreconditionError,
)
from attnserve._caching import groups

__all__ = ["address", "client", "keeper", "transport"]


def test_a_truncation_that_is_sent_again_cuts_off_nothing_of_others(client: Any, keeper: Keeper) -> None:
    """Ours was carried out and its reply lost; then another client appended as much as we had cut off."""
    cache = client.create_cache(H, D)
    cache.append(*part(0, 4))
    theirs = KEYS[0, :, 5:7]

    def somebody_else(request: Any) -> None:
        if keeper.methods().count("Truncate"):
            keeper.caches[cache.name].append(0, theirs, theirs)

    keeper.before["Truncate"] = somebody_else
    keeper.lose = ["Truncate"]
    cache.truncate(2)
    assert cache.length == 2, "as it was then"
    np.testing.assert_array_equal(keeper.caches[cache.name].layers[0][0][:, 2:], theirs)
    with pytest.raises(FailedPreconditionError) as caught:
        cache.append(*part(2, 3))
    assert (caught.value.actual_length, caught.value.truncated) == (4, False)


def test_another_ones_truncation_is_not_taken_for_ours(client: Any, keeper: Keeper) -> None:
    """Ours was lost before it was carried out, and the cache is as long as ours would leave it."""
    cache = client.create_cache(H, D)
    cache.append(*part(0, 4))

    def somebody_else(request: Any) -> None:
        kept = keeper.caches[cache.name]
        kept.layers = [(key[:, :2], value[:, :2]) for key, value in kept.layers]

    keeper.before["Truncate"] = somebody_else
    keeper.lose = ["Truncate"]
    with pytest.raises(FailedPreconditionError) as caught:
        cache.truncate(2)
    assert (caught.value.actual_length, caught.value.truncated) == (2, False)


@pytest.mark.parametrize("theirs", [2, 3])
@pytest.mark.parametrize("method", ["Append", "Attend", "Apply"])
def test_another_ones_append_is_not_taken_for_ours(client: Any, keeper: Keeper, method: str, theirs: int) -> None:
    """Ours was lost before it was carried out, and the cache is longer, perhaps by as much as ours would make it."""
    cache = client.create_cache(*((1, D) if method == "Apply" else (H, D)))
    keys = KEYS[0, : cache.num_kv_heads, :theirs]

    def somebody_else(request: Any) -> None:
        keeper.before.clear()
        keeper.caches[cache.name].append(0, keys, keys, append_id=1 << 63)

    keeper.before[method] = somebody_else
    keeper.lose = [method]
    with pytest.raises(FailedPreconditionError) as caught:
        _three_tokens(client, cache, method)
    error = caught.value
    assert (error.actual_length, error.resent, error.appended, cache.length) == (theirs, True, False, 0)
    assert keeper.caches[cache.name].layers[0][0].shape[1] == theirs, "what is theirs is there"
    cache.refresh()
    assert cache.length == theirs


@pytest.mark.parametrize("method", ["Append", "Attend", "Apply"])
def test_another_ones_append_behind_ours_hides_it_from_nobody(client: Any, keeper: Keeper, method: str) -> None:
    """Ours was carried out and its reply lost, and then another client appended: whoever repeated ours would double it.
    An append has succeeded; the result of the others is not to be had any more, and the error says so.
    """
    cache = client.create_cache(*((1, D) if method == "Apply" else (H, D)))
    keys = KEYS[0, : cache.num_kv_heads, :2]

    def somebody_else(answer: Any, context: Any) -> None:
        keeper.after.clear()
        keeper.caches[cache.name].append(0, keys, keys, append_id=1 << 63)
        raise LostReply

    keeper.after[method] = somebody_else
    if method == "Append":
        _three_tokens(client, cache, method)
        assert cache.length == 3
    else:
        with pytest.raises(FailedPreconditionError) as caught:
            _three_tokens(client, cache, method)
        error = caught.value
        assert (error.actual_length, error.resent, error.appended, cache.length) == (5, True, True, 0)
    assert keeper.caches[cache.name].layers[0][0].shape[1] == 5
    with pytest.raises(FailedPreconditionError) as caught:
        cache.append(*part(0, 1)) if method != "Apply" else cache.append(keys[:, :1], keys[:, :1])
    assert (caught.value.actual_length, caught.value.appended) == (5, False)
    cache.refresh()
    assert cache.length == 5


@pytest.mark.parametrize(
    ("at_once", "error", "lengths"), [(256, (3, True), [3, 5]), (2, (3, True), [3, 5]), (1, (5, False), [0, 5])]
)
def test_a_layer_behind_whose_tokens_others_are_is_applied_no_further(
    client: Any,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    error: tuple[int, bool],
    lengths: list[int],
) -> None:
    """Ours stay in all caches, and are said to be there. If there are more caches than are truncated at once, and some
    have been, the error tells of the one that could not be, and none is said to have ours.
    """
    monkeypatch.setattr(groups, "AT_ONCE", at_once)
    caches = [client.create_cache(1, D) for _ in range(2)]
    theirs = KEYS[0, :1, :2]

    def somebody_else(answer: Any, context: Any) -> None:
        keeper.after.clear()
        keeper.caches[caches[1].name].append(0, theirs, theirs, append_id=1 << 63)
        raise LostReply

    keeper.after["Apply"] = somebody_else
    with pytest.raises(FailedPreconditionError) as caught:
        client.apply("decoder", normal(0, 2, 3, D), caches=caches)
    assert (caught.value.actual_length, caught.value.appended) == error
    assert [keeper.caches[cache.name].layers[0][0].shape[1] for cache in caches] == lengths


@pytest.mark.parametrize("method", ["Append", "Attend", "Apply"])
def test_an_operation_that_was_given_up_is_not_taken_for_the_next_one(client: Any, keeper: Keeper, method: str) -> None:
    """It was carried out after all, with as many tokens as the next one, whose first reply is lost."""
    cache = client.create_cache(*((1, D) if method == "Apply" else (H, D)))
    released, done = threading.Event(), threading.Event()
    keeper.before[method] = lambda request: released.wait(PATIENCE_S)
    keeper.after[method] = lambda answer, context: done.set()
    with pytest.raises(DeadlineExceededError):
        _three_tokens(client, cache, method, timeout=1.0)
    released.set()
    assert done.wait(PATIENCE_S)
    keeper.lose = [method]
    with pytest.raises(FailedPreconditionError) as caught:
        _three_tokens(client, cache, method, first=3)
    assert (caught.value.actual_length, caught.value.resent, caught.value.appended) == (3, True, False)
    assert cache.length == 0


@pytest.mark.parametrize("method", ["Append", "Attend", "Apply"])
def test_what_a_full_server_refused_was_not_carried_out(client: Any, keeper: Keeper, method: str) -> None:
    """It is retried, and finds that another client has appended meanwhile."""
    cache = client.create_cache(*((1, D) if method == "Apply" else (H, D)))

    def refuse(request: Any) -> None:
        keeper.before.clear()
        keys = KEYS[0, : cache.num_kv_heads, :3]
        keeper.caches[cache.name].append(0, keys, keys, append_id=1 << 63)
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")

    keeper.before[method] = refuse
    with pytest.raises(FailedPreconditionError) as caught:
        _three_tokens(client, cache, method)
    assert (caught.value.actual_length, caught.value.resent, caught.value.appended) == (3, False, False)
    assert keeper.methods() == ["Create", method]


def _three_tokens(client: Any, cache: Any, method: str, first: int = 0, **options: Any) -> None:
    """Has three tokens appended to a cache, by one of the methods."""
    if method == "Append":
        cache.append(*part(first, first + 3), **options)
    elif method == "Attend":
        cache.attend(QUERY, *part(first, first + 3), **options)
    else:
        client.apply("decoder", normal(first, 1, 3, D), cache=cache, **options)


def test_an_equal_length_on_the_first_try_is_no_success(client: Any, keeper: Keeper) -> None:
    """Another client has appended as many tokens. Ours are not there."""
    cache = client.create_cache(H, D)
    keeper.caches[cache.name].append(0, KEYS[0, :, :3], VALUES[0, :, :3])
    for operation in (cache.append, lambda key, value: cache.attend(QUERY, key, value)):
        with pytest.raises(FailedPreconditionError) as caught:
            operation(*part(5, 8))
        assert (caught.value.actual_length, caught.value.resent) == (3, False)
    assert (cache.length, keeper.methods()[1:]) == (0, ["Append", "Attend"])


@pytest.mark.parametrize("method", ["Append", "Attend", "Apply", "Truncate"])
def test_who_changes_an_opened_cache_expects_its_length_from_then_on(client: Any, keeper: Keeper, method: str) -> None:
    """As the peer insists. Whoever only reads one takes it at whatever length it has."""
    made = client.create_cache(*((1, D) if method == "Apply" else (H, D)))
    _three_tokens(client, made, "Append" if method == "Truncate" else method)
    cache = client.open_cache(made.name)
    if method == "Truncate":
        cache.truncate(2)
    else:
        _three_tokens(client, cache, method)
    cache.attend(QUERY[:, : cache.num_kv_heads])
    _, sent = keeper.asked[-1]
    assert [reference.expected_length for reference in sent.caches] == [2 if method == "Truncate" else 6]
