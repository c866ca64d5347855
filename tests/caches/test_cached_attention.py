"""Attention to caches on a real server is the same as attention with keys and values in the request."""

from __future__ import annotations

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
from cached_cases import STORAGES, by_sequence, caller, fill, last
from caller import Caller, Reference, attend_request, result, tokens
from cases import DTYPES, Case, Plan
from conftest import Server
from hypothesis import given
from hypothesis import strategies as st
from resident import stored

from attnserve.v1 import attention_pb2 as pb

__all__ = ["caller"]


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
    """Against the oracle. Ragged: caches have the lengths of `kv_lengths`, which the request does not give."""
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
    "biases": {"bias_shape": (3, 1, 5, 61)},
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
    """An appended token sees all tokens before it and itself."""
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


def test_batches_change_no_bits(paged_server: Server, caller: Caller) -> None:
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
    with grpc.insecure_channel(paged_server.address) as channel:
        stream = calls.Stream(channel)
        for order in (range(len(requests)), reversed(range(len(requests)))):
            stream.send(*(calls.call(place, requests[place]) for place in order))
            for reply in stream.replies(len(requests)):
                assert not reply.HasField("error"), reply.error
                assert_same_results(alone[reply.id], result(reply.attend))
        stream.half_close()
        assert stream.rest() == []
    caller.delete(*names)


@pytest.mark.parametrize("storage", STORAGES)
def test_forks_in_one_message_are_answered_as_each_alone(caller: Caller, storage: str) -> None:
    """Steps of forks that diverge at different tokens, in one message; what they share is read once for all."""
    plan = Plan(batch=24, group=2, query_length=1, key_length=90, causal="bottom_right", alibi=True, sinks=True)
    case = plan.case(1)
    parted = [(13 * b) % 90 for b in range(24)]
    for b, length in enumerate(parted):
        case.key[b, :, :length], case.value[b, :, :length] = case.key[0, :, :length], case.value[0, :, :length]
    (trunk,) = fill(caller, Case(case.query[:1], case.key[:1], case.value[:1], {}), storage, [90], [90])
    names = [trunk]
    for b, length in list(enumerate(parted))[1:]:
        name = caller.fork(trunk).name
        caller.truncate(name, length)
        caller.append(name, case.key[b, :, length:], case.value[b, :, length:], expected_length=length)
        names.append(name)
    together = result(caller.attend(attend_request(case, names, return_lse=True)))
    accuracy.check(stored(case, storage), together)
    for b in (0, 1, 7, 23):
        alone = Case(case.query[b : b + 1], case.key[b : b + 1], case.value[b : b + 1], case.options)
        reply = result(caller.attend(attend_request(alone, [names[b]], return_lse=True)))
        assert_same_bits(reply.output[0], together.output[b])
        assert_same_bits(reply.lse[0], together.lse[b])
    caller.delete(*names)


@pytest.mark.parametrize("window", [(-1, -1), (9, -1)])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_by_its_own_sequence(caller: Caller, poison: float, window: tuple[int, int]) -> None:
    """An old token of one of three caches, by a step that reaches it and by one that does not."""
    case = Plan(batch=3, query_length=1, key_length=40, causal="bottom_right", window=window).case(2)
    case.key[1, 0, 17], case.value[1, 0, 18] = poison, poison
    names = fill(caller, case, "float32", [40] * 3, [7], left_out=1)
    reply = result(caller.attend(attend_request(case, names, last(case, [40] * 3, 1), return_lse=True)))
    accuracy.check(case, reply)
    assert np.isfinite(reply.output[[0, 2]]).all()
    assert np.isfinite(reply.output[1]).all() == (window != (-1, -1))
    caller.delete(*names)
