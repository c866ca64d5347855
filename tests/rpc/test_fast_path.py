"""The fast path: its answers, and how it counts them, equal those of the ordinary path, which takes whatever it does
not answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import calls
import messages
import numpy as np
import pytest
from engine_bench import Bench, HeldDevice, torch_threads
from layouts import learn
from stepping import Stepping

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import ALL_ROLES, Caller
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library
from attnserve_server.native.messages import Messages
from attnserve_server.rpc.fast_path import MOST_CANDIDATES, Answered, Declined, FastPath

__all__ = ["torch_threads"]  # a fixture
pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernel is here")

CALLER = Caller(None, ALL_ROLES, "me")
INLINE = 10**7


def message_of(*requests: pb.AttendRequest, first_id: int = 1, **fields: Any) -> bytes:
    """A stream message with a call for each of these requests."""
    numbered = enumerate(requests, first_id)
    return pb.AttendStreamRequest(
        calls=[pb.AttendStreamCall(id=number, attend=request, **fields) for number, request in numbered]
    ).SerializeToString()


class Path:
    """An engine and its fast path."""

    def __init__(self, device: CpuDevice, **limits: Any) -> None:
        native = library.best("auto")
        assert native is not None
        self.device = device
        self.bench = Bench(device, **limits)
        self.messages = Messages(native, lambda effort: None)
        self.path = self.of_at_most(1 << 20)

    def of_at_most(self, reply_bytes: int) -> FastPath:
        """A fast path to the engine, whose replies are no longer than that."""
        caches = Stepping(self.device, self.messages).fast_path
        return FastPath(self.bench.engine, self.bench.metrics, self.messages, 64, reply_bytes, caches)

    def answer(self, message: bytes, in_flight: tuple[int, ...] = ()) -> Answered | None:
        found = self.path.answer_message(CALLER, message, perf_counter(), in_flight)
        return found if isinstance(found, Answered) else None

    def answer_unary(self, request: pb.AttendRequest, timeout: float | None = None) -> Answered | None:
        found = self.path.answer_request(CALLER, request.SerializeToString(), perf_counter(), timeout)
        return found if isinstance(found, Answered) else None

    def comes(self, request: pb.AttendRequest) -> None:
        """Sends a request through the ordinary path, which may teach its layout."""
        message = request.SerializeToString()
        declined = self.path.answer_request(CALLER, message, perf_counter(), None)
        assert isinstance(declined, Declined)
        if declined.learns:
            self.path.learn_from(messages.read_request(message), message, 0)

    def learn(self, *requests: pb.AttendRequest) -> None:
        """Sends each request twice."""
        for request in requests:
            self.comes(request)
            self.comes(request)

    def replies(self, answered: Answered | None) -> list[pb.AttendStreamReply]:
        """The replies of an answer, once it has been sent."""
        assert answered is not None
        self.bench.engine.release(answered)
        return list(pb.AttendStreamResponse.FromString(answered.message).replies)


@pytest.fixture
def device(torch_threads: None) -> Iterator[CpuDevice]:
    device = CpuDevice(1, INLINE, library.best("auto"))
    yield device
    device.close()


@pytest.fixture
def held(torch_threads: None) -> Iterator[HeldDevice]:
    device = HeldDevice(-1)
    device.inline_flops = INLINE
    yield device
    device.may_run.set()
    device.close()


async def test_a_layout_that_has_come_twice_is_answered_at_once(device: CpuDevice) -> None:
    path, requests = Path(device), [messages.random_attend(seed, causal=True) for seed in range(5)]
    path.comes(requests[0])
    path.comes(requests[1])
    answered = path.answer(message_of(*requests, first_id=7))
    assert answered is not None
    assert answered.requests == 5
    assert path.bench.admission.requests == 5  # until the answer has been sent
    assert not await path.bench.engine.drain(0.0)
    replies = path.replies(answered)
    assert await path.bench.engine.drain(0.0)
    assert [reply.id for reply in replies] == [7, 8, 9, 10, 11]
    for reply, request in zip(replies, requests, strict=True):
        calls.assert_answers(reply.attend, request)
        assert reply.attend.batch_size == 5
        assert reply.attend.timings.compute_ns > 0
    assert (path.bench.admission.requests, path.bench.admission.bytes) == (0, 0)


async def test_of_what_is_answered_the_reply_alone_counts_until_it_has_been_sent(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(1, 1, kv_length=1000)
    path.learn(request)
    answered = path.answer(message_of(request, request))
    assert answered is not None
    assert answered.size == path.bench.admission.bytes == 2 * len(answered.message)
    assert path.replies(answered)
    assert (path.bench.admission.requests, path.bench.admission.bytes) == (0, 0)


async def test_it_has_the_bits_of_the_other_way_and_is_counted_like_it(device: CpuDevice) -> None:
    requests = [messages.random_attend(seed, 6, return_lse=True) for seed in range(3)]
    other, path = Bench(device), Path(device)
    path.learn(requests[0])
    replies = path.replies(path.answer(message_of(*requests)))
    outcomes = await other.outcomes([other.submit(request) for request in requests])
    for reply, outcome in zip(replies, outcomes, strict=True):
        assert reply.attend.output.data == bytes(outcome.result.output)  # type: ignore[union-attr]
        assert reply.attend.lse.data == bytes(outcome.result.lse)  # type: ignore[union-attr,arg-type]
    for name in ("query_tokens_total", "flops_total", "batch_requests_sum", "batch_requests_count", "batch_flops_sum"):
        assert path.bench.count(f"attnserve_{name}") == other.count(f"attnserve_{name}") > 0
    assert path.bench.count("attnserve_kernel_calls_total", kernel=library.NAME) == 3
    name = "attnserve_request_phase_duration_seconds"
    for phase in ("decode", "queue", "staging", "compute", "encode"):
        assert path.bench.count(f"{name}_count", phase=phase) == 3
    assert path.bench.engine.worker.busy_seconds == pytest.approx(path.bench.count(f"{name}_sum", phase="compute") / 3)


async def test_a_unary_request_is_answered_at_once(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(3)
    path.learn(request)
    for timeout in (None, 60.0):
        answered = path.answer_unary(request, timeout)
        assert answered is not None
        path.bench.engine.release(answered)
        calls.assert_answers(pb.AttendResponse.FromString(answered.message), request)
    assert path.answer_unary(request, 1e-3) is None  # the deadline logic decides whether that is enough time


async def test_nothing_is_answered_while_the_device_computes_or_something_waits(held: HeldDevice) -> None:
    path, request = Path(held), messages.random_attend(1)
    message = message_of(request)
    path.learn(request)
    running = path.bench.submit(messages.random_attend(2, 256, heads=8, width=64))  # not on the event loop
    assert path.answer(message) is path.answer_unary(request) is None  # it waits
    held.may_run.clear()
    await held.until_entered()
    assert path.answer(message) is path.answer_unary(request) is None  # it runs
    held.may_run.set()
    await path.bench.outcome(running)
    assert len(path.replies(path.answer(message))) == 1


async def test_nothing_is_answered_by_a_server_that_takes_nothing(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(1)
    path.learn(request)
    assert await path.bench.engine.drain(0.0)
    assert path.answer(message_of(request)) is path.answer_unary(request) is None


async def test_nothing_is_answered_where_everything_waits_for_others(device: CpuDevice) -> None:
    path, request = Path(device, max_wait=0.01), messages.random_attend(1)
    message = request.SerializeToString()
    assert learn(path.messages, message)
    assert path.answer(message_of(request)) is None


@pytest.mark.parametrize(
    ("message", "in_flight"),
    [
        (message_of(messages.random_attend(1)), (1,)),
        (message_of(messages.random_attend(1)) + message_of(messages.random_attend(2)), ()),
        (message_of(messages.random_attend(1), timeout={"nanos": 1000}), ()),
        (message_of(*[messages.random_attend(1)] * 65), ()),
        (message_of(messages.random_attend(1)) + b"\x12\x01\x05", ()),
    ],
    ids=["id in flight", "an id twice", "little time", "many requests", "ids to cancel"],
)
async def test_what_others_have_something_to_say_to_goes_to_them(
    device: CpuDevice, message: bytes, in_flight: tuple[int, ...]
) -> None:
    path = Path(device)
    path.learn(messages.random_attend(1))
    assert path.answer(message, in_flight) is None
    assert (path.bench.admission.requests, path.bench.admission.bytes) == (0, 0)
    assert len(path.replies(path.answer(message_of(messages.random_attend(1)), (2,)))) == 1


async def test_what_is_not_finite_goes_the_other_way(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(1)
    path.learn(request)
    array = messages.array(request.value).copy()
    array[0, 0, 1, 1] = np.inf
    request.value.data = array.tobytes()
    assert path.answer(message_of(request)) is None
    assert (path.bench.admission.requests, path.bench.admission.bytes) == (0, 0)


async def test_want_of_memory_goes_the_other_way(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    path, request = Path(device), messages.random_attend(1)
    path.learn(request)

    def compute(*arguments: object) -> int:
        raise MemoryError

    monkeypatch.setattr(path.messages, "compute", compute)
    assert path.answer(message_of(request)) is None
    assert path.bench.admission.requests == 0


async def test_more_than_is_computed_on_the_loop_goes_the_other_way(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(1, 64, heads=8, width=64)
    cost = messages.read(request).extent.cost
    path.learn(request)
    fitting = INLINE // cost
    assert fitting >= 1
    assert len(path.replies(path.answer(message_of(*[request] * fitting)))) == fitting
    assert path.answer(message_of(*[request] * (fitting + 1))) is None


async def test_larger_answers_than_a_reply_may_be_go_the_other_way(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(1)
    path.learn(request)
    narrow = path.of_at_most(messages.read(request).extent.reply_bytes - 1)
    message = message_of(request)
    assert isinstance(narrow.answer_message(CALLER, message, perf_counter(), ()), Declined)
    assert len(path.replies(path.answer(message))) == 1


async def test_a_caller_has_no_more_of_the_server_than_elsewhere(device: CpuDevice) -> None:
    path, request = Path(device, max_requests=10), messages.random_attend(1)
    path.learn(request)
    answers = [path.answer(message_of(request)) for _ in range(10)]
    assert [answered is not None for answered in answers] == [True] * 8 + [False] * 2
    for answered in filter(None, answers):
        path.bench.engine.release(answered)
    assert len(path.replies(path.answer(message_of(request)))) == 1


async def test_layouts_that_take_turns_are_all_learnt(device: CpuDevice) -> None:
    path, requests = Path(device), [messages.random_attend(1, scale=scale) for scale in (1.0, 2.0, 3.0)]
    for request in requests * 2:
        path.comes(request)
    assert len(path.replies(path.answer(message_of(*requests)))) == 3


async def test_what_lies_elsewhere_than_in_its_message_is_not_learnt(device: CpuDevice) -> None:
    """As with the payloads of a message of thousands of fields, which lie in a copy."""
    path, message = Path(device), messages.random_attend(1).SerializeToString()
    elsewhere = messages.read_request(bytes(bytearray(message)))
    for _ in range(3):
        path.path.learn_from(elsewhere, message, 0)
    assert not path.messages.knows(elsewhere.problem)


async def test_what_never_repeats_takes_no_memory_and_learns_nothing(device: CpuDevice) -> None:
    path, request = Path(device), messages.random_attend(1)
    path.comes(request)
    for number in range(MOST_CANDIDATES):
        path.comes(messages.random_attend(1, scale=1.0 + number))
    assert len(path.path._candidates) == MOST_CANDIDATES
    path.comes(request)  # as if it had never come
    assert path.answer(message_of(request)) is None
    path.comes(request)
    assert len(path.replies(path.answer(message_of(request)))) == 1


@pytest.mark.parametrize(
    "request_",
    [
        messages.random_attend(1, mask=np.ones((3, 3), bool)),
        messages.random_attend(1, dtype=np.float64),
        messages.random_attend(1, batch=0, return_lse=True),
        messages.random_attend(1, 256, heads=8, width=64),
    ],
    ids=["a mask", "float64", "no sequences", "much"],
)
async def test_what_is_not_for_it_is_never_answered(device: CpuDevice, request_: pb.AttendRequest) -> None:
    path = Path(device)
    for _ in range(4):
        path.comes(request_)
    assert not path.messages.knows(messages.read(request_).problem)


@pytest.mark.parametrize("message", [b"", b"\x0a\x07\x08\x01\x1a\x03\x0a\x01\xff", b"\xff" * 40, b"\0" * 5_000_000])
async def test_what_is_no_message_is_for_others(device: CpuDevice, message: bytes) -> None:
    path = Path(device)
    for _ in range(3):
        assert path.answer(message) is None
