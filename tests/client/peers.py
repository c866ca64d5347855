"""Peers that a client may meet that are not a good server: silent, sending nonsense, gone halfway.

A peer is a gRPC server whose methods are functions of the test: messages in, messages out, as bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import numpy as np

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2

Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
Unary = Callable[[bytes, grpc.ServicerContext], bytes]

SERVICE = "attnserve.v1.AttentionService"

LAYER_VERSION = 2**40 + 7


@contextlib.contextmanager
def peer(
    stream: Stream,
    unary: Unary | None = None,
    more: Mapping[str, Mapping[str, Unary]] = MappingProxyType({}),
    *,
    port: int = 0,
    socket: Path | None = None,
) -> Iterator[str]:
    """Serves on a port, a free one by default, or on a unix socket, and yields its address. `more` are further unary
    methods, by service and by name.
    """
    options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(16), options=options)
    attention = dict(more.get(SERVICE, {}))
    if unary is not None:
        attention["Attend"] = unary
    for service, functions in {**more, SERVICE: attention}.items():
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(function) for name, function in functions.items()
        }
        if service == SERVICE:
            methods["AttendStream"] = grpc.stream_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    address = f"127.0.0.1:{port}" if socket is None else f"unix:{socket}"
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}" if socket is None else address
    finally:
        server.stop(None).wait()


def zeros(tensor: tensor_pb2.Tensor, shape: tuple[int, ...]) -> None:
    """Fills a tensor."""
    tensor.dtype = tensor_pb2.DATA_TYPE_FLOAT32
    tensor.shape.extend(shape)
    tensor.data = np.zeros(shape, np.float32).tobytes()


def response(request: pb.AttendRequest) -> pb.AttendResponse:
    """A reply whose output is the query of the request, so that its contents show which request it belongs to."""
    answer = pb.AttendResponse(batch_size=1, output=request.query)
    if request.return_lse:
        zeros(answer.lse, tuple(request.query.shape)[:-1])
    return answer


def applied(request: pb.ApplyRequest) -> pb.ApplyResponse:
    """A reply whose output is the input of the request; for token ids, the ids in bfloat16 with one more axis."""
    answer = pb.ApplyResponse(batch_size=1, layer_version=LAYER_VERSION, output=request.input)
    if request.input.dtype == tensor_pb2.DATA_TYPE_INT64:
        ids = np.frombuffer(request.input.data, np.int64)
        answer.output.dtype = tensor_pb2.DATA_TYPE_BFLOAT16
        answer.output.shape.append(1)
        answer.output.data = (ids.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if request.return_lse:
        zeros(answer.lse, tuple(request.input.shape)[:-1])
    if request.return_scores:
        zeros(answer.scores, tuple(request.input.shape))
    return answer


def replies(message: bytes) -> Iterator[bytes]:
    """The good replies to a message of calls, one message each, the last call first."""
    for call in reversed(pb.AttendStreamRequest.FromString(message).calls):
        if call.WhichOneof("operation") == "apply":
            reply = pb.AttendStreamReply(id=call.id, apply=applied(call.apply))
        else:
            reply = pb.AttendStreamReply(id=call.id, attend=response(call.attend))
        yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()


def good(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """The stream of a peer that answers every call."""
    for message in messages:
        yield from replies(message)


def good_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
    """The unary attention of a peer that answers."""
    return response(pb.AttendRequest.FromString(message)).SerializeToString()


def good_apply(message: bytes, context: grpc.ServicerContext) -> bytes:
    """The unary application of a layer by a peer that answers."""
    return applied(pb.ApplyRequest.FromString(message)).SerializeToString()
