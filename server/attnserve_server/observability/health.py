"""Whether the server is live and whether it is ready, and grpc.health.v1, which reports both over gRPC.

In: the server's state. Out: `live`, `ready` and `accepts`, and the answers of Check and Watch for `""` and the server's
services by their names (readiness), and for `readiness`, `liveness` and `acceptance`. A draining server is live: a
restart must not cut off the requests that it still answers. It is not ready, so that no new clients are sent to it; but
it accepts requests for a time, and clients that are connected already (the SDK) go on until it does not.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, NoReturn, TypeAlias, get_args

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]

State: TypeAlias = Literal["starting", "serving", "draining", "failed"]
"""The states of a server, in this order, though it may skip some; `failed` is a device that cannot compute."""

SERVICE_NAME: Final = "grpc.health.v1.Health"

_ORDER: Final[tuple[State, ...]] = get_args(State)
_SERVICES: Final = ("AttentionService", "CacheService", "LayerService")
_READINESS: Final = frozenset(("", "readiness", *(f"attnserve.v1.{service}" for service in _SERVICES)))
_LIVENESS: Final = "liveness"
_ACCEPTANCE: Final = "acceptance"


class Health:
    """The state behind liveness and readiness. Lives on one event loop."""

    def __init__(self) -> None:
        self._state: State = "starting"
        self._refuses = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        """The present state of the server."""
        return self._state

    @property
    def live(self) -> bool:
        """Whether the process is still of use; if not, restart it."""
        return self._state != "failed"

    @property
    def ready(self) -> bool:
        """Whether to send requests here."""
        return self._state == "serving"

    @property
    def accepts(self) -> bool:
        """Whether arriving requests are accepted."""
        return self._state in ("serving", "draining") and not self._refuses

    def refuse(self) -> None:
        """Says that requests are no longer accepted."""
        self._refuses = True
        self._wake()

    def set(self, state: State) -> None:
        """Moves on to a state. An earlier one is ignored: a server told to drain while warming up goes on draining."""
        if _ORDER.index(state) > _ORDER.index(self._state):
            self._state = state
            self._wake()

    def close(self) -> None:
        """Ends all watches, which would otherwise last until the grace period of a stopping server is over."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds grpc.health.v1 to a gRPC server that has not started."""
        service = _HealthService(self)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Check": grpc.unary_unary_rpc_method_handler(service.check),
            "Watch": grpc.unary_stream_rpc_method_handler(service.watch),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def status(self, service: str) -> Any:
        """The ServingStatus of a service; SERVICE_UNKNOWN if there is no such service."""
        response = health_pb2.HealthCheckResponse
        if service == _LIVENESS:
            return response.SERVING if self.live else response.NOT_SERVING
        if service == _ACCEPTANCE:
            return response.SERVING if self.accepts else response.NOT_SERVING
        if service in _READINESS:
            return response.SERVING if self.ready else response.NOT_SERVING
        return response.SERVICE_UNKNOWN

    async def changed(self, service: str, status: Any) -> bool:
        """Waits until a service's status differs from this one. False once the watches end."""
        while self.status(service) == status:
            if self._closed:
                return False
            await self._changed.wait()
        return True


class _HealthService:
    """The RPCs of grpc.health.v1.

    The servicer that grpcio-health-checking (1.80) brings forgets the other watchers of a service when one of them
    leaves, and writes to watchers under the lock that setting a status takes. Only its messages are used here.
    """

    def __init__(self, health: Health) -> None:
        self._health = health

    async def check(self, data: bytes, context: Context) -> bytes:
        """The present status of a service."""
        status = self._health.status(await _service_of(data, context))
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _encoded(status)

    async def watch(self, data: bytes, context: Context) -> NoReturn:
        """The present status of a service, and each later one when it changes."""
        service, last = await _service_of(data, context), None
        while await self._health.changed(service, last):
            last = self._health.status(service)
            await context.write(_encoded(last))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")


async def _service_of(data: bytes, context: Context) -> str:
    """The service that is asked about. Bytes that are no request end the RPC."""
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(data).service
    except DecodeError:  # gRPC would report it as the server's fault
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
    return service


def _encoded(status: Any) -> bytes:
    message: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return message
