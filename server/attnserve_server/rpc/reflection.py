"""gRPC reflection, which describes the services to tools: under its name of today and under the old one, `v1alpha`,
because there are tools that know only one of them. They differ in nothing else.

The servicer is the library's, which has the old name only, but not its registration: with that, malformed requests
would end the stream as a fault of the server, in gRPC's own words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from attnserve_server.errors import RequestError
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.rpcs import Rpcs, connection_of

OLD_NAME: Final[str] = reflection.SERVICE_NAME
NAME: Final = OLD_NAME.replace("v1alpha", "v1")


class Reflection:
    """Reflection for every caller; its streams are counted among `streams`. Those who are not known are refused before
    their messages are received, which gRPC would take of any length.
    """

    def __init__(self, rpcs: Rpcs, streams: OpenRpcs) -> None:
        self._rpcs = rpcs
        self._streams = streams

    def register(self, server: aio.Server, service_names: Iterable[str]) -> None:
        """Adds reflection of services to a gRPC server that has not started."""
        names = (*service_names, OLD_NAME, NAME)
        servicer = ReflectionServicer(names, pool=_described(names))

        async def answer(requests: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> None:
            try:
                self._rpcs.callers.identify(context)
                with self._streams.one_more(connection_of(context)):
                    async for reply in servicer.ServerReflectionInfo(requests, context):
                        await context.write(reply)
            except RequestError as error:
                await self._rpcs.refuse(context, "reflection", error, None)

        handler = grpc.stream_stream_rpc_method_handler(
            answer,
            request_deserializer=_request,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        for name in (OLD_NAME, NAME):
            handlers = {"ServerReflectionInfo": handler}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _described(names: Iterable[str]) -> Any:
    """The files of the services, and of the details of their errors. A pool of its own, so that the file that is made
    here is in nobody's way.
    """
    pool: Any = DescriptorPool()
    _add(pool, error_details_pb2.DESCRIPTOR)
    for name in names:
        if name != NAME:
            _add(pool, reflection_pb2.DESCRIPTOR.pool.FindFileContainingSymbol(name))
    file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    renamed = json_format.MessageToJson(file).replace("v1alpha", "v1")
    pool.AddSerializedFile(json_format.Parse(renamed, FileDescriptorProto()).SerializeToString())
    return pool


def _add(pool: Any, file: FileDescriptor) -> None:
    """Adds a file after those that it imports. Adding one again changes nothing."""
    for imported in file.dependencies:
        _add(pool, imported)
    pool.AddSerializedFile(file.serialized_pb)


def _request(data: bytes) -> Any:
    """The request, or one that asks for nothing, which is answered with INVALID_ARGUMENT."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()
