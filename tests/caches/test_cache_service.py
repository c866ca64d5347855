"""Caches on a real server: attention to them is the same attention with keys and values in the request.

The server has pages of few tokens, so that small caches have many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import accuracy
import calls
import grpc
import numpy as np
import oracle
import pytest
import strategies
from bits import assert_same_bits, assert_same_results
from caller import Caller, Reference, attend_request, result, tokens
from cases import DTYPES, Case, Plan
from conftest import Server
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Array

from attnserve.v1 import attention_pb2 as pb

STORAGES = ("bfloat16", "float16", "float32")
FLAGS = ("--device", "cpu", "--cache-bytes", "64MiB", "--cache-page-bytes", "4KiB")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(FLAGS, tmp_path_factory.mktemp("caches") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


@pytest.fixture(scope="module")
def caller(server: Server) -> Iterator[Caller]:
    with grpc.insecure_channel(server.address) as channel:
        yield Caller(channel)


def stored(case: Case, storage: str) -> Case:
    """The case with keys and values as they are when they have been stored."""
    with np.errstate(over="ignore"):
        key, value = (part.astype(DTYPES[storage]) for part in (case.key, case.value))
    return Case(case.query, key, value, case.options)


def by_sequence(case: Case) -> tuple[Array, Array]:
    """The keys and values of a case as [B, Hk, S, D], whatever its layout and rank."""
    key, value = case.key, case.value
    if case.options.get("layout") == "length_first" and key.ndim > 2:
        key, value = key.swapaxes(-3, -2), value.swapaxes(-3, -2)
    lacking = (None,) * (4 - key.ndim)
    return key[lacking], value[lacking]


def in_layout(case: Case, array: Array) -> Array:
    """[B, Hk, T, D] as the case has its keys."""
    if case.options.get("layout") == "length_first" and case.key.ndim > 2:
        array = array.swapaxes(1, 2)
    return array[(0,) * (4 - case.key.ndim)]


def fill(
    caller: Caller, case: Case, storage: str, lengths: list[int], chunks: list[int], left_out: int = 0
) -> list[str]:
    """A cache for each sequence of a case, of its first tokens but for the last `left_out`, appended in chunks."""
    key, value = by_sequence(case)
    names = []
    for b, length in enumerate(lengths):
        name = caller.create(key.shape[1], key.shape[3], value_dim=value.shape[3], dtype=storage)
        start, place = 0, 0
        while start < length - left_out:
            stop = min(start + chunks[place % len(chunks)], length - left_out)
            after = caller.append(name, key[b, :, start:stop], value[b, :, start:stop], expected_length=start)
            assert after == stop
            start, place = stop, place + 1
        names.append(name)
    return names


def last(case: Case, lengths: list[int], count: int) -> tuple[Array, Array]:
    """The last `count` of the tokens that each sequence has, as a request appends them."""
    key, value = (
        np.stack([part[b, :, length - count : length] for b, length in enumerate(lengths)])
        for part in by_sequence(case)
    )
    return in_layout(case, key), in_layout(case, value)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any request that caches can answer."""
    plan = draw(strategies.plans().filter(lambda plan: plan.layout != "packed"))
    return replace(plan, batch=max(1, plan.batch))


