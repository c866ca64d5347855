"""Every field of every message of every RPC, given invalid values over a real socket: the error names the field.

The table is `bad_input.CASES`. A field that has no case and is not in `ANYTHING_GOES` fails a test: a field added to
the protos must be added there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import calls
import grpc
import messages
import numpy as np
import pytest
from bad_input import (
    ANYTHING_GOES,
    APPEND,
    APPLY,
    ATTEND,
    CASES,
    CREATE,
    INVALID,
    PLACEHOLDERS,
    STREAM,
    Case,
    broken,
    leaves,
    put,
    sound,
)
from conftest import Server
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2
from sound import DECODER_CACHE, HK, HQ, METHODS, PLAIN_CACHE, B, Caches, D, S, requests, tensor

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2


@pytest.fixture(scope="module")
def channel(layer_server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(layer_server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def caches(channel: grpc.Channel) -> Iterator[Caches]:
    names = [
        ask(channel, CREATE, METHODS[CREATE].request(**shape)).cache.name for shape in (PLAIN_CACHE, DECODER_CACHE)
    ]
    caches = Caches(*names)
    keys = tensor(HK, S, D)
    ask(channel, APPEND, METHODS[APPEND].request(name=caches.plain, key=keys, value=keys))
    yield caches
    for name in names:  # bad input changed nothing
        assert set(ask(channel, "CacheService/Get", METHODS["CacheService/Get"].request(name=name)).cache.lengths) == {
            S if name == caches.plain else 0
        }
    ask(channel, "CacheService/Delete", METHODS["CacheService/Delete"].request(names=names))


def ask(channel: grpc.Channel, method: str, request: Any) -> Any:
    """The reply to a unary call. Raises grpc.RpcError."""
    reply = channel.unary_unary(METHODS[method].path)(request.SerializeToString(), timeout=calls.PATIENCE_S)
    return METHODS[method].response.FromString(reply)


def check(status: status_pb2.Status, case: Case) -> None:
    """Asserts that the error is the one the case expects, details included."""
    field = case.path if case.field is None else case.field
    assert status.code == case.code.value[0], status.message
    info = calls.detail(status, error_details_pb2.ErrorInfo)
    assert re.fullmatch(case.reason, info.reason), status.message
    assert info.domain == "attnserve"
    if case.code is INVALID:
        (violation,) = calls.detail(status, error_details_pb2.BadRequest).field_violations
        assert violation.field == info.metadata["field"] == field, status.message
        assert status.message.startswith(f"{field}: expected "), status.message
        assert len(status.message) < 1200
    if info.reason == "LIMIT_EXCEEDED":
        assert re.search(rf"at most \d+.* \({info.metadata['limit']}\)", status.message), status.message


@pytest.mark.parametrize("method", [method for method in METHODS if method not in (STREAM, "LayerService/Load")])
def test_what_is_sound_is_taken(channel: grpc.Channel, caches: Caches, method: str) -> None:
    for kind, request in requests(caches)[method].items():
        if method == "LayerService/Unload":
            continue  # no layer to spare
        assert ask(channel, method, request) is not None, kind


@pytest.mark.parametrize("method", METHODS)
def test_bad_input_is_named(channel: grpc.Channel, caches: Caches, method: str) -> None:
    """All cases of an RPC, each in its own call."""
    wrong: list[str] = []
    for case in (case for case in CASES if case.method == method):
        request = broken(case, caches)
        if METHODS[method].streaming:
            stream = calls.Stream(channel)
            stream.send_bytes(request.SerializeToString())
            stream.half_close()
            (reply,) = (reply for reply in stream.rest() if reply.HasField("error"))
            check(reply.error, case)
            continue
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, method, request)
        try:
            check(calls.status_of(caught.value), case)
        except AssertionError as error:
            wrong.append(f"{case} = {str(case.value)[:200]}: {error}")
    assert not wrong, "\n\n".join(wrong)


def test_a_stream_says_the_same(channel: grpc.Channel, caches: Caches) -> None:
    """The cases of Attend and Apply as calls of a few streams, with a sound call between every two."""
    cases = [case for case in CASES if case.method in (ATTEND, APPLY)]
    replies = 0
    good = sound(ATTEND, "dot", caches)
    expected = ask(channel, ATTEND, good).output
    for begin in range(0, len(cases), 100):
        part = cases[begin : begin + 100]
        sent = []
        for number, case in enumerate(part):
            operation = "attend" if case.method == ATTEND else "apply"
            sent += [
                pb.AttendStreamCall(id=2 * number, **{operation: broken(case, caches)}),
                pb.AttendStreamCall(id=2 * number + 1, attend=good),
            ]
        stream = calls.Stream(channel)  # one for each part, since it has a deadline
        stream.send(*sent)
        for reply in stream.replies(len(sent)):
            if reply.id % 2:
                assert reply.attend.output == expected
            else:
                check(reply.error, part[reply.id // 2])
                replies += 1
        stream.half_close()
        assert stream.rest() == []
    assert replies == len(cases)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message(channel: grpc.Channel, method: str) -> None:
    for garbage in (b"\xff", b"\x0a", b"\x0a\x05ab", b"\x07", bytes(range(255))):
        if METHODS[method].streaming:
            stream = calls.Stream(channel)
            stream.send_bytes(garbage)
            code, status = stream.error()
        else:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(METHODS[method].path)(garbage, timeout=calls.PATIENCE_S)
            code, status = caught.value.code(), calls.status_of(caught.value)  # type: ignore[attr-defined]
        assert code is INVALID
        assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "MALFORMED_MESSAGE"


def test_health_and_reflection_know_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    """Third-party protos, but served here: gRPC itself would report a server error, in its own words."""
    health = "/grpc.health.v1.Health/"
    for call in (
        channel.unary_unary(health + "Check"),
        lambda data: list(channel.unary_stream(health + "Watch")(data)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff")
        assert caught.value.code() is INVALID  # type: ignore[attr-defined]
    for version in ("v1", "v1alpha"):
        method: Any = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        replies = [
            reflection_pb2.ServerReflectionResponse.FromString(reply) for reply in method(iter([b"\xff", b"\x3a\0"]))
        ]
        assert replies[0].error_response.error_code == INVALID.value[0]
        services = {service.name for service in replies[1].list_services_response.service}
        assert "attnserve.v1.AttentionService" in services


@pytest.mark.parametrize("method", METHODS)
def test_every_field_has_a_case(method: str) -> None:
    """Fails if a field is added to a request and nothing here defines invalid values for it."""
    fields = set(leaves(METHODS[method].request.DESCRIPTOR))
    named = set()
    for case in CASES:
        if case.method == method:
            path = re.sub(r"\[\d+\]", "", case.path)
            named |= {path} if path in fields else {field for field in fields if field.startswith(f"{path}.")}
    exempt = ANYTHING_GOES.get(method, set())
    assert fields - named == exempt


def test_every_rpc_is_here() -> None:
    assert set(requests(PLACEHOLDERS)) == set(METHODS)
    assert len(CASES) > 700


VALUES: Final = (math.nan, math.inf, -math.inf, 1e38, -0.0)


@pytest.mark.parametrize("path", ["query", "key", "value", "bias", "alibi_slopes", "sinks"])
def test_nan_and_infinities_are_values_in_tensors(channel: grpc.Channel, caches: Caches, path: str) -> None:
    request = sound(ATTEND, "dot", caches)
    shape = tuple(getattr(request, path).shape)
    for value in VALUES:
        put(request, path, messages.tensor(np.full(shape, value, np.float32)))
        assert list(ask(channel, ATTEND, request).output.shape) == [B, HQ, 3, 6]


@pytest.mark.parametrize(("kind", "path"), [("self", "input"), ("self", "bias"), ("cross", "context")])
def test_nan_and_infinities_are_values_in_inputs_of_layers(
    channel: grpc.Channel, caches: Caches, kind: str, path: str
) -> None:
    request = sound(APPLY, kind, caches)
    shape = tuple(getattr(request, path).shape)
    for value in VALUES:
        put(request, path, messages.tensor(np.full(shape, value, np.float32)))
        assert ask(channel, APPLY, request).HasField("output")


def test_bytes_of_masks_that_are_neither_0_nor_1_are_true(channel: grpc.Channel, caches: Caches) -> None:
    request = sound(ATTEND, "dot", caches)
    one, other = (request.__class__.FromString(request.SerializeToString()) for _ in range(2))
    one.mask.data, other.mask.data = b"\x01" * len(request.mask.data), b"\xfe" * len(request.mask.data)
    assert ask(channel, ATTEND, one).scores == ask(channel, ATTEND, other).scores


@pytest.mark.parametrize("method", [ATTEND, APPLY, APPEND])
def test_what_is_beside_the_contents_of_tensors_is_bounded(channel: grpc.Channel, caches: Caches, method: str) -> None:
    """Parsed, a shape that fills a message would take 16 times the message's memory."""
    shape = tensor_pb2.Tensor(shape=[1] * (2 << 20))
    field = {ATTEND: "query", APPLY: "input", APPEND: "key"}[method]
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, method, METHODS[method].request(**{field: shape}))
    status = calls.status_of(caught.value)
    assert calls.detail(status, error_details_pb2.ErrorInfo).reason == "LIMIT_EXCEEDED"
    assert "bytes beside the contents of tensors" in status.message
    many = METHODS[method].request(**{field: tensor_pb2.Tensor()}).SerializeToString() * ((1 << 18) + 1)
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(METHODS[method].path)(many, timeout=calls.PATIENCE_S)
    status = calls.status_of(caught.value)
    assert f"at most {1 << 18} fields (max_request_fields), found more" in status.message
    info = calls.detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.metadata["limit"]) == ("LIMIT_EXCEEDED", "max_request_fields")
    assert ask(channel, ATTEND, sound(ATTEND, "dot", caches)) is not None


def test_what_is_claimed_costs_nothing(channel: grpc.Channel, layer_server: Server) -> None:
    """Shapes that claim absurdly many bytes, without the payload: no memory is allocated for them."""

    def resident() -> int:
        status = Path(f"/proc/{layer_server.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    huge = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2**31 - 1, 2**31 - 1], data=bytes(64))
    request = pb.AttendRequest(query=huge, key=huge, value=huge)
    for _ in range(3):
        with pytest.raises(grpc.RpcError):
            ask(channel, ATTEND, request)
    before = resident()
    for _ in range(50):
        with pytest.raises(grpc.RpcError):
            ask(channel, ATTEND, request)
    assert resident() - before < 16 << 10
