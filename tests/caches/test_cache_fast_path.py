"""Requests to caches that are answered at once: the same bits as the ordinary way, and no effect if they cannot be."""

from __future__ import annotations

from random import Random
from time import monotonic
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepping
from stepping import Stepping, another, assert_same, device, message_of, step, stepping_

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.caches.shape import CacheShape
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import FailedPrecondition, NotFound
from attnserve_server.native import library

__all__ = ["device", "stepping_"]  # fixtures
pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"return_lse": True, "causal": True}, {"scale": 0.3, "softcap": 2.0}])
def test_steps_have_the_bits_of_the_way_of_others(
    stepping_: Stepping, append: bool, storage: Any, dtype: Any, options: dict[str, Any]
) -> None:
    shape = CacheShape(2, 8, 8, 2, storage)
    one, other = (stepping_.create(5, shape, seed=7) for _ in range(2))
    for number in range(20):  # pages are filled meanwhile
        length = 5 + number * append
        asked, twin = (
            step(
                cache,
                seed=number,
                append=append,
                expected=[length],
                layer=1,
                heads=4,
                dtype=dtype,
                shape=shape,
                **options,
            )
            for cache in (one, other)
        )
        if number == 0:
            assert stepping_.learn(asked) == [True]
        answer = stepping_.answer(message_of(asked))
        expected = stepping_.ordinary(twin)
        assert answer is not None
        assert_same(answer[0], expected)
        assert list(answer[0].cache_lengths) == [length + append]
    assert one.lengths == other.lengths == [5, 5 + 20 * append]


def test_any_steps_and_what_happens_between_them_are_as_without_it(device: CpuDevice) -> None:
    """Two servers get the same requests. One answers at once whatever it can; nothing visible differs between them."""
    fast, ordinary = another(device), another(device)
    random, answered = Random(5), 0
    both = [[each.create(count, seed=count) for each in (fast, ordinary)] for count in (0, 1, 7, 8, 30)]
    for number in range(600):
        match random.randrange(12):
            case 0 if len(both) < 12:
                source = random.choice(both)
                both.append(
                    [w.store.fork_one(c, None, monotonic()) for w, c in zip((fast, ordinary), source, strict=True)]
                )
            case 1:
                pair = random.choice(both)
                length = random.randrange(pair[0].length(0) + 1)
                for world, cache in zip((fast, ordinary), pair, strict=True):
                    world.store.truncate_one(cache, length)
            case _:
                answered += _ask_both(random, fast, ordinary, both, number)
        assert [pair[0].lengths for pair in both] == [pair[1].lengths for pair in both]
        assert fast.store.used_bytes == ordinary.store.used_bytes
        assert fast.store.tokens == ordinary.store.tokens
        assert fast.store.counts == ordinary.store.counts
    fast.assert_at_rest()
    assert answered > 300


def _ask_both(random: Random, fast: Stepping, ordinary: Stepping, both: list[Any], number: int) -> bool:
    """Sends both the same requests and compares. Returns whether one answered at once."""
    drawn = [
        (
            random.sample(range(len(both)), random.choice((1, 1, 1, 2))),
            {
                "seed": 1000 * number + place,
                "append": random.random() < 0.6,
                "causal": random.random() < 0.5,
                "return_lse": random.random() < 0.3,
            },
            random.random(),
        )
        for place in range(random.choice((1, 1, 1, 3)))
    ]
    asked: list[list[pb.AttendRequest]] = []
    for world in (0, 1):
        requests = []
        for members, options, chance in drawn:
            caches = [both[member][world] for member in members]
            expected = [cache.length(0) + (chance > 0.95) for cache in caches] if chance > 0.3 else []
            requests.append(step(*caches, expected=expected, **options))
        asked.append(requests)
    message = message_of(*asked[0])
    answers = fast.answer(message)
    expected_answers = [ordinary.ordinary(request) for request in asked[1]]
    if answers is None:
        others = [fast.ordinary(request) for request in asked[0]]
        if fast.messages.read_message(message, 64).requests < 0:
            fast.learn(*[r for r, other in zip(asked[0], others, strict=True) if isinstance(other, pb.AttendResponse)])
        for other, expected in zip(others, expected_answers, strict=True):
            if isinstance(expected, pb.AttendResponse) and isinstance(other, pb.AttendResponse):
                assert_same(other, expected)
            else:
                assert other == expected
        return False
    for answer, expected in zip(answers, expected_answers, strict=True):
        assert_same(answer, expected)
    return True


