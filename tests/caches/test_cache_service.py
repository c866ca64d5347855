"""What `CacheService` does on a real server, for whom, and its errors when it does not."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accuracy
import calls
import grpc
import numpy as np
import pytest
import strategies
from bits import assert_same_bits
from cached_cases import caller, fill, last
from caller import Caller, Reference, attend_request, result, tokens
from cases import DTYPES, Case, Plan
from conftest import Server
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Array

from attnserve.v1 import attention_pb2 as pb

__all__ = ["caller"]


def test_a_fork_never_sees_what_its_sibling_does(caller: Caller) -> None:
    """Forks, and forks of forks, at every length around page boundaries: each matches the oracle on its own tokens."""
    model = {caller.create(): tokens(0, 0)}
    seeds = itertools.count(1)
    for length in (0, 1, 30, 31, 32, 33, 64, 65):  # 32 tokens are a page
        for name, (key, value) in list(model.items()):
            if grow := max(0, length - key.shape[1]):
                more = tokens(next(seeds), grow)
                caller.append(name, *more, expected_length=key.shape[1])
                model[name] = np.concatenate((key, more[0]), axis=1), np.concatenate((value, more[1]), axis=1)
        for name in dict.fromkeys((next(iter(model)), list(model)[-1])):
            fork = caller.fork(name)
            assert list(fork.lengths) == [length]
            model[fork.name] = model[name]
    victim, *others = model
    caller.truncate(victim, 7)
    caller.append(victim, *tokens(77, 60), expected_length=7)
    caller.delete(victim)
    query = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    for name in others:
        key, value = model[name]
        case = Case(query, key, value, {"causal": "bottom_right"})
        reply = caller.attend(attend_request(case, [Reference(name, 0, key.shape[1])]))
        accuracy.check(case, result(reply))
    listed = {cache.name: cache for cache in caller.list().caches}
    assert any(listed[name].shared_bytes for name in others)
    caller.delete(*others)


def failure(error: Any) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    """The code and the ErrorInfo of a failed call."""
    return error.code(), calls.detail(calls.status_of(error), error_details_pb2.ErrorInfo)


def test_a_length_that_nobody_expected_changes_nothing(caller: Caller) -> None:
    case = Plan(batch=2, query_length=1, key_length=6).case(0)
    one, two = fill(caller, case, "float32", [6, 6], [6])
    appended = last(case, [6, 6], 1)
    for ask in (
        lambda: caller.append(one, *tokens(0, 2), expected_length=5),
        lambda: caller.truncate(one, 2, expected_length=7),
        lambda: caller.attend(attend_request(case, [Reference(one, 0, 6), Reference(two, 0, 5)], appended)),
        lambda: caller.attend(attend_request(case, [Reference(one, 0, 4), Reference(two, 0, 6)])),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        code, info = failure(caught.value)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert info.metadata["length"] == "6"
        assert [list(caller.get(name).lengths) for name in (one, two)] == [[6], [6]]
    accuracy.check(case, result(caller.attend(attend_request(case, [one, two]))))
    assert caller.append(one, *tokens(0, 2), expected_length=6) == 8
    with pytest.raises(grpc.RpcError) as caught:  # retried, as if its reply had been lost
        caller.append(one, *tokens(0, 2), expected_length=6)
    assert failure(caught.value)[1].metadata["length"] == "8"


def test_a_cache_is_as_long_as_its_longest_layer(caller: Caller) -> None:
    """That is the length that a truncation expects; an append expects, and is told, that of its own layer."""
    name = caller.create(layers=2)
    assert caller.append(name, *tokens(0, 4), layer=0) == 4
    assert caller.append(name, *tokens(0, 2), layer=1, expected_length=0) == 2
    for expected in (2, 5):
        with pytest.raises(grpc.RpcError) as caught:
            caller.truncate(name, 3, expected_length=expected)
        assert failure(caught.value)[1].metadata["length"] == "4"
    assert list(caller.truncate(name, 3, expected_length=4).lengths) == [3, 2]


def test_what_is_not_there_is_not_found(caller: Caller) -> None:
    case = Plan(batch=1, query_length=1, key_length=4).case(0)
    (name,) = fill(caller, case, "float32", [4], [4])
    caller.delete(name)
    caller.delete(name, "nothing")
    for gone in (name, "nothing", name[:-1] + chr(ord(name[-1]) ^ 1)):
        for ask in (
            lambda gone=gone: caller.get(gone),
            lambda gone=gone: caller.fork(gone),
            lambda gone=gone: caller.truncate(gone, 0),
            lambda gone=gone: caller.append(gone, *tokens(0, 1)),
            lambda gone=gone: caller.attend(attend_request(case, [Reference(gone)])),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
            told = caught.value.details()  # type: ignore[attr-defined]
            assert told == f"there is no cache '{gone[:4]}...'", "logs have it, and names are secrets"
    assert name not in {cache.name for cache in caller.list().caches}


def test_what_is_sent_again_gets_what_it_made_whatever_has_become_of_its_parent(caller: Caller) -> None:
    name = caller.create(request_id=b"parent")
    caller.append(name, *tokens(0, 3))
    fork = caller.fork(name, request_id=b"fork").name
    assert caller.create(request_id=b"parent") == name
    assert caller.fork(name, request_id=b"fork").name == fork
    caller.delete(name)
    caller.append(fork, *tokens(1, 2), expected_length=3)
    again = caller.fork(name, request_id=b"fork")
    assert (again.name, list(again.lengths)) == (fork, [5])
    with pytest.raises(grpc.RpcError) as caught:
        caller.fork(name, request_id=b"another")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    caller.delete(fork)
    with pytest.raises(grpc.RpcError) as caught:
        caller.fork(name, request_id=b"fork")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    parent = caller.create(request_id=b"parent")
    other = caller.fork(parent, request_id=b"fork").name
    assert len({name, fork, parent, other}) == 4, "what is gone is made anew"
    caller.delete(parent, other)


def test_an_id_that_made_something_else_is_an_error_of_its_field(caller: Caller) -> None:
    one, other, gone = caller.create(request_id=b"one"), caller.create(), caller.create()
    fork = caller.fork(one, request_id=b"fork").name
    caller.delete(gone)
    for ask in (
        lambda: caller.fork(other, request_id=b"one"),
        lambda: caller.fork(one, request_id=b"one"),
        lambda: caller.fork(gone, request_id=b"one"),
        lambda: caller.fork(other, request_id=b"fork"),
        lambda: caller.create(request_id=b"fork"),
        lambda: caller.create(width=16, request_id=b"one"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        bad = calls.detail(calls.status_of(caught.value), error_details_pb2.BadRequest)
        assert [violation.field for violation in bad.field_violations] == ["request_id"]
    caller.delete(one, other, fork)


def test_messages_without_tensors_are_short(caller: Caller) -> None:
    """Read without a limit, empty names would take 16 times the memory of their message."""
    long = "x" * (4 << 20)
    for ask in (caller.get, caller.fork, caller.delete, lambda name: caller.truncate(name, 0)):
        with pytest.raises(grpc.RpcError) as caught:
            ask(long)
        code, info = failure(caught.value)
        assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED")
        assert info.metadata["limit"] == "max_plain_message_bytes"
    caller.delete(long[:-1000])


def test_any_number_of_names_may_be_deleted(caller: Caller) -> None:
    """More than there may be caches: some may be gone, or another server's."""
    name = caller.create()
    caller.delete(*(f"nobody-{number}" for number in range(20_000)), name)
    with pytest.raises(grpc.RpcError) as caught:
        caller.get(name)
    assert failure(caught.value)[0] is grpc.StatusCode.NOT_FOUND


