"""Requests to caches on an engine's fast path: learnt, answered and counted like all others."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from time import perf_counter

import messages
import pytest
from engine_bench import Bench, torch_threads
from layouts import learn
from stepping import Stepping, caller, message_of, step

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library
from attnserve_server.native.messages import Messages
from attnserve_server.rpc import fast_path
from attnserve_server.rpc.fast_path import Answered, Declined, FastPath

__all__ = ["torch_threads"]  # a fixture
pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")

INLINE = 10**7
ME = caller("me")


class Path:
    """An engine with caches, the caches, and the engine's fast path."""

    def __init__(self, device: CpuDevice) -> None:
        assert device.native is not None
        self.bench = Bench(device)
        self.caches = Stepping(device, Messages(device.native.library, lambda effort: None))
        of = self.caches.messages
        self.path = FastPath(self.bench.engine, self.bench.metrics, of, 64, 1 << 20, self.caches.fast_path)

    def answer(self, request: pb.AttendRequest) -> pb.AttendResponse | None:
        """The fast path's answer to a message with one call, which is then sent; None if the request has to take the
        ordinary path.
        """
        message = message_of(request)
        answered = self.path.answer_message(ME, message, perf_counter(), ())
        if isinstance(answered, Answered):
            self.bench.engine.release(answered)
            return pb.AttendStreamResponse.FromString(answered.message).replies[0].attend
        if answered.learns:
            begin = message.index(request.SerializeToString())
            self.path.learn_from(self.caches.read(message, "me", begin), message, begin)
        return None


@pytest.fixture
async def path(torch_threads: None) -> AsyncIterator[Path]:
    device = CpuDevice(1, INLINE, library.best("auto"))
    path = Path(device)
    yield path
    path.caches.assert_at_rest()
    assert (path.bench.admission.requests, path.bench.admission.bytes) == (0, 0)
    device.close()


async def test_steps_are_answered_at_once_from_the_third_on(path: Path) -> None:
    cache, twin = (path.caches.create(5, owner="me") for _ in range(2))
    for number in range(12):
        expected = path.caches.ordinary(step(twin, seed=number, append=True), "me")
        request = step(cache, seed=number, append=True, expected=[5 + number])
        answer = path.answer(request)
        assert (answer is None) == (number < 2)
        if answer is None:
            path.caches.ordinary(request, "me")
            continue
        assert isinstance(expected, pb.AttendResponse)
        assert answer.output == expected.output
        assert list(answer.cache_lengths) == [6 + number]
        assert answer.timings.compute_ns > 0
        assert answer.timings.staging_ns > 0
        assert answer.batch_size == 1


async def test_a_length_that_takes_more_bytes_is_another_layout(path: Path) -> None:
    cache = path.caches.create(120, owner="me")
    answered = []
    for length in range(120, 140):
        request = step(cache, append=True, expected=[length])
        answered.append(path.answer(request) is not None)
        if not answered[-1]:
            path.caches.ordinary(request, "me")
    assert answered == [number not in (0, 1, 8, 9) for number in range(20)]


async def test_they_are_counted_like_others(path: Path) -> None:
    caches = [path.caches.create(count, owner="me") for count in (5, 9)]
    request = step(*caches, append=True)
    path.caches.learn(request, owner="me")
    read = path.caches.read(request.SerializeToString(), "me")
    appends = path.caches.store.counts.appends
    assert path.answer(request) is not None
    count = path.bench.count
    assert count("attnserve_query_tokens_total") == read.extent.query_tokens == 2
    assert count("attnserve_flops_total") == read.extent.flops > 0
    assert count("attnserve_kernel_calls_total", kernel=library.NAME) == 2
    assert count("attnserve_batch_requests_count") == count("attnserve_batch_requests_sum") == 1
    for phase in ("decode", "queue", "staging", "compute", "encode"):
        assert count("attnserve_request_phase_duration_seconds_count", phase=phase) == 1
    assert count("attnserve_request_phase_duration_seconds_sum", phase="staging") > 0
    assert path.caches.store.counts.appends == appends + 2


async def test_several_are_staged_together_and_each_cache_is_a_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As elsewhere: a request without caches counts as one kernel call, and staging time is that of the whole batch."""
    caches = [path.caches.create(count, owner="me") for count in (5, 9)]
    other, steps = messages.random_attend(0, batch=3), step(*caches, append=True)
    learn(path.caches.messages, other.SerializeToString())
    path.caches.learn(steps, owner="me")
    seconds = itertools.count()
    monkeypatch.setattr(fast_path, "perf_counter", lambda: float(next(seconds)))
    answered = path.path.answer_message(ME, message_of(other, steps), 0.0, ())
    assert isinstance(answered, Answered)
    path.bench.engine.release(answered)
    for reply in pb.AttendStreamResponse.FromString(answered.message).replies:
        assert reply.attend.timings.staging_ns == 10**9
    assert path.bench.count("attnserve_request_phase_duration_seconds_sum", phase="staging") == 2
    assert path.bench.count("attnserve_kernel_calls_total", kernel=library.NAME) == 1 + 2


async def test_a_unary_step_is_answered_at_once(path: Path) -> None:
    cache = path.caches.create(5, owner="me")
    path.caches.learn(step(cache, append=True), owner="me")
    message = step(cache, append=True).SerializeToString()
    answered = path.path.answer_request(ME, message, perf_counter(), None)
    assert isinstance(answered, Answered)
    path.bench.engine.release(answered)
    assert list(pb.AttendResponse.FromString(answered.message).cache_lengths) == [6]
    assert isinstance(path.path.answer_request(caller("them"), message, perf_counter(), None), Declined)


@pytest.mark.parametrize("error", [MemoryError, ArithmeticError, RuntimeError])
async def test_whatever_fails_nothing_of_it_remains(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    cache = path.caches.create(8, owner="me")
    path.caches.learn(step(cache, append=True), owner="me")
    used = path.caches.store.used_bytes

    def compute(*arguments: object) -> int:
        assert cache.lengths == [9]
        raise error

    monkeypatch.setattr(path.caches.messages, "compute", compute)
    if error is RuntimeError:
        with pytest.raises(RuntimeError):
            path.answer(step(cache, append=True))
    else:
        assert path.answer(step(cache, append=True)) is None
    assert cache.lengths == [8]
    assert path.caches.store.used_bytes == used


async def test_a_message_that_is_cut_short_is_for_others(path: Path) -> None:
    cache = path.caches.create(5, owner="me")
    path.caches.learn(step(cache), owner="me")
    message = step(cache).SerializeToString()
    assert isinstance(path.path.answer_request(ME, message[:-4], perf_counter(), None), Declined)
    assert path.answer(step(cache)) is not None


async def test_much_is_not_learnt(path: Path) -> None:
    cache = path.caches.create(5, owner="me")
    request = step(cache, heads=1000)
    assert path.caches.read(request.SerializeToString(), "me").extent.cost < INLINE
    assert [path.answer(request) is not None for _ in range(3)] == [False, False, True]
    long = path.caches.create(1500, owner="me")
    request = step(long, heads=1000)
    assert path.caches.read(request.SerializeToString(), "me").extent.cost > INLINE
    assert [path.answer(request) for _ in range(4)] == [None] * 4
