"""Whether the server is live and whether it is ready.

In: the server's state. Out: `live`, `ready` and `accepts`, and what grpc.health.v1 says of `""` and the server's
services by their names (readiness), and of `readiness`, `liveness` and `acceptance`. A draining server is live: a
restart must not cut off the requests that it still answers. It is not ready, so that no new clients are sent to it. But
it accepts requests for a time, and clients that are connected already (the SDK) go on until it no longer does.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, TypeAlias, get_args

from grpc_health.v1 import health_pb2

State: TypeAlias = Literal["starting", "serving", "draining", "failed"]
"""The states of a server, in this order, though it may skip some; `failed` is a device that cannot compute."""

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
