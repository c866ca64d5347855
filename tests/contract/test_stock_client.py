"""Any gRPC client can call the service: the generated stub and plain protobuf against the real server, without the SDK.

Every message goes through stock protobuf in both directions, as in a client in another language.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf.descriptor_database import DescriptorDatabase
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import attention_pb2_grpc, tensor_pb2

if TYPE_CHECKING:
    from conftest import Server

TIMEOUT_S = 60.0
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> attention_pb2_grpc.AttentionServiceStub:
    return attention_pb2_grpc.AttentionServiceStub(channel)


def tensor(array: Floats) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())


def array(received: tensor_pb2.Tensor) -> Floats:
    assert received.dtype == tensor_pb2.DATA_TYPE_FLOAT32
    return np.frombuffer(received.data, np.float32).reshape(received.shape)


def random_request(seed: int, *, queries: int = 5, keys: int = 7, **options: Any) -> pb.AttendRequest:
    rng = np.random.default_rng(seed)
    query, key, value = (tensor(rng.standard_normal((2, 3, length, 8), np.float32)) for length in (queries, keys, keys))
    return pb.AttendRequest(query=query, key=key, value=value, **options)


def assert_answers(reply: pb.AttendResponse, request: pb.AttendRequest) -> None:
    """The reply is softmax(q k / sqrt(D)) v, causal if asked for, and its log-sum-exp, computed here in float64."""
    query, key, value = (array(t).astype(np.float64) for t in (request.query, request.key, request.value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if request.causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(array(reply.output), weights / sums @ value, rtol=0, atol=2e-6)
    assert reply.HasField("lse") == request.return_lse
    if request.return_lse:
        np.testing.assert_allclose(array(reply.lse), (largest + np.log(sums))[..., 0], rtol=0, atol=2e-6)
    assert not reply.HasField("scores")
    assert reply.batch_size >= 1
    assert reply.timings.compute_ns > 0
    assert reply.timings.decode_ns > 0


def detail(status: Any, kind: type[Any]) -> Any:
    """The single detail of this kind in a google.rpc.Status."""
    (found,) = (any_ for any_ in status.details if any_.Is(kind.DESCRIPTOR))
    message = kind()
    assert found.Unpack(message)
    return message


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "return_lse": True}])
def test_unary(stub: attention_pb2_grpc.AttentionServiceStub, options: dict[str, bool]) -> None:
    request = random_request(1, **options)
    assert_answers(stub.Attend(request, timeout=TIMEOUT_S), request)


def test_stream_with_several_calls_in_a_message(stub: attention_pb2_grpc.AttentionServiceStub) -> None:
    """Different shapes, ids chosen by the caller, several messages: every call gets its own reply, once."""
    requests = {
        identity: random_request(seed, queries=1 + seed, keys=2 + seed % 3, return_lse=seed % 2 == 0)
        for seed, identity in enumerate((7, 0, 2**64 - 1, 1 << 33, 5, 6))
    }
    calls = [pb.AttendStreamCall(id=identity, attend=request) for identity, request in requests.items()]
    messages = [
        pb.AttendStreamRequest(calls=calls[:4]),
        pb.AttendStreamRequest(),
        pb.AttendStreamRequest(calls=calls[4:]),
    ]
    replies = [reply for message in stub.AttendStream(iter(messages), timeout=TIMEOUT_S) for reply in message.replies]
    assert sorted(reply.id for reply in replies) == sorted(requests)
    for reply in replies:
        assert reply.WhichOneof("result") == "attend", reply.error
        assert_answers(reply.attend, requests[reply.id])


def test_an_error_on_a_stream_leaves_the_other_calls_alone(stub: attention_pb2_grpc.AttentionServiceStub) -> None:
    good, bad = random_request(2), random_request(3)
    bad.value.shape[-2] += 1
    late = pb.AttendStreamCall(id=3, attend=good)
    late.timeout.FromMilliseconds(-1)
    calls = [
        pb.AttendStreamCall(id=1, attend=bad),
        pb.AttendStreamCall(id=2, attend=good),
        late,
        pb.AttendStreamCall(id=4),
    ]
    replies = {
        reply.id: reply
        for message in stub.AttendStream(iter([pb.AttendStreamRequest(calls=calls)]), timeout=TIMEOUT_S)
        for reply in message.replies
    }
    assert sorted(replies) == [1, 2, 3, 4]
    assert replies[1].error.code == code_pb2.INVALID_ARGUMENT
    (violation,) = detail(replies[1].error, error_details_pb2.BadRequest).field_violations
    assert violation.field.startswith("value")
    assert_answers(replies[2].attend, good)
    assert replies[3].error.code == code_pb2.DEADLINE_EXCEEDED
    assert replies[4].error.code == code_pb2.INVALID_ARGUMENT


def test_an_error_of_a_unary_call_names_the_field(stub: attention_pb2_grpc.AttentionServiceStub) -> None:
    request = random_request(4)
    request.key.data = request.key.data[:-1]
    with pytest.raises(grpc.RpcError) as caught:
        stub.Attend(request, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert status.message == caught.value.details()
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert violation.field.startswith("key")
    assert violation.description


def test_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    """Undecodable bytes are the caller's error, and the message reveals nothing of the server's internals."""
    attend = channel.unary_unary("/attnserve.v1.AttentionService/Attend")
    with pytest.raises(grpc.RpcError) as caught:
        attend(b"\x82\x01\x7f", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caught.value.details()
    assert "Unexpected" not in caught.value.details()


def test_server_info(stub: attention_pb2_grpc.AttentionServiceStub) -> None:
    info = stub.ServerInfo(pb.ServerInfoRequest(), timeout=TIMEOUT_S)
    assert info.version
    assert info.device
    assert info.device_name
    assert info.torch_version
    assert {
        tensor_pb2.DATA_TYPE_FLOAT32,
        tensor_pb2.DATA_TYPE_FLOAT16,
        tensor_pb2.DATA_TYPE_BFLOAT16,
        tensor_pb2.DATA_TYPE_FLOAT64,
    } == set(info.dtypes)
    assert all(getattr(info.limits, field.name) > 0 for field in pb.Limits.DESCRIPTOR.fields)
    assert info.kernels
    assert all(kernel.name and kernel.description for kernel in info.kernels)
    assert len({kernel.name for kernel in info.kernels}) == len(info.kernels)
    assert "reflection" in info.features


def test_reflection_shows_the_service_and_its_messages(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"attnserve.v1.AttentionService", "grpc.health.v1.Health"} <= set(database.get_services())
    served = database.FindFileContainingSymbol("attnserve.v1.AttentionService")
    ours = type(served)()
    pb.DESCRIPTOR.CopyToProto(ours)
    assert served == ours


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_of_each_version_describes_all_services_and_the_details_of_errors(
    channel: grpc.Channel, version: str
) -> None:
    """Of its two names, tools may know only one. Their messages are the same."""
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    method: Any = channel.stream_stream(path)

    def ask(*requests: reflection_pb2.ServerReflectionRequest) -> list[reflection_pb2.ServerReflectionResponse]:
        sent = iter([request.SerializeToString() for request in requests])
        return [reflection_pb2.ServerReflectionResponse.FromString(reply) for reply in method(sent, timeout=TIMEOUT_S)]

    (listed,) = ask(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = {service.name for service in listed.list_services_response.service}
    assert {"attnserve.v1.CacheService", "attnserve.v1.LayerService", "grpc.health.v1.Health"} <= services
    assert {f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")} <= services
    symbols = sorted(services | {"google.rpc.BadRequest", "google.rpc.RetryInfo"})
    replies = ask(*(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols))
    for symbol, reply in zip(symbols, replies, strict=True):
        files = list(map(FileDescriptorProto.FromString, reply.file_descriptor_response.file_descriptor_proto))
        database = DescriptorDatabase()
        for file in files:
            database.Add(file)
        pool = DescriptorPool(database)
        assert pool.FindFileContainingSymbol(symbol).name == files[0].name


def test_health(channel: grpc.Channel) -> None:
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_metadata_may_have_7_kib_and_not_17(stub: attention_pb2_grpc.AttentionServiceStub) -> None:
    """As docs/clients.md says. What gRPC does with lengths between 8 and 16 KiB, it leaves to chance. All at once:
    each refusal takes it a fifth of a second.
    """

    def ask(length: int) -> Any:
        return stub.ServerInfo.future(pb.ServerInfoRequest(), metadata=[("x", "y" * length)], timeout=TIMEOUT_S)

    asked = [(ask(7 << 10), ask(17 << 10)) for _ in range(50)]
    for short, long in asked:
        assert short.code() is grpc.StatusCode.OK
        assert long.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rpc_status.from_call(long) is None
