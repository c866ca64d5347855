"""How old connections and their streams become. Callers that never left would never get to a new server.

In: the configured age of a connection. Out: gRPC's own settings for it, and a timer for each stream. gRPC asks callers
to begin no further RPCs on an old connection. But a stream is one RPC, however many calls it carries, so its caller is
asked separately to close it. That comes later than for the connection, so that the stream that follows is on a new
connection.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnserve_server.rpc.stream import CallStream

_FOR_EVER_MS: Final = 2**31 - 1
"""What gRPC takes for infinity."""

CONNECTION_SHARE: Final = 0.75
"""When gRPC ends a connection, as a fraction of the age at which streams retire. gRPC varies that by a tenth."""

SPREAD: Final = 0.1
"""Streams retire up to this fraction later, so that those that came together do not leave together."""


@dataclass(frozen=True, slots=True)
class StreamLife:
    """The lifetime of streams, in seconds."""

    age: float
    """The age at which callers are asked to leave."""
    grace: float
    """How long callers may take to leave."""

    def begin(self, stream: CallStream) -> asyncio.TimerHandle:
        """Schedules the retirement of a stream that begins now."""
        age = self.age * random.uniform(1.0, 1.0 + SPREAD)
        return asyncio.get_running_loop().call_later(age, stream.retire, self.grace)

    @property
    def channel_options(self) -> list[tuple[str, int]]:
        """Options for gRPC. It has a grace of its own, after which it cuts off what remains on an old connection: that
        must outlast every stream.
        """
        grace = self.age * (1.0 + SPREAD) + 2 * self.grace + 1.0
        return [
            ("grpc.max_connection_age_ms", max(1, round(1000 * CONNECTION_SHARE * self.age))),
            ("grpc.max_connection_age_grace_ms", round(min(1000 * grace, _FOR_EVER_MS))),
        ]
