"""Messages of requests whose layouts the library knows, the results that it must give, and corrupted messages.

The reference is the ordinary path of messages: protobuf, the wire codec, and a device.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

import messages
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from layouts import learn
from stepping import Stepping, step

from attnserve import _dtypes
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native.messages import REFERENCE, Asked, Messages
from attnserve_server.requests.work import Phases

DTYPES: Final = (tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_FLOAT16, tensor_pb2.DATA_TYPE_BFLOAT16)
MOST: Final = 40
"""The most requests in a message."""


def random_request(random: Random) -> pb.AttendRequest:
    """A request whose only tensors are query, key and value."""
    heads, width, sequences = random.choice((1, 2, 4)), random.choice((1, 8, 17)), random.choice((1, 1, 3))
    queries, keys = random.choice((1, 2, 5)), random.choice((1, 3, 6))
    dtype, rng = _dtypes.NUMPY[random.choice(DTYPES)], np.random.default_rng(random.randrange(1 << 30))
    shapes = ((sequences, heads, queries, width), (sequences, 1, keys, width), (sequences, 1, keys, 3))
    options: dict[str, Any] = {"causal": random.random() < 0.5, "return_lse": random.random() < 0.5}
    if random.random() < 0.3:
        options["scale"] = random.choice((0.5, 2.0))
    if random.random() < 0.3:
        bounds = {side: random.choice((None, -1, 0, 2)) for side in ("left", "right")}
        options["window"] = pb.Window(**bounds)
    return messages.attend(*(rng.standard_normal(shape).astype(dtype) for shape in shapes), **options)


def with_other_contents(random: Random, request: pb.AttendRequest) -> pb.AttendRequest:
    """A request of the same layout."""
    other, rng = pb.AttendRequest(), np.random.default_rng(random.randrange(1 << 30))
    other.CopyFrom(request)
    for tensor in (other.query, other.key, other.value):
        array = messages.array(tensor)
        tensor.data = rng.standard_normal(array.shape).astype(array.dtype).tobytes()
    return other


def known_requests(random: Random, of: Messages, count: int) -> list[pb.AttendRequest]:
    """`count` requests whose layouts the library now knows."""
    found: list[pb.AttendRequest] = []
    while len(found) < count:
        request = random_request(random)
        message = request.SerializeToString()
        if learn(of, message):
            found.append(request)
    return found


def known_steps(random: Random, of: Stepping, count: int) -> list[pb.AttendRequest]:
    """`count` requests to caches, likewise. Some address two caches, and some expect lengths."""
    caches = [of.create(tokens, seed=tokens) for tokens in (0, 3, 8, 150)]
    found: list[pb.AttendRequest] = []
    for seed in range(count):
        members = random.sample(caches, random.choice((1, 1, 2)))
        expected = [cache.length(0) for cache in members] if random.random() < 0.5 else ()
        options = {"append": random.random() < 0.5, "return_lse": random.random() < 0.5}
        options["append_id"] = random.choice((0, 1, (1 << 64) - 1, random.getrandbits(64)))
        found.append(step(*members, seed=seed, expected=expected, scale=0.1 * seed, **options))
    assert all(of.learn(*found))
    return found


def another_step(random: Random, request: pb.AttendRequest) -> pb.AttendRequest:
    """A request of the same layout, to the same caches."""
    other, rng = pb.AttendRequest(), np.random.default_rng(random.randrange(1 << 30))
    other.CopyFrom(request)
    for tensor in (other.query, other.key, other.value):
        if tensor.data:
            tensor.data = rng.standard_normal(len(tensor.data) // 4).astype(np.float32).tobytes()
    return other


def random_message(
    random: Random,
    requests: list[pb.AttendRequest],
    count: int,
    another: Callable[[Random, pb.AttendRequest], pb.AttendRequest] | None = None,
) -> pb.AttendStreamRequest:
    """A message of `count` calls with such requests, each with other contents."""
    another = with_other_contents if another is None else another
    ids = random.sample(range(1, 1 << random.choice((7, 20, 50))), count)
    calls = []
    for call_id in ids:
        call = pb.AttendStreamCall(id=call_id, attend=another(random, random.choice(requests)))
        if random.random() < 0.3:
            call.timeout.CopyFrom(
                Duration(seconds=random.choice((0, 1, 600, 1 << 38)), nanos=random.choice((1, 999_999_999)))
            )
        calls.append(call)
    return pb.AttendStreamRequest(calls=calls)


def spoilt(random: Random, message: bytes) -> bytes:
    """A message with bytes changed, removed or inserted, mostly outside the tensors' contents."""
    changed = bytearray(message)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(changed)) if random.random() < 0.3 else random.randrange(min(len(changed), 64))
        match random.randrange(4):
            case 0:
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                del changed[at : at + random.choice((1, 2, 30))]
            case 2:
                changed[at:at] = random.choice((b"\0", b"\x80", b"\xff\xff\xff\xff\x0f", changed[at : at + 9]))
            case _:
                del changed[at:]
        if not changed:
            break
    return bytes(changed)


