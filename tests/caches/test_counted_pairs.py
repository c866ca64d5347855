"""The operations that a request is counted for: those of the pairs of a query and a key that lengths, causal masks and
windows allow, as the oracle has them; and its limit, which has what is computed where attention is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import messages
import numpy as np
import oracle
import pytest
from caller import Reference, attend_request
from cases import Case
from conftest import Server
from hypothesis import given
from hypothesis import strategies as st
from limits import LIMITS
from stores import store_of

import attnserve
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import anybody
from attnserve_server.caches.request import CachedRequest, read_attend
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.work import CacheHost
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.limits import RequestLimits

HEADS, WIDTH = 2, 8
PAIR = 2 * (WIDTH + WIDTH)
"""The operations of a query and a key that meet, in one head."""


def zeros(*shape: int) -> messages.Array:
    return np.zeros(shape, np.float32)


def host() -> CacheHost:
    """Caches without memory."""
    return CacheHost(store_of(16, 10, page_bytes=1 << 16), cast(Any, None), "")


def cached(case: Case, lengths: list[int], limits: RequestLimits = LIMITS, **returned: Any) -> CachedRequest:
    """A request for a case whose keys are in caches of these lengths."""
    caches = host()
    names = [
        caches.store.create(CacheShape(HEADS, WIDTH, WIDTH, 1, "float32"), None, monotonic()).name for _ in lengths
    ]
    message = attend_request(case, [Reference(name) for name in names], **returned).SerializeToString()
    request = read_attend(caches, anybody("here"), message, 0, len(message), limits)
    assert isinstance(request, CachedRequest)
    request.count(lengths)
    return request


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, list[int]]:
    """A case without masks, and how many keys each of its sequences has; its arrays have as many as the longest."""
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    lengths = draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    options: dict[str, Any] = {"causal": draw(st.sampled_from([False, "top_left", "bottom_right"]))}
    options["window"] = draw(st.none() | st.tuples(st.integers(-1, 5), st.integers(-1, 5)))
    if draw(st.booleans()):
        options["kv_lengths"] = [draw(st.integers(0, length)) for length in lengths]
    offsets = st.integers(-14, 14)
    options["query_offset"] = draw(st.none() | offsets | st.lists(offsets, min_size=batch, max_size=batch))
    key = zeros(batch, HEADS, max(lengths), WIDTH)
    return Case(zeros(batch, HEADS, queries, WIDTH), key, key, options), lengths


@given(drawn=cases())
def test_they_are_those_of_the_keys_that_queries_attend_to(drawn: tuple[Case, list[int]]) -> None:
    case, lengths = drawn
    options = {**case.options, "kv_lengths": case.options.get("kv_lengths", lengths)}
    of_caches = oracle.attend(case.query, case.key, case.value, **options).attended.sum()
    request = cached(case, lengths)
    assert request.extent.flops == PAIR * of_caches
    assert request.extent.cost >= request.effort >= request.extent.flops
    assert request.whole_effort >= request.extent.flops
    assert messages.read(attend_request(case)).extent.flops == PAIR * case.expected.attended.sum()


def test_those_of_packed_sequences_are_each_ones_own() -> None:
    query_lengths, kv_lengths = np.array([3, 4]), np.array([5, 2])
    options = {"layout": "packed", "query_lengths": query_lengths, "kv_lengths": kv_lengths, "causal": "bottom_right"}
    case = Case(zeros(7, HEADS, WIDTH), zeros(7, HEADS, WIDTH), zeros(7, HEADS, WIDTH), {**options, "window": (2, 0)})
    message = messages.attend(
        case.query,
        case.key,
        case.value,
        layout=pb.LAYOUT_PACKED,
        query_lengths=query_lengths,
        kv_lengths=kv_lengths,
        causal=True,
        alignment=pb.ALIGNMENT_BOTTOM_RIGHT,
        window=pb.Window(left=2, right=-1),
    )
    assert messages.read(message).extent.flops == PAIR * case.expected.attended.sum() == PAIR * HEADS * (3 * 3 + 3)


@pytest.mark.parametrize("options", [{"window": (15, 0)}, {"kv_lengths": [16]}], ids=["window", "kv_lengths"])
def test_a_cache_may_be_as_long_as_it_likes(options: dict[str, Any]) -> None:
    """What is read of it counts: for the limit, for what is admitted, and for whether other threads are to help."""
    case = Case(zeros(1, HEADS, 64, WIDTH), zeros(0), zeros(0), {**options, "causal": "bottom_right"})
    limits = replace(LIMITS, max_request_flops=10**6)
    short, long = (cached(case, [length], limits) for length in (100, 10**9))
    assert (short.extent.flops, short.extent.cost, short.effort) == (long.extent.flops, long.extent.cost, long.effort)
    with pytest.raises(InvalidRequest, match="FLOPs"):
        cached(Case(case.query, case.key, case.value), [10**9], limits)


def test_a_server_computes_what_is_few_operations_over_a_long_cache(start_server: Callable[..., Server]) -> None:
    server = start_server("--device", "cpu", "--cache-bytes", "1MiB", "--max-request-flops", "1e6")
    with attnserve.Client(server.address) as client:
        cache = client.create_cache(HEADS, WIDTH)
        cache.append(zeros(HEADS, 1000, WIDTH), zeros(HEADS, 1000, WIDTH))
        query = zeros(HEADS, 64, WIDTH)
        assert cache.attend(query, window=(15, 0)).output.shape == query.shape
        assert cache.attend(query, kv_lengths=[16]).output.shape == query.shape
        with pytest.raises(attnserve.InvalidRequestError, match="max_request_flops"):
            cache.attend(query)


def test_a_step_within_a_window_reads_what_the_window_holds() -> None:
    options = {"causal": "bottom_right"}
    whole = Case(zeros(1, HEADS, 1, WIDTH), zeros(0), zeros(0), options)
    windowed = Case(whole.query, whole.key, whole.value, {**options, "window": (2047, 0)})
    assert cached(windowed, [10**6]).effort == cached(whole, [2048]).effort


def test_it_is_counted_anew_where_lengths_and_offsets_are_others() -> None:
    """The caches have not changed since, but the contents of the request have."""
    case = Case(zeros(1, HEADS, 1, WIDTH), zeros(0), zeros(0), {"causal": "bottom_right", "kv_lengths": [16]})
    request = cached(case, [100])
    before = request.extent.flops
    twice = Case(case.query, case.key, case.value, {**case.options, "kv_lengths": [32]})
    request.payloads = cached(twice, [100]).payloads
    request.count([100])
    assert request.extent.flops == 2 * before


@pytest.mark.parametrize("returned", [{"return_scores": "raw"}, {"softcap": 2.0}], ids=["scores", "softcap"])
def test_what_is_written_out_counts_all_that_is_computed(returned: dict[str, Any]) -> None:
    """Scores for all keys, if they are returned; else those within reach of any query."""
    options = {"causal": "bottom_right", "window": (3, 0)} | {
        key: returned[key] for key in returned if key == "softcap"
    }
    case = Case(zeros(1, HEADS, 4, WIDTH), zeros(0), zeros(0), options)
    scores = returned.get("return_scores")
    request = cached(case, [100], return_scores=scores)
    assert request.extent.flops == PAIR * HEADS * 4 * (100 if scores else 7)


def test_the_limit_is_on_what_is_computed_where_attention_has_to_be_written_out() -> None:
    """NaN somewhere, and the kernel that skips what is out of reach gives way to one that does not."""
    case = Case(
        zeros(1, HEADS, 1000, WIDTH), zeros(1, HEADS, 1000, WIDTH), zeros(1, HEADS, 1000, WIDTH), {"window": (0, 0)}
    )
    message = attend_request(case).SerializeToString()
    limits = replace(LIMITS, max_request_flops=HEADS * 1000 * 1000 * 64 - 1)
    assert messages.read(attend_request(case)).extent.flops == PAIR * HEADS * 1000
    with pytest.raises(InvalidRequest, match="FLOPs"):
        messages.read_request(message, limits=limits)
    with pytest.raises(InvalidRequest, match="FLOPs"):
        cached(case, [1000], limits)
