"""Appends and truncations that are retried after they were carried out: the server recognises them, and no others, by
their ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import calls
import grpc
import numpy as np
import pytest
from cached_cases import caller
from caller import Caller, Reference, attend_request, tokens
from cases import Case
from conftest import Server
from google.rpc import error_details_pb2
from stepping import Stepping, device, message_of, step, stepping_

from attnserve_server.caches.store import MOST_TRUNCATIONS
from attnserve_server.errors import FailedPrecondition
from attnserve_server.native import library

__all__ = ["caller", "device", "stepping_"]  # fixtures

LARGEST = (1 << 64) - 1
QUERY = np.ones((2, 1, 8), np.float32)
"""[H, Lq, D]"""


def append(caller: Caller, name: str, expected: int, append_id: int, count: int = 2) -> int:
    """By the RPC that appends and does nothing else."""
    return caller.append(name, *tokens(1, count), expected_length=expected, append_id=append_id)


def attend(caller: Caller, name: str, expected: int, append_id: int, count: int = 2) -> int:
    """By an attention."""
    key, value = tokens(1, count)
    reference = Reference(name, 0, expected, append_id)
    request = attend_request(Case(QUERY, QUERY, QUERY), [reference], (key, value))
    return int(caller.attend(request).cache_lengths[0])


Appending = Callable[..., int]


def refusal(ask: Callable[[], object]) -> dict[str, str]:
    """The server's error details for an unexpected length, without the cache's name, which each has."""
    with pytest.raises(grpc.RpcError) as caught:
        ask()
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    metadata = dict(calls.detail(calls.status_of(error), error_details_pb2.ErrorInfo).metadata)
    assert metadata.pop("name")
    return metadata


@pytest.mark.parametrize("ask", [append, attend])
@pytest.mark.parametrize("again", [append, attend])
@pytest.mark.parametrize("append_id", [1, LARGEST])
def test_the_same_append_is_known(caller: Caller, ask: Appending, again: Appending, append_id: int) -> None:
    name = caller.create()
    assert ask(caller, name, 0, append_id) == 2
    assert refusal(lambda: again(caller, name, 0, append_id)) == {"length": "2", "appended": "true"}
    assert refusal(lambda: again(caller, name, 0, append_id)) == {"length": "2", "appended": "true"}, "nothing changed"
    for other in (0, append_id ^ 2):
        assert refusal(lambda other=other: again(caller, name, 0, other)) == {"length": "2"}  # type: ignore[misc]
    assert refusal(lambda: caller.truncate(name, 0, expected_length=0)) == {"length": "2"}
    reading = attend_request(Case(QUERY, QUERY, QUERY), [Reference(name, 0, 0, append_id)])
    assert refusal(lambda: caller.attend(reading)) == {"length": "2"}, "it appends nothing"
    assert list(caller.get(name).lengths) == [2]


@pytest.mark.parametrize("ask", [append, attend])
def test_an_append_without_an_id_is_never_known(caller: Caller, ask: Appending) -> None:
    name = caller.create()
    assert ask(caller, name, 0, 0) == 2
    assert refusal(lambda: ask(caller, name, 0, 0)) == {"length": "2"}


@pytest.mark.parametrize("ask", [append, attend])
def test_what_came_later_is_somebody_elses(caller: Caller, ask: Appending) -> None:
    """After 16 others, where a token of it was cut off, or in a fork, an append is not recognised."""
    name = caller.create()
    assert ask(caller, name, 0, 5) == 2
    fork = caller.fork(name).name
    assert refusal(lambda: ask(caller, fork, 0, 5)) == {"length": "2"}
    for length in range(2, 18):
        known = {"length": str(length), "appended": "true"}
        assert refusal(lambda: ask(caller, name, 0, 5)) == known
        assert ask(caller, name, length, 4 + length, count=1) == length + 1
    assert refusal(lambda: ask(caller, name, 0, 5)) == {"length": "18"}
    caller.truncate(name, 4)
    for append_id, known in ((6, {"appended": "true"}), (7, {"appended": "true"}), (8, {})):
        assert refusal(lambda append_id=append_id: ask(caller, name, 0, append_id)) == {"length": "4", **known}  # type: ignore[misc]
    assert ask(caller, name, 4, 8, count=1) == 5


def test_layers_are_known_apart(caller: Caller) -> None:
    name = caller.create(layers=2)
    for layer in (0, 1):
        caller.append(name, *tokens(layer, 1), layer=layer, expected_length=0, append_id=3 + layer)
    for layer in (0, 1):
        known = {"length": "1", "appended": "true"}
        for append_id, found in ((3 + layer, known), (4 - layer, {"length": "1"})):
            fields = {"layer": layer, "expected_length": 0, "append_id": append_id}
            assert refusal(lambda fields=fields: caller.append(name, *tokens(0, 1), **fields)) == found  # type: ignore[misc]


def test_an_append_to_several_caches_is_known_by_the_first_that_is_longer(caller: Caller) -> None:
    """All or none of them got it, even if what one got was nothing."""
    names = [caller.create() for _ in range(2)]
    case = Case(*(np.ones((2, 2, 1, 8), np.float32),) * 3)
    pair = tuple(np.stack([each, each]) for each in tokens(1, 1))
    request = attend_request(case, [Reference(name, 0, 0, 9) for name in names], pair)
    assert list(caller.attend(request).cache_lengths) == [1, 1]
    assert refusal(lambda: caller.attend(request)) == {"length": "1", "appended": "true"}
    caller.truncate(names[0], 0)
    assert refusal(lambda: caller.attend(request)) == {"length": "1", "appended": "true"}
    caller.truncate(names[1], 0)
    assert list(caller.attend(request).cache_lengths) == [1, 1]


def test_the_same_truncation_is_known(caller: Caller) -> None:
    """Whatever was appended since, even up to the length that the truncation expects."""
    name = caller.create()
    append(caller, name, 0, 1, count=4)
    assert list(caller.truncate(name, 2, expected_length=4, truncation_id=LARGEST).lengths) == [2]
    cut = {"expected_length": 4, "truncation_id": LARGEST}
    assert refusal(lambda: caller.truncate(name, 2, **cut)) == {"length": "2", "truncated": "true"}
    append(caller, name, 2, 2)
    assert refusal(lambda: caller.truncate(name, 2, **cut)) == {"length": "4", "truncated": "true"}
    assert refusal(lambda: caller.truncate(name, 9, truncation_id=LARGEST)) == {"length": "4", "truncated": "true"}
    assert list(caller.get(name).lengths) == [4], "nothing changed"
    fork = caller.fork(name).name
    assert list(caller.truncate(fork, 2, **cut).lengths) == [2], "it is another cache"
    assert list(caller.truncate(name, 2, expected_length=4, truncation_id=7).lengths) == [2], "it is another truncation"


def test_a_truncation_that_was_refused_is_not_known(caller: Caller) -> None:
    name = caller.create()
    append(caller, name, 0, 1)
    assert refusal(lambda: caller.truncate(name, 1, expected_length=3, truncation_id=5)) == {"length": "2"}
    assert list(caller.truncate(name, 1, expected_length=2, truncation_id=5).lengths) == [1]


def test_the_latest_truncations_are_known_and_none_without_an_id(caller: Caller) -> None:
    name = caller.create()
    append(caller, name, 0, 1, count=4)
    for truncation_id in [*range(1, MOST_TRUNCATIONS + 2), 0, 0]:
        caller.truncate(name, 4, truncation_id=truncation_id)
    for truncation_id in range(2, MOST_TRUNCATIONS + 2):
        again = partial(caller.truncate, name, 1, truncation_id=truncation_id)
        assert refusal(again) == {"length": "4", "truncated": "true"}
    assert list(caller.truncate(name, 3, truncation_id=1).lengths) == [3], "too many have come since"


def test_a_large_append_that_is_sent_again_is_known(start_server: Callable[..., Server]) -> None:
    """It costs what it cost the first time, not what another append after it would, which would exceed the limit."""
    server = start_server("--max-request-flops", "600000")
    with grpc.insecure_channel(server.address) as channel:
        caller = Caller(channel)
        name = caller.create()
        query = np.ones((2, 64, 8), np.float32)
        request = attend_request(Case(query, query, query), [Reference(name, 0, 0, 7)], tokens(1, 64))
        assert list(caller.attend(request).cache_lengths) == [64]
        assert refusal(lambda: caller.attend(request)) == {"length": "64", "appended": "true"}


@pytest.mark.skipif(not library.available(), reason="no native kernel is here")
@pytest.mark.parametrize("append_ids", [(0, 0), (1, 2), (LARGEST, 1 << 63)])
def test_steps_that_are_answered_at_once_have_their_ids(stepping_: Stepping, append_ids: tuple[int, int]) -> None:
    cache = stepping_.create(3)
    steps = [
        step(cache, seed=length, append=True, expected=[length], append_id=append_id)
        for length, append_id in enumerate(append_ids, 3)
    ]
    assert stepping_.learn(steps[0]) == [True]
    for asked, append_id in zip(steps, append_ids, strict=True):  # the second reuses what is kept, with its own id
        assert stepping_.answer(message_of(asked)) is not None
        assert cache.has_append(0, append_id) == bool(append_id)
    for asked in steps:
        assert stepping_.answer(message_of(asked)) is None
        assert stepping_.ordinary(asked) is FailedPrecondition
    assert cache.length(0) == 5
