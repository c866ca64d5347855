"""Who calls, and what they may do.

In: the context of an RPC. Out: a `Caller`, resolved once an RPC (once a stream, not once a call on it), which the
readers of requests and the services are given, and whose `share` the queue counts by.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args

from grpc import aio

Role: TypeAlias = Literal["use", "layers", "metrics"]
"""What a caller may do: use the service; load and unload layers; read the metrics."""

ALL_ROLES: Final[frozenset[Role]] = frozenset(get_args(Role))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request."""

    name: str | None
    """None where callers are not identified. Caches belong to a name."""
    roles: frozenset[Role]
    share: Hashable
    """What callers are told apart by where they compete: the name, or else the connection."""


@lru_cache(4096)
def anybody(peer: str) -> Caller:
    """Who is at the other end of a connection, where callers are not identified: all may do everything."""
    return Caller(None, ALL_ROLES, peer)


class Callers:
    """Tells callers apart."""

    def identify(self, context: aio.ServicerContext[Any, Any]) -> Caller:
        """Who makes an RPC."""
        return anybody(context.peer())
