"""The RPCs of grpc.health.v1, which anybody may call.

The servicer that grpcio-health-checking (1.80) brings forgets the other watchers of a service when one of them leaves,
and writes to watchers under the lock that setting a status takes. Only its messages are used here.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from attnserve_server.errors import InvalidRequest, NotFound, RequestError
from attnserve_server.observability.health import Health
from attnserve_server.rpc.messages_due import MessagesDue
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.rpcs import Context, Handler, Rpcs, connection_of, parsed

HEALTH_SERVICE_NAME: Final = "grpc.health.v1.Health"

MAX_REQUEST_BYTES: Final = 1024
"""Longer than any request for a service that is here. A watch keeps its request."""


class HealthService:
    """The service for one server's health. Watches are counted among `streams`, and calls whose messages have not come
    among `messages_due`: both are bounds of their own, apart from those of identified callers.
    """

    def __init__(self, health: Health, rpcs: Rpcs, streams: OpenRpcs, messages_due: MessagesDue) -> None:
        self._health = health
        self._rpcs = rpcs
        self._streams = streams
        self._messages_due = messages_due

    def register(self, server: aio.Server) -> None:
        """Adds the service to a gRPC server that has not started. To gRPC its methods take streams of messages, as
        those of `Rpcs.unary` do.
        """
        handlers: dict[str, Handler] = {
            "Check": self._rpcs.watched("health_check", self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(HEALTH_SERVICE_NAME, handlers),))

    async def _check(self, _: object, context: Context) -> bytes:
        """The present status of a service."""
        try:
            service = await self._asked(context)
            self._rpcs.replies_due.require_room(context.peer())
            status = self._health.status(service)
            if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
                raise NotFound("service", service)
            self._rpcs.replies_due.begin(context.peer())
        except RequestError as error:
            await self._rpcs.refuse(context, "health_check", error, None)
        return _encoded(status)

    async def _watch(self, _: object, context: Context) -> NoReturn:
        """The present status of a service, and each later one when it changes."""
        try:
            service, last = await self._asked(context), None
            with self._streams.one_more(connection_of(context)):
                while await self._health.changed(service, last):
                    last = self._health.status(service)
                    await context.write(_encoded(last))
        except RequestError as error:
            await self._rpcs.refuse(context, "health_watch", error, None)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    async def _asked(self, context: Context) -> str:
        """The service that a call asks about. Raises RequestError."""
        return _service_in(await self._messages_due.message(context, connection_of(context)))


def _service_in(data: bytes) -> str:
    """The service that a request is about. Raises InvalidRequest."""
    if len(data) > MAX_REQUEST_BYTES:
        raise InvalidRequest("", f"at most {MAX_REQUEST_BYTES} bytes", len(data))
    service: str = parsed(health_pb2.HealthCheckRequest, data).service
    return service


def _encoded(status: Any) -> bytes:
    message: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return message