def test_what_expects_another_length_is_for_others(stepping_: Stepping) -> None:
    cache = stepping_.create(5)
    stepping_.learn(step(cache, append=True, expected=[5]))
    for length in (4, 6):
        asked = step(cache, append=True, expected=[length])
        assert stepping_.answer(message_of(asked)) is None
        assert stepping_.ordinary(asked) is FailedPrecondition
    assert cache.lengths == [5]
    assert stepping_.answer(message_of(step(cache, append=True, expected=[5]))) is not None
    assert stepping_.answer(message_of(step(cache, append=True, expected=[5]))) is None  # it has been appended already
    assert cache.lengths == [6]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_for_others_and_is_appended_once(stepping_: Stepping, dtype: Any, value: float) -> None:
    shape = CacheShape(2, 8, 8, 1, np.dtype(dtype).name)
    # The page is full: the next one has to be given back.
    tokens = shape.tokens_per_page(stepping.PAGE_BYTES)
    cache, other = stepping_.create(tokens, shape), stepping_.create(tokens, shape)
    asked, twin = (step(each, append=True, expected=[tokens], dtype=dtype) for each in (cache, other))
    stepping_.learn(asked)
    used = stepping_.store.used_bytes
    for request in (asked, twin):
        request.value.data = np.full(16, value, dtype).tobytes()
    assert stepping_.answer(message_of(asked)) is None
    assert cache.lengths == [tokens]
    assert stepping_.store.used_bytes == used
    stepping_.assert_at_rest()
    found, expected = stepping_.ordinary(asked), stepping_.ordinary(twin)
    assert isinstance(found, pb.AttendResponse)
    assert_same(found, expected)
    assert cache.lengths == [tokens + 1]


def test_a_fork_never_sees_what_its_sibling_appends(stepping_: Stepping) -> None:
    cache = stepping_.create(5)
    fork = stepping_.store.fork_one(cache, None, monotonic())
    before = stepping_.ordinary(step(fork, seed=3))
    asked = step(cache, append=True, expected=[5])
    stepping_.learn(asked)
    assert stepping_.answer(message_of(asked)) is not None
    assert fork.lengths == [5]
    after = stepping_.ordinary(step(fork, seed=3))
    assert isinstance(after, pb.AttendResponse)
    assert_same(after, before)


def test_several_caches_in_a_request_and_several_requests_in_a_message(stepping_: Stepping) -> None:
    caches = [stepping_.create(count, seed=count) for count in (0, 3, 300)]
    twins = [stepping_.create(count, seed=count) for count in (0, 3, 300)]
    asked = [step(*caches[:2], seed=1, append=True), step(caches[2], seed=2), step(caches[2], seed=3)]
    stepping_.learn(*asked[:2])
    answers = stepping_.answer(message_of(*asked))
    expected = [step(*twins[:2], seed=1, append=True), step(twins[2], seed=2), step(twins[2], seed=3)]
    assert answers is not None
    assert [list(answer.cache_lengths) for answer in answers] == [[1, 4], [300], [300]]
    for answer, request in zip(answers, expected, strict=True):
        assert_same(answer, stepping_.ordinary(request))


def test_who_has_to_wait_for_another_in_the_message_goes_with_the_others(stepping_: Stepping) -> None:
    cache, other = stepping_.create(3), stepping_.create(3)
    append, look = step(cache, append=True), step(cache)
    stepping_.learn(append, look, step(cache, other))
    for requests in ((append, look), (look, append), (append, append)):
        assert stepping_.answer(message_of(*requests)) is None
    assert stepping_.answer(message_of(step(cache, cache))) is None  # not allowed
    assert cache.lengths == [3]
    assert stepping_.answer(message_of(look, look)) is not None
    assert stepping_.answer(message_of(append, step(other, append=True))) is not None