def test_names_cannot_be_guessed(caller: Caller) -> None:
    """24 characters from an alphabet of 64, none of which is nearly the same in all names."""
    names = [caller.create() for _ in range(200)]
    assert len(set(names)) == 200
    assert {len(name) for name in names} == {24}
    assert min(len({name[place] for name in names}) for place in range(24)) > 40
    caller.delete(*names)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"heads": 0}, "num_kv_heads"),
        ({"width": 0}, "head_dim"),
        ({"width": 100_000}, "head_dim"),
        ({"dtype": "float64"}, "dtype"),
        ({"dtype": "bool"}, "dtype"),
        ({"dtype": "unspecified"}, "dtype"),
        ({"layers": 1_000_000}, "layers"),
        ({"ttl": 0.0}, "ttl"),
    ],
)
def test_wrong_creations_name_the_field(caller: Caller, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        caller.create(**fields)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    bad = calls.detail(calls.status_of(caught.value), error_details_pb2.BadRequest)
    assert [violation.field for violation in bad.field_violations] == [field]


def test_wrong_appends_and_references_name_the_field(caller: Caller) -> None:
    name, other = caller.create(), caller.create(3)
    key, value = tokens(0, 4)
    query = Case(key[:, :1], key, value)
    twice = Case(np.stack([key[:, :1]] * 2), key, value)
    for ask, field in (
        (lambda: caller.append(name, key[:1], value), "key.shape"),
        (lambda: caller.append(name, key, value[:, :3]), "value.shape"),
        (lambda: caller.append(name, key, value.astype(np.float16)), "value.dtype"),
        (lambda: caller.append(name, key.astype(np.int64), value), "key.dtype"),
        (lambda: caller.append(name, key, value, layer=1), "layer"),
        (lambda: caller.append(name, key, value, length_first=True), "key.shape"),
        (lambda: caller.truncate(name, 1), "truncations[0].length"),
        (lambda: caller.truncate(name, None), "truncations[0].length"),
        (lambda: caller.attend(attend_request(query, [Reference(name, 1)])), "caches[0].layer"),
        (lambda: caller.attend(attend_request(query, [name, name])), "caches"),
        (lambda: caller.attend(attend_request(twice, [name, name])), "caches[1].name"),
        (lambda: caller.attend(attend_request(twice, [name, other])), "caches[1].name"),
        (lambda: caller.attend(attend_request(query, [name], (key[:, :, :4], value))), "key"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, field  # type: ignore[attr-defined]
        bad = calls.detail(calls.status_of(caught.value), error_details_pb2.BadRequest)
        assert [violation.field.partition(".shape")[0] for violation in bad.field_violations] == [
            field.partition(".shape")[0]
        ]
    assert list(caller.get(name).lengths) == [0]
    caller.delete(name, other)


@pytest.mark.parametrize(
    ("unlike", "first", "second"),
    [
        ({"heads": 3}, "num_kv_heads 2", "num_kv_heads 3"),
        ({"dtype": "float16", "layers": 2}, "layers 1, dtype float32", "layers 2, dtype float16"),
    ],
)
def test_a_cache_unlike_the_first_is_told_how_they_differ(
    caller: Caller, unlike: dict[str, Any], first: str, second: str
) -> None:
    names = [caller.create(), caller.create(**unlike)]
    key, value = tokens(0, 4)
    with pytest.raises(grpc.RpcError) as caught:
        caller.attend(attend_request(Case(np.stack([key[:, :1]] * 2), key, value), names))
    expected = f"caches[1].name: expected a cache with {first}, as the first has, found {second}"
    assert calls.status_of(caught.value).message == expected
    caller.delete(*names)


@settings(max_examples=20)
@given(seed=strategies.SEEDS, length_first=st.booleans(), dtype=st.sampled_from(sorted(DTYPES)))
def test_appends_of_any_dtype_and_layout(caller: Caller, seed: int, length_first: bool, dtype: str) -> None:
    key, value = tokens(seed, 9, dtype=DTYPES[dtype])
    one, other = caller.create(), caller.create()
    caller.append(one, key, value)
    if length_first:
        key, value = key.swapaxes(0, 1), value.swapaxes(0, 1)
    caller.append(other, key, value, length_first=length_first)
    case = Plan(batch=1, query_length=2, key_length=9).case(seed)
    outputs = [result(caller.attend(attend_request(case, [name]))).output for name in (one, other)]
    assert_same_bits(*outputs)
    caller.delete(one, other)


def test_operations_of_many_callers_on_one_cache_take_effect_one_after_the_other(paged_server: Server) -> None:
    """Each of many threads appends tokens of its own and attends in one call. The lengths in the replies show the order
    in which they took effect, and each reply is over exactly the tokens appended by then.
    """
    heads, width, callers, steps = 2, 8, 8, 12
    query = np.random.default_rng(0).standard_normal((heads, 1, width)).astype(np.float32)

    def fingerprint(who: int, step: int) -> tuple[Array, Array]:
        return tokens(1000 * who + step, 1 + (who + step) % 3, heads, width)

    with grpc.insecure_channel(paged_server.address) as channel:
        name = Caller(channel).create(heads, width)

    def ask(who: int) -> list[tuple[int, int, pb.AttendResponse]]:
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(paged_server.address, options=options) as channel:
            caller, found = Caller(channel), []
            for step in range(steps):
                request = attend_request(Case(query, query, query), [name], fingerprint(who, step))
                found.append((who, step, caller.attend(request)))
            return found

    with ThreadPoolExecutor(callers) as threads:
        replies = [reply for each in threads.map(ask, range(callers)) for reply in each]
    replies.sort(key=lambda each: each[2].cache_lengths[0])
    keys, values, length = [], [], 0
    for who, step, reply in replies:
        key, value = fingerprint(who, step)
        keys.append(key)
        values.append(value)
        length += key.shape[1]
        assert list(reply.cache_lengths) == [length], "an append is lost, or was made twice"
        case = Case(query, np.concatenate(keys, axis=1), np.concatenate(values, axis=1))
        accuracy.check(case, result(reply))
    for who in range(callers):
        assert [step for other, step, _ in replies if other == who] == list(range(steps))


def test_operations_on_one_stream_take_effect_in_the_order_in_which_they_were_sent(paged_server: Server) -> None:
    """In one message: appends with attention to two caches, and every reply reflects exactly what came before it."""
    query = np.random.default_rng(0).standard_normal((2, 1, 8)).astype(np.float32)
    with grpc.insecure_channel(paged_server.address) as channel:
        caller, stream = Caller(channel), calls.Stream(channel)
        names = [caller.create(), caller.create()]
        requests = [
            attend_request(Case(query, query, query), [Reference(names[n % 2], 0, n // 2)], tokens(n, 1))
            for n in range(40)
        ]
        stream.send(*(calls.call(n, request) for n, request in enumerate(requests)))
        for reply in stream.replies(40):
            assert not reply.HasField("error"), reply.error
            before = [tokens(n, 1) for n in range(reply.id % 2, reply.id + 1, 2)]
            key, value = (np.concatenate(parts, axis=1) for parts in zip(*before, strict=True))
            accuracy.check(Case(query, key, value), result(reply.attend))
        stream.half_close()
        assert stream.rest() == []