def assert_reads_as_others_do(of: Messages, device: CpuDevice, message: bytes) -> int:
    """Asserts that a message the library accepts is read as protobuf reads it, and that the answer equals a device's
    results bit for bit. Returns the number of requests, or 0 or less if the library leaves it to the ordinary path.
    """
    asked = of.read_message(message, MOST)
    if asked.requests <= 0:
        return asked.requests
    try:
        parsed = pb.AttendStreamRequest.FromString(message)
    except DecodeError as error:
        raise AssertionError("what is no message was taken for one") from error
    assert parsed.SerializeToString() == message  # it contains nothing else
    assert len(parsed.calls) == asked.requests
    assert of.ids(asked) == [call.id for call in parsed.calls]
    _assert_adds_up(asked, parsed)
    try:
        of.compute(asked.effort, 1, 2, 0)
    except ArithmeticError:
        assert not all((np.abs(_contents(call.attend)) < 1e3).all() for call in parsed.calls)
        return asked.requests
    answer = pb.AttendStreamResponse.FromString(of.write())
    assert [reply.id for reply in answer.replies] == of.ids(asked)
    for reply, call in zip(answer.replies, parsed.calls, strict=True):
        request = messages.read(call.attend)
        (result,) = device.run([request]).results
        pieces, _ = request.encode(result, Phases(1e-9, 2e-9, 0.0, reply.attend.timings.compute_ns * 1e-9, 0.0), 1)
        expected = pb.AttendResponse.FromString(b"".join(pieces))
        expected.batch_size = asked.requests
        assert reply.attend == expected
    return asked.requests


def assert_reads_steps_as_others_do(of: Stepping, message: bytes) -> int:
    """The same for requests to caches. Appends are undone."""
    asked = of.messages.read_message(message, MOST)
    if asked.requests <= 0:
        return asked.requests
    try:
        parsed = pb.AttendStreamRequest.FromString(message)
    except DecodeError:  # an invalid name, which the library does not check
        assert of.turn(message) is None
        return 0
    assert parsed.SerializeToString() == message
    assert asked.cached == len(parsed.calls)
    lengths = {cache.name: cache.length(0) for cache in of.store.list(None, 0.0)}
    for found, call in zip(of.messages.cached(asked), parsed.calls, strict=True):
        numbers, references = iter(found.references), call.attend.caches
        for reference, (at, size, layer, expected, append_id, _) in zip(
            references, zip(*[numbers] * REFERENCE, strict=True), strict=True
        ):
            assert (message[at : at + size].decode(), layer) == (reference.name, reference.layer)
            assert expected == (reference.expected_length if reference.HasField("expected_length") else -1)
            assert append_id % 2**64 == reference.append_id
    answers = of.answer(message)
    for name, length in lengths.items():
        of.store.truncate_one(of.store.get(name, 0.0), length)
    if answers is not None:
        for answer, call in zip(answers, parsed.calls, strict=True):
            expected_answer = of.ordinary(call.attend)
            assert isinstance(expected_answer, pb.AttendResponse), expected_answer
            for reply in (answer, expected_answer):
                reply.ClearField("timings")
                reply.ClearField("batch_size")
            assert answer == expected_answer
            for name, length in lengths.items():
                of.store.truncate_one(of.store.get(name, 0.0), length)
    return asked.requests


def _contents(request: pb.AttendRequest) -> Any:
    tensors = (request.query, request.key, request.value)
    with np.errstate(invalid="ignore"):
        return np.concatenate([messages.array(tensor).astype(np.float64).ravel() for tensor in tensors])


def _assert_adds_up(asked: Asked, parsed: pb.AttendStreamRequest) -> None:
    requests = [messages.read(call.attend) for call in parsed.calls]
    assert asked.request_bytes == sum(request.received_bytes for request in requests)
    assert asked.result_bytes >= sum(request.extent.reply_bytes for request in requests)
    assert asked.cost == sum(request.extent.cost for request in requests)
    assert asked.effort == sum(request.effort for request in requests)
    assert asked.flops == sum(request.extent.flops for request in requests)
    assert asked.tokens == sum(request.extent.query_tokens for request in requests)
    assert asked.calls == sum(request.problem.batch for request in requests)
    timeouts = [call.timeout.ToNanoseconds() for call in parsed.calls if call.HasField("timeout")]
    shortest = min(timeouts, default=2**63 - 1)
    assert asked.timeout == shortest or min(asked.timeout, shortest) > 2**62
