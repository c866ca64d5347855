"""How old connections and their streams become: callers that never leave would never meet a server that is new.

In: the configured age of a connection. Out: gRPC's own settings for it, and a timer for each stream. gRPC asks a
connection that has become old to take no further RPCs; but a stream is one RPC, however many calls it carries, so that
it is asked by itself, later than its connection: what follows it is then on a new one.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnserve_server.rpc.stream import CallStream

_FOR_EVER_MS: Final = 2**31 - 1
"""What gRPC takes for no end."""

CONNECTION_SHARE: Final = 0.75
"""When gRPC ends a connection, as a part of the age at which streams retire. It adds or takes a tenth of that."""

SPREAD: Final = 0.1
"""Streams retire this share later at most, so that those that came together do not leave together."""


@dataclass(frozen=True, slots=True)
class StreamLife:
    """The life of streams, in seconds."""

    age: float
    """How old they become before their callers are asked to leave."""
    grace: float
    """How long callers may take to leave."""

    def begin(self, stream: CallStream) -> asyncio.TimerHandle:
        """Has a stream that begins now retire when it is old."""
        age = self.age * random.uniform(1.0, 1.0 + SPREAD)
        return asyncio.get_running_loop().call_later(age, stream.retire, self.grace)

    @property
    def channel_options(self) -> list[tuple[str, int]]:
        """What gRPC is to be told. It cuts off what is still there after its own grace, which no stream may see."""
        grace = self.age * (1.0 + SPREAD) + 2 * self.grace + 1.0
        return [
            ("grpc.max_connection_age_ms", max(1, round(1000 * CONNECTION_SHARE * self.age))),
            ("grpc.max_connection_age_grace_ms", round(min(1000 * grace, _FOR_EVER_MS))),
        ]
