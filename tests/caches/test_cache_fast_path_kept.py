"""Requests to caches on the fast path: which layouts are learnt, and what is kept of past requests."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest
import stepping
from stepping import SHAPE, Stepping, assert_same, device, message_of, step, stepping_

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.caches import fast_path
from attnserve_server.caches.layer import CacheLayer, PageTable
from attnserve_server.caches.page_memory import PageAddresses
from attnserve_server.caches.request import CachedRequest
from attnserve_server.caches.shape import CacheShape
from attnserve_server.native import library
from attnserve_server.native.layouts import MOST_RESULT_BYTES, MOST_SEQUENCES

__all__ = ["device", "stepping_"]  # fixtures
pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")


@pytest.mark.parametrize(
    "request_",
    [
        step("-", mask=np.ones((1, 1, 1, 1), bool)),
        step("-", sinks=np.zeros(2, np.float32)),
        step("-", dtype=np.float64),
        step("-", return_scores=pb.SCORE_STAGE_WEIGHTS),
    ],
    ids=["mask", "sinks", "float64", "scores"],
)
def test_what_there_is_more_to_do_for_is_not_learnt(stepping_: Stepping, request_: pb.AttendRequest) -> None:
    request_.caches[0].name = stepping_.create(1).name
    assert stepping_.learn(request_) == [False]


def test_more_than_the_library_has_room_for_is_not_learnt(stepping_: Stepping) -> None:
    caches = [stepping_.create() for _ in range(MOST_SEQUENCES + 1)]
    assert stepping_.learn(step(*caches), step(*caches[1:])) == [False, True]
    rows = MOST_RESULT_BYTES // (8 * 4)
    assert stepping_.learn(step(caches[0], heads=rows + 2), step(caches[0], heads=rows - 2)) == [False, True]


def test_several_tokens_at_once_are_not_learnt(stepping_: Stepping) -> None:
    cache, tokens = stepping_.create(1), np.zeros((1, 2, 3, 8), np.float32)
    request = step(cache)
    for field in ("key", "value"):
        getattr(request, field).CopyFrom(stepping.messages.tensor(tokens))
    assert stepping_.learn(request) == [False]


def test_caches_of_another_shape_that_are_asked_alike_are_for_others(stepping_: Stepping) -> None:
    cache, other = stepping_.create(3), stepping_.create(3, CacheShape(2, 8, 8, 1, "float16"))
    stepping_.learn(step(cache))
    assert stepping_.answer(message_of(step(other))) is None
    assert stepping_.answer(message_of(step(cache))) is not None


def test_a_request_that_is_kept_is_not_taken_for_one_of_another_shape(stepping_: Stepping) -> None:
    """Two layouts read alike, and the one that was found first is forgotten."""
    cache, other = stepping_.create(5, CacheShape(2, 8, 8, 1, "bfloat16")), stepping_.create(5)
    first, *_ = stepping_.learn(step(cache), step(other))
    assert first
    assert stepping_.answer(message_of(step(cache))) is not None
    key = stepping_.fast_path.key_of(_read(stepping_, step(cache)))
    others = 0
    while stepping_.messages.knows(key):
        others += 1
        stepping_.learn(step(other, scale=1.0 + others))
    assert stepping_.answer(message_of(step(cache))) is None
    answers, expected = stepping_.answer(message_of(step(other))), stepping_.ordinary(step(other))
    assert answers is not None
    assert_same(answers[0], expected)


def test_a_request_that_is_kept_is_not_taken_for_one_of_another_layer_or_problem(stepping_: Stepping) -> None:
    """Though all of them are to one cache, and of the same size in bytes."""
    cache = stepping_.create(9, CacheShape(2, 8, 8, 3, "float32"))
    alignments = (pb.ALIGNMENT_TOP_LEFT, pb.ALIGNMENT_BOTTOM_RIGHT)
    requests = [step(cache, layer=layer, alignment=each, causal=True) for layer in (1, 2) for each in alignments]
    assert stepping_.learn(*requests) == [True] * 4
    for request in requests * 2:
        answers = stepping_.answer(message_of(request))
        assert answers is not None
        assert_same(answers[0], stepping_.ordinary(request))


def test_a_request_that_is_kept_is_taken_once_for_several_in_a_message(stepping_: Stepping) -> None:
    """They differ in what they read of the same cache: each is a request of its own."""
    cache = stepping_.create(9)
    asked = [step(cache, seed=length, kv_lengths=np.array([length])) for length in (9, 2, 5)]
    stepping_.learn(asked[0])
    assert stepping_.answer(message_of(asked[0])) is not None
    found = stepping_.answer(message_of(*asked))
    assert found is not None
    for reply, request in zip(found, asked, strict=True):
        assert_same(reply, stepping_.ordinary(request))


def test_a_request_that_is_kept_costs_what_its_cache_has_come_to(stepping_: Stepping) -> None:
    cache = stepping_.create(8)
    append = step(cache, append=True)
    stepping_.learn(append)
    most = _read(stepping_, append).extent.cost
    for expected in ([9], [9]):
        turn = stepping_.turn(message_of(append), most=most)
        if turn is not None:
            turn.end(failed=False)
        assert cache.lengths == expected


def _read(stepping_: Stepping, request: pb.AttendRequest) -> CachedRequest:
    read = stepping_.read(request.SerializeToString())
    assert isinstance(read, CachedRequest)
    return read


def test_requests_that_are_kept_hold_no_message_and_are_bounded(
    stepping_: Stepping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of caches that they are to, which may be many, and deleted."""
    monkeypatch.setattr(fast_path, "MOST_KEPT", 4)
    caches, most = [stepping_.create(3, SHAPE) for _ in range(9)], 0
    stepping_.learn(step(caches[0]), step(*caches[:2]))
    for first, second in pairwise(caches * 2):
        for requests in ([step(first)], [step(first, second)], [step(first), step(first)]):
            assert stepping_.answer(message_of(*requests)) is not None
            kept = stepping_.fast_path._kept.values()
            most = max(most, sum(len(request.uses) for request in kept))
            assert all(request.payloads.buffer == b"" for request in kept)
    assert most == 4


def test_caches_that_are_gone_take_the_memory_of_one_layer(stepping_: Stepping) -> None:
    """Although requests to them are kept, and their leases are forgotten later."""
    shape = CacheShape(2, 8, 8, 3, "float32")
    caches = [stepping_.create(3, shape, ttl=60.0) for _ in range(9)]
    stepping_.learn(step(caches[0]))
    before = _layers()
    for cache in caches:
        assert stepping_.answer(message_of(step(cache))) is not None
        stepping_.store.delete(cache)
    assert stepping_.fast_path._kept
    assert before - _layers() == 9 * 2, "each keeps one, for all"


def _layers() -> int:
    """How many layers of caches are in memory."""
    return sum(type(each) is CacheLayer for each in gc.get_objects())


def test_a_bug_leaves_caches_as_they_were(stepping_: Stepping, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = stepping_.create(8), stepping_.create(8)
    request = step(cache, append=True)
    stepping_.learn(request)
    addresses = stepping_.host.pages.memory.addresses

    def fails_for_the_other(table: PageTable) -> PageAddresses:
        if table is other.table(0):
            raise RuntimeError
        return addresses(table)

    monkeypatch.setattr(stepping_.host.pages.memory, "addresses", fails_for_the_other)
    with pytest.raises(RuntimeError):
        stepping_.turn(message_of(request, step(other, append=True)))
    stepping_.assert_at_rest()
    assert cache.lengths == other.lengths == [8]
