"""A stream to a server that has no room for some of its calls, without I/O."""

from __future__ import annotations

from typing import Any

import pytest
from multiplexed import DONE, Alone, call, full, message, replica_of

from attnserve._requests.reply import Reply
from attnserve._settings.retry import RetryPolicy
from attnserve._transports.multiplexer import Multiplexer

EAGER = RetryPolicy(retries=3, first_delay=0.1, longest_delay=5.0, random=lambda: 0.0)
"""Waits no longer than the server says."""


class Stream:
    """A multiplexer and its server, which answers and refuses calls by their names."""

    def __init__(self, policy: RetryPolicy = EAGER) -> None:
        self.multiplexer: Multiplexer[Any] = Alone(policy, replica_of("here"))
        self.number = self.multiplexer.opened(0.0)
        self.ids: dict[Any, int] = {}
        self.outcomes: dict[Any, Any] = {}

    def add(self, *names: Any, now: float = 0.0, timeout: float | None = None, priority: int = 0) -> None:
        for name in names:
            added = call(name, now=now, timeout=timeout)
            added.priority = priority
            self.multiplexer.add(added, now)
            self.ids[name] = added.id

    def sent(self, now: float = 0.0) -> list[Any]:
        """The names of the calls in the messages that are due."""
        names = []
        while (found := message(self.multiplexer, self.number, now)) is not None:
            names += [next(name for name, own in self.ids.items() if own == each.id) for each in found.calls]
        return names

    def replies(self, *names: Any, now: float = 0.0, error: Any = DONE) -> None:
        """A message with replies."""
        self._take(self.multiplexer.resolve(self.number, [Reply(self.ids[name], error) for name in names], now))

    def tick(self, now: float) -> None:
        self._take(self.multiplexer.tick(now))

    def _take(self, outcomes: list[Any]) -> None:
        self.outcomes |= {call.owner: outcome for call, outcome in outcomes}


@pytest.fixture
def stream() -> Stream:
    """Whose server took the first four of six calls, and refused the others for one second."""
    stream = Stream()
    stream.add(*range(6))
    assert stream.sent() == [*range(6)]
    stream.replies(4, 5, error=full("queue_time", 1.0))
    return stream
