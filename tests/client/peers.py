"""Peers that a client may meet and that are not a good server: silent, talking nonsense, gone in the middle.

A peer is a gRPC server whose `AttendStream` is a function of the test: messages in, messages out, as bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from attnserve.v1 import attention_pb2 as pb

Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
Unary = Callable[[bytes, grpc.ServicerContext], bytes]

SERVICE = "attnserve.v1.AttentionService"


@contextlib.contextmanager
def peer(stream: Stream, unary: Unary | None = None) -> Iterator[str]:
    """Serves on a free port and yields its address."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(16), options=options)
    methods: dict[str, Any] = {"AttendStream": grpc.stream_stream_rpc_method_handler(stream)}
    if unary is not None:
        methods["Attend"] = grpc.unary_unary_rpc_method_handler(unary)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def response(request: pb.AttendRequest) -> pb.AttendResponse:
    """A reply whose output is the query of the request: whom it belongs to can be seen from its contents."""
    answer = pb.AttendResponse(batch_size=1, output=request.query)
    if request.return_lse:
        shape = tuple(request.query.shape)[:-1]
        answer.lse.dtype = pb.attnserve_dot_v1_dot_tensor__pb2.DATA_TYPE_FLOAT32
        answer.lse.shape.extend(shape)
        answer.lse.data = np.zeros(shape, np.float32).tobytes()
    return answer


def replies(message: bytes) -> Iterator[bytes]:
    """The good replies to a message of calls, one message each, the last call first."""
    for call in reversed(pb.AttendStreamRequest.FromString(message).calls):
        reply = pb.AttendStreamReply(id=call.id, attend=response(call.attend))
        yield pb.AttendStreamResponse(replies=[reply]).SerializeToString()


def good(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """The stream of a peer that answers every call."""
    for message in messages:
        yield from replies(message)


def good_unary(message: bytes, context: grpc.ServicerContext) -> bytes:
    """The unary call of a peer that answers."""
    return response(pb.AttendRequest.FromString(message)).SerializeToString()