@given(
    plan=plans(),
    seed=strategies.SEEDS,
    storage=st.sampled_from(STORAGES),
    chunks=st.lists(st.integers(1, 17), min_size=1, max_size=3),
    ragged=st.booleans(),
    left_out=st.integers(0, 3),
    return_lse=st.booleans(),
    stage=st.sampled_from([None, None, *oracle.STAGES]),
)
def test_any_attention_to_caches_is_that_with_its_own_keys(
    caller: Caller,
    plan: Plan,
    seed: int,
    storage: str,
    chunks: list[int],
    ragged: bool,
    left_out: int,
    return_lse: bool,
    stage: str | None,
) -> None:
    """Against the oracle. Ragged: caches are as long as `kv_lengths` say, and the request does not say it."""
    if ragged and plan.kv_lengths is not None and stage not in ("raw", "capped"):
        longest = max(plan.kv_lengths)
        for name in ("mask_shape", "bias_shape"):
            shape = getattr(plan, name)
            if shape and shape[-1] > 1:
                plan = replace(plan, **{name: (*shape[:-1], longest)})
        plan = replace(plan, key_length=longest)
        assert plan.kv_lengths is not None
        lengths = list(plan.kv_lengths)
    else:
        ragged, lengths = False, [plan.key_length] * plan.batch
    left_out = min([left_out, *lengths])
    given_case = plan.case(seed)
    names = fill(caller, given_case, storage, lengths, chunks, left_out)
    appended = last(given_case, lengths, left_out) if left_out else None
    sent = given_case
    if ragged:
        options = {name: option for name, option in given_case.options.items() if name != "kv_lengths"}
        sent = Case(given_case.query, given_case.key, given_case.value, options)
    references = [Reference(name, 0, length - left_out) for name, length in zip(names, lengths, strict=True)]
    reply = caller.attend(attend_request(sent, references, appended, return_lse=return_lse, return_scores=stage))
    assert list(reply.cache_lengths) == lengths
    accuracy.check(stored(given_case, storage), result(reply), stage)
    caller.delete(*names)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "grouped": {"group": 3, "causal": "bottom_right"},
    "value-width": {"value_dim": 24},
    "window": {"causal": "bottom_right", "window": (9, 0)},
    "mask": {"mask_shape": (3, 1, 5, 61)},
    "bias": {"bias_shape": (61,), "causal": "bottom_right"},
    "alibi": {"alibi": True, "causal": "bottom_right"},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": -0.5},
    "general": {"score": "general"},
    "additive": {"score": "additive"},
    "lengths": {"kv_lengths": (37, 0, 61), "causal": "bottom_right"},
    "offsets": {"query_offset": (3, -2, 70), "causal": True},
    "length-first": {"layout": "length_first", "causal": "bottom_right"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_option_in_every_dtype(caller: Caller, dtype: str, storage: str, options: dict[str, Any]) -> None:
    base = {"batch": 3, "key_length": 61, "head_dim": 16, "key_dim": 16, "value_dim": 16}
    case = Plan(**{**base, "dtype": dtype, **options}).case(7)
    names = fill(caller, case, storage, [61] * 3, [40, 1, 9], left_out=5)
    reply = caller.attend(attend_request(case, names, last(case, [61] * 3, 5), return_lse=True, return_scores="masked"))
    accuracy.check(stored(case, storage), result(reply), "masked")
    again = caller.attend(attend_request(case, names, return_lse=True))
    assert list(again.cache_lengths) == [61] * 3, "what only attends appends nothing"
    accuracy.check(stored(case, storage), result(again))
    caller.delete(*names)


def test_positions_are_bottom_right_unless_said_otherwise(caller: Caller) -> None:
    """A token that is appended sees all that came before it and itself."""
    plan = Plan(batch=1, query_length=3, key_length=20, causal="bottom_right")
    case = plan.case(1)
    names = fill(caller, case, "float32", [20], [20], left_out=3)
    request = attend_request(case, names, last(case, [20], 3))
    request.alignment = pb.ALIGNMENT_UNSPECIFIED
    accuracy.check(case, result(caller.attend(request)))


def test_layers_have_their_own_tokens(caller: Caller) -> None:
    case = Plan(batch=1, key_length=9).case(1)
    key, value = by_sequence(case)
    name = caller.create(2, 8, layers=3)
    caller.append(name, *tokens(5, 4), layer=0)
    caller.append(name, key[0], value[0], layer=2)
    assert list(caller.get(name).lengths) == [4, 0, 9]
    accuracy.check(case, result(caller.attend(attend_request(case, [Reference(name, 2, 9)]))))
    assert list(caller.truncate(name, 5).lengths) == [4, 0, 5]
    empty = caller.attend(attend_request(case, [Reference(name, 1, 0)], return_lse=True))
    assert not result(empty).output.any()
    assert (result(empty).lse == -np.inf).all()


def test_many_caches_in_one_request(caller: Caller) -> None:
    """A step of 64 sequences of different lengths, each appended to and attended to by one message."""
    lengths = [1 + (7 * b) % 50 for b in range(64)]
    plan = Plan(batch=64, group=2, query_length=1, key_length=50, kv_lengths=tuple(lengths), causal="bottom_right")
    case = plan.case(0)
    names = fill(caller, case, "float32", lengths, [50], left_out=1)
    options = {"causal": "bottom_right"}
    request = attend_request(Case(case.query, case.key, case.value, options), names, last(case, lengths, 1))
    reply = caller.attend(request)
    assert list(reply.cache_lengths) == lengths
    accuracy.check(case, result(reply))
    caller.delete(*names)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("query_length", [1, 5, 20])
def test_bits_do_not_depend_on_how_the_tokens_came(caller: Caller, storage: str, query_length: int) -> None:
    """At once, in chunks, token by token, with the attention itself; and truncated and appended again."""
    case = Plan(batch=1, query_length=query_length, key_length=75, causal="bottom_right").case(3)
    key, value = by_sequence(case)
    ways = [fill(caller, case, storage, [75], chunks) for chunks in ([75], [31, 2, 11], [1])]
    replies = [result(caller.attend(attend_request(case, names, return_lse=True))) for names in ways]
    (together,) = fill(caller, case, storage, [75], [8], left_out=6)
    replies.append(result(caller.attend(attend_request(case, [together], last(case, [75], 6), return_lse=True))))
    (name,) = ways[0]
    for length in (74, 40, 1, 0):
        cut = caller.truncate(name, length, expected_length=75)
        assert list(cut.lengths) == [length]
        caller.append(name, *tokens(9, 3), expected_length=length)
        caller.truncate(name, length)
        caller.append(name, key[0, :, length:], value[0, :, length:], expected_length=length)
        replies.append(result(caller.attend(attend_request(case, [name], return_lse=True))))
    for reply in replies[1:]:
        assert_same_results(replies[0], reply)


def test_a_fork_never_sees_what_its_sibling_does(caller: Caller) -> None:
    """Forks at every length around the edges of pages, of forks too: each is the oracle of its own tokens."""
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


def test_company_changes_no_bit(server: Server, caller: Caller) -> None:
    """Requests over caches, forks of one among them, alone and then all at once beside attention of other kinds."""
    prefix = Plan(batch=1, query_length=1, key_length=600, key_heads=2, head_dim=16, key_dim=16, value_dim=16)
    trunk = fill(caller, prefix.case(0), "float32", [600], [600])[0]
    requests: list[pb.AttendRequest] = []
    names: list[str] = [trunk]
    for seed in range(24):
        plan = replace(prefix, query_length=(1, 1, 4, 30)[seed % 4], group=1 + seed % 2)
        name = caller.fork(trunk).name
        caller.append(name, *tokens(seed, seed % 5, 2, 16))
        names.append(name)
        requests.append(attend_request(plan.case(seed), [name], return_lse=True))
        requests.append(attend_request(replace(plan, key_length=33).case(seed), return_lse=True))
    alone = [result(caller.attend(request)) for request in requests]
    with grpc.insecure_channel(server.address) as channel:
        stream = calls.Stream(channel)
        for order in (range(len(requests)), reversed(range(len(requests)))):
            stream.send(*(calls.call(place, requests[place]) for place in order))
            for reply in stream.replies(len(requests)):
                assert not reply.HasField("error"), reply.error
                assert_same_results(alone[reply.id], result(reply.attend))
        stream.half_close()
        assert stream.rest() == []
    caller.delete(*names)


def failure(error: Any) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    """The code of a failed call, and what its ErrorInfo says."""
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
    with pytest.raises(grpc.RpcError) as caught:  # sent again, as if its reply had been lost
        caller.append(one, *tokens(0, 2), expected_length=6)
    assert failure(caught.value)[1].metadata["length"] == "8"


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
    assert name not in {cache.name for cache in caller.list().caches}


def test_names_cannot_be_guessed(caller: Caller) -> None:
    """24 characters of 64, none of which is much the same in all names."""
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
        (lambda: caller.truncate(name, 1), "length"),
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


def test_operations_of_many_callers_on_one_cache_take_effect_one_after_the_other(server: Server) -> None:
    """Each of many threads appends tokens of its own and attends in one call. The lengths in the replies say in which
    order they took effect, and each reply is that of exactly what had been appended by then.
    """
    heads, width, callers, steps = 2, 8, 8, 12
    query = np.random.default_rng(0).standard_normal((heads, 1, width)).astype(np.float32)

    def fingerprint(who: int, step: int) -> tuple[Array, Array]:
        return tokens(1000 * who + step, 1 + (who + step) % 3, heads, width)

    with grpc.insecure_channel(server.address) as channel:
        name = Caller(channel).create(heads, width)

    def ask(who: int) -> list[tuple[int, int, pb.AttendResponse]]:
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(server.address, options=options) as channel:
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


def test_operations_on_one_stream_take_effect_in_the_order_in_which_they_were_sent(server: Server) -> None:
    """In one message: appends with attention to two caches, and every reply says what had come before it."""
    query = np.random.default_rng(0).standard_normal((2, 1, 8)).astype(np.float32)
    with grpc.insecure_channel(server.address) as channel:
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
