"""A reply has the same bits whatever else the server computes at the time, and reaches its own caller.

Every request is sent first alone, with nothing else in flight, then again among many others, from one thread and from
several, over one client and over several. The batch sizes that the server reports show that they shared batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
from bits import assert_same_bits, assert_same_results
from cases import DTYPES, Case, Plan
from conftest import Server
from hypothesis import given
from hypothesis import strategies as st
from occupied import Occupied

from attnserve import Client

EVERY_DTYPE = pytest.mark.parametrize("dtype", sorted(DTYPES))

RETURNED = st.fixed_dictionaries(
    {"return_lse": st.booleans(), "return_scores": st.sampled_from([None, None, *oracle.STAGES])}
)


@given(
    plans=st.lists(st.tuples(strategies.plans(), RETURNED), min_size=1, max_size=6),
    seeds=st.lists(strategies.SEEDS, min_size=2, max_size=4),
    order=st.randoms(),
)
def test_bits_do_not_depend_on_random_batches(
    client: Client, plans: list[tuple[Plan, dict[str, Any]]], seeds: list[int], order: Any
) -> None:
    """Each plan several times, so that a batch may be of one kind, which can share a kernel call, or of several."""
    asked = [(plan.case(seed), returned) for plan, returned in plans for seed in seeds]
    alone = [case.attend(client, **returned) for case, returned in asked]
    shuffled = list(range(len(asked)))
    order.shuffle(shuffled)
    futures = {n: asked[n][0].submit(client, **asked[n][1]) for n in shuffled}
    for n, future in futures.items():
        assert_same_results(future.result(), alone[n])


SAME_KIND: dict[str, dict[str, Any]] = {
    "one query": {"query_length": 1, "key_length": 33, "head_dim": 64, "key_dim": 64, "value_dim": 64},
    "one query, grouped": {"query_length": 1, "key_length": 20, "group": 4},
    "few queries": {"query_length": 3, "key_length": 17, "head_dim": 20, "key_dim": 20},
    "causal": {"query_length": 33, "key_length": 33, "causal": True},
    "causal, in blocks": {"query_length": 70, "key_length": 70, "causal": True},
    "masked": {"mask_shape": (2, 1, 5, 7), "bias_shape": (5, 7)},
    "sinks": {"query_length": 3, "sinks": True},
    "alibi": {"alibi": True, "causal": "bottom_right", "query_length": 3, "group": 3},
    "lengths": {"kv_lengths": (2, 7), "query_length": 1},
    "capped": {"softcap": 2.0, "alibi": True, "sinks": True},
    "general": {"score": "general", "query_length": 3, "head_dim": 48, "key_dim": 48},
    "additive": {"score": "additive", "query_length": 3},
    "packed": {"layout": "packed", "rank": 3, "query_lengths": (5, 1), "kv_lengths": (7, 3), "causal": "bottom_right"},
}


EVERY_KIND = list(product(SAME_KIND, sorted(DTYPES)))


@pytest.mark.parametrize("kind", SAME_KIND)
def test_bits_do_not_depend_on_batches_of_the_same_kind(server: Server, client: Client, kind: str) -> None:
    """The likeliest requests to share a kernel call: equal in all but their contents, and all in flight at once."""
    seeds = range(32)
    cases = [Plan(dtype=dtype, **SAME_KIND[kind]).case(seed) for dtype in DTYPES for seed in seeds]
    alone = [case.attend(client, return_lse=True) for case in cases]
    with Occupied(server) as device:
        futures = [case.submit(client, return_lse=True, timeout=None) for case in cases]
        device.until_waiting(len(cases))
    together = [future.result() for future in futures]
    assert min(result.batch_size for result in together) >= len(seeds)
    for result, expected in zip(together, alone, strict=True):
        assert_same_results(result, expected)


@EVERY_DTYPE
def test_bits_do_not_depend_on_heavy_load(client: Client, dtype: str) -> None:
    """Heavy requests in the same batch, which may cause work to be divided among threads; and requests with a NaN,
    which may be computed another way, wholly or in part, but always the same part.
    """
    plan = Plan(dtype=dtype, key_heads=4, head_dim=64, key_dim=64, value_dim=64, causal=True, batch=1)
    heavy = [replace(plan, query_length=length, key_length=length).case(0) for length in (400, 300)]
    light = [plan.case(seed) for seed in range(8)] + [replace(plan, query_length=1).case(seed) for seed in range(8)]
    for head, case in enumerate(light):
        case.value[:, head % 4, -1] = np.nan
        case.key[:, (head + 1) % 4, 2] = np.inf if head % 2 else 1
    alone = [case.attend(client, return_lse=True) for case in light]
    futures = []
    for n, case in enumerate(light):
        heavy[n % 2].submit(client)
        futures.append(case.submit(client, return_lse=True))
    for future, expected in zip(futures, alone, strict=True):
        assert_same_results(future.result(), expected)


@EVERY_DTYPE
def test_bits_do_not_depend_on_the_place_in_a_request(client: Client, dtype: str) -> None:
    """A batch, the same sequences packed among others, and each one alone give the same result."""
    plan = Plan(dtype=dtype, batch=5, query_length=3, key_length=9, causal="bottom_right", alibi=True)
    case = plan.case(0)
    whole = case.attend(client, return_lse=True)
    packed = [array.swapaxes(1, 2).reshape(-1, 2, array.shape[-1]) for array in (case.query, case.key, case.value)]
    options = {**case.options, "layout": "packed", "query_lengths": [3] * 5, "kv_lengths": [9] * 5}
    ragged = Case(packed[0], packed[1], packed[2], options).attend(client, return_lse=True)
    by_length = [array.swapaxes(1, 2) for array in (case.query, case.key, case.value)]
    options = {**case.options, "layout": "length_first"}
    length_first = Case(by_length[0], by_length[1], by_length[2], options).attend(client, return_lse=True)
    assert_same_bits(length_first.output.swapaxes(1, 2), whole.output)
    assert_same_bits(length_first.lse, whole.lse)
    assert_same_bits(ragged.output.reshape(5, 3, 2, -1).swapaxes(1, 2), whole.output)
    assert_same_bits(ragged.lse.reshape(2, 5, 3).swapaxes(0, 1), whole.lse)
    for n in range(5):
        one = Case(case.query[n], case.key[n], case.value[n], case.options).attend(client, return_lse=True)
        assert_same_bits(one.output, whole.output[n])
        assert_same_bits(one.lse, whole.lse[n])


@pytest.mark.parametrize("scores", [None, "weights"])
def test_padding_beyond_a_length_changes_nothing(client: Client, scores: str | None) -> None:
    """Keys at kv_lengths and beyond might as well not exist."""
    for dtype in sorted(DTYPES):
        padded = Plan(dtype=dtype, batch=1, query_length=3, key_length=20, kv_lengths=(11,)).case(1)
        options = {name: value for name, value in padded.options.items() if name != "kv_lengths"}
        cut = Case(padded.query, padded.key[:, :, :11], padded.value[:, :, :11], options)
        one, other = (case.attend(client, return_lse=True, return_scores=scores) for case in (padded, cut))
        assert_same_bits(one.output, other.output)
        assert_same_bits(one.lse, other.lse)


def _fingerprinted(plan: Plan, number: int) -> Case:
    """A case whose values all equal `number`, and so do its outputs, whatever the weights."""
    case = plan.case(number)
    return replace(case, value=np.full_like(case.value, number))


def test_every_result_reaches_who_asked(server: Server) -> None:
    """Eight threads with three clients send mixed kinds at once; each result must carry its request's number."""
    kinds = [
        Plan(query_length=1, key_length=5),
        Plan(query_length=4, key_length=4, causal=True),
        Plan(query_length=4, key_length=4, layout="length_first"),
        Plan(query_length=3, key_length=9, softcap=1.0),
        Plan(dtype="float64"),
        Plan(layout="packed", rank=3, query_lengths=(1, 2), kv_lengths=(3, 1), query_length=2, key_length=3),
    ]
    start = threading.Barrier(8)
    with Client(server.address) as one, Client(server.address) as two, Client(server.address) as three:
        clients = [one, two, three]

        def ask(thread: int) -> int:
            start.wait()
            batch = 1
            for turn in range(4):
                numbers = [thread * 1000 + turn * 100 + n + 1 for n in range(40)]
                cases = [_fingerprinted(kinds[number % len(kinds)], number) for number in numbers]
                futures = [case.submit(clients[n % 3], priority=n % 3 - 1) for n, case in enumerate(cases)]
                for number, future in zip(numbers, futures, strict=True):
                    result = future.result(timeout=60)
                    np.testing.assert_allclose(result.output, number, rtol=1e-5)
                    batch = max(batch, result.batch_size)
            return batch

        with ThreadPoolExecutor(8) as threads:
            largest = max(threads.map(ask, range(8)))
    assert largest > 1, "no request ever shared a batch, so this showed nothing"


