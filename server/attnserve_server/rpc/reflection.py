"""gRPC reflection, which describes the services to tools.

The servicer is the library's, but not its registration: with that, malformed requests would end the stream as a fault
of the server, in gRPC's own words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

SERVICE_NAME: Final[str] = reflection.SERVICE_NAME


def register(server: aio.Server, service_names: Iterable[str]) -> None:
    """Adds reflection of services to a gRPC server that has not started."""
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer((*service_names, SERVICE_NAME)).ServerReflectionInfo,
        request_deserializer=_request,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _request(data: bytes) -> Any:
    """The request, or one that asks for nothing, which is answered with INVALID_ARGUMENT."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()