def test_caches_of_others_and_such_as_are_not_there_are_for_others(stepping_: Stepping) -> None:
    mine, theirs = stepping_.create(3, owner="me"), stepping_.create(3, owner="them")
    stepping_.learn(step(mine), owner="me")
    assert stepping_.answer(message_of(step(mine)), "me") is not None
    for _ in range(2):  # requests to mine have been kept
        for owner, cache in (("me", theirs), ("them", mine), (None, mine), ("me", "-" * 24)):
            assert stepping_.answer(message_of(step(cache)), owner) is None
    asked = message_of(step(mine))
    assert stepping_.answer(asked.replace(mine.name.encode(), b"\xff" * 24), "me") is None
    stepping_.store.delete(mine)
    assert stepping_.answer(asked, "me") is None
    assert stepping_.ordinary(step(mine), "me") is NotFound
    assert stepping_.store.tokens == 3


def test_a_lease_is_renewed_and_one_that_has_ended_is_at_its_end(stepping_: Stepping) -> None:
    cache = stepping_.create(3, ttl=60.0)
    stepping_.learn(step(cache))
    for _ in range(2):
        cache.expires = soon = monotonic() + 30.0
        assert stepping_.answer(message_of(step(cache))) is not None
        assert cache.expires > soon
    cache.expires = monotonic() - 1.0
    assert stepping_.answer(message_of(step(cache))) is None
    assert stepping_.ordinary(step(cache)) is NotFound


def test_what_somebody_else_uses_is_waited_for(stepping_: Stepping) -> None:
    cache = stepping_.create(3)
    stepping_.learn(step(cache))
    for _ in range(2):
        reservation = stepping_.store.reserve([(cache, 0, 1)], monotonic())
        assert stepping_.answer(message_of(step(cache))) is None
        stepping_.store.cancel(reservation)
        assert stepping_.answer(message_of(step(cache))) is not None


def test_a_full_pool_is_for_others(device: CpuDevice) -> None:
    full = another(device, pages=2)
    cache, other = full.create(8), full.create(7)
    asked = step(cache, append=True)
    full.learn(asked)
    assert full.answer(message_of(asked)) is None
    assert full.answer(message_of(step(other, append=True))) is not None
    assert full.answer(message_of(step(other, append=True), asked)) is None
    assert (cache.lengths, other.lengths) == ([8], [8])
    full.assert_at_rest()


def test_contents_of_lengths_and_positions_are_read_each_time(stepping_: Stepping) -> None:
    cache, other = stepping_.create(9), stepping_.create(9)
    for number, (length, offset) in enumerate([(9, 8), (3, 5), (0, -2), (9, 0)]):
        options = {
            "kv_lengths": np.array([length]),
            "query_offset": np.array([offset]),
            "causal": True,
        }
        asked, twin = (step(each, seed=number, **options) for each in (cache, other))
        if not number:
            assert stepping_.learn(asked) == [True]
        answers = stepping_.answer(message_of(asked))
        assert answers is not None
        assert_same(answers[0], stepping_.ordinary(twin))
    assert (
        stepping_.answer(message_of(step(cache, kv_lengths=np.array([10]), query_offset=np.array([0]), causal=True)))
        is None
    )


def test_more_than_may_be_computed_inline_takes_the_ordinary_path(stepping_: Stepping) -> None:
    cache = stepping_.create(100)
    stepping_.learn(step(cache))
    message = message_of(step(cache))
    cost = stepping_.read(step(cache).SerializeToString()).extent.cost
    assert stepping_.turn(message, most=cost - 1) is None
    turn = stepping_.turn(message, most=cost)
    assert turn is not None
    assert turn.flops == stepping_.read(step(cache).SerializeToString()).extent.flops
    turn.end(failed=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whether_pages_are_finite_is_known_as_elsewhere(stepping_: Stepping, dtype: Any) -> None:
    """Pages shared by several caches are read once only where that is known."""
    shape = CacheShape(2, 8, 8, 1, np.dtype(dtype).name)
    for bad in ("key", "value", None):
        cache = stepping_.create(0, shape)
        requests = [step(cache, seed=seed, append=True, dtype=dtype) for seed in range(3)]
        stepping_.learn(requests[0])
        if bad is not None:
            array = stepping.messages.array(getattr(requests[1], bad)).copy()
            array[0, 1, 0, 7] = np.inf
            getattr(requests[1], bad).data = array.tobytes()
        found = []
        for request in requests:
            turn = stepping_.turn(message_of(request))
            assert turn is not None
            turn.end(failed=False)
            found.append(stepping_.host.pages.finite.leading(np.array(cache.pages(0), np.int32)) == 1)
        assert found == [True, bad is None, bad is None]