def test_an_invalid_request_does_not_disturb_its_batch(client: Client) -> None:
    plan = Plan(query_length=4, key_length=6, causal=True)
    cases = [plan.case(seed) for seed in range(12)]
    alone = [case.attend(client) for case in cases]
    wrong = [replace(case, key=case.key[..., :-1]) for case in cases]
    futures = [(case.submit(client), bad.submit(client)) for case, bad in zip(cases, wrong, strict=True)]
    for (good, bad), expected in zip(futures, alone, strict=True):
        assert_same_results(good.result(), expected)
        with pytest.raises(ValueError, match="key"):
            bad.result()


def test_bits_do_not_depend_on_the_transport(server: Server, client: Client) -> None:
    """Unary and streamed calls give the same result, to the last bit."""
    with Client(server.address, transport="unary") as unary:
        for seed, (kind, dtype) in enumerate(EVERY_KIND):
            case = Plan(dtype=dtype, **SAME_KIND[kind]).case(seed)
            assert_same_results(case.attend(unary, return_lse=True), case.attend(client, return_lse=True))


def test_bits_do_not_depend_on_the_number_of_threads(start_server: Callable[..., Server]) -> None:
    """Neither for a request alone nor among many, although the threads divide the work differently."""
    asked = [Plan(dtype=dtype, **SAME_KIND[kind]).case(seed) for seed in (0, 1) for kind, dtype in EVERY_KIND]
    results = []
    for threads in (1, 2):
        with Client(start_server("--threads", str(threads)).address) as client:
            futures = [case.submit(client, return_lse=True) for case in asked]
            results.append([future.result() for future in futures])
            results.append([case.attend(client, return_lse=True) for case in asked])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert_same_results(one, other)


@EVERY_DTYPE
def test_bits_do_not_depend_on_whether_a_new_thread_computes(
    start_server: Callable[..., Server], client: Client, dtype: str
) -> None:
    """A server's first batches beside the event loop, and the same requests on it."""
    plan = Plan(
        dtype=dtype, batch=1, key_heads=1, query_length=35, key_length=35, head_dim=20, key_dim=20, value_dim=33
    )
    with Client(start_server("--inline-flops", "0").address) as beside:
        for seed in range(4):
            case = plan.case(seed)
            on_the_loop = case.attend(client, return_lse=True, return_scores="raw")
            assert_same_results(case.attend(beside, return_lse=True, return_scores="raw"), on_the_loop)
