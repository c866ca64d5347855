"""What the services that tests serve have in common: metrics, and RPCs that anybody may make, in any number."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

from attnserve_server.access.callers import Callers
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.refusals import Refusals
from attnserve_server.rpc.endings import Endings
from attnserve_server.rpc.messages_due import MessagesDue
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.reading_turns import ReadingTurns
from attnserve_server.rpc.rpcs import Rpcs
from attnserve_server.rpc.stream import Streams
from attnserve_server.rpc.unread import UnreadReplies

if TYPE_CHECKING:
    from attnserve_server.rpc.calls import Read
    from attnserve_server.scheduling.engine import Engine

ANYBODY = Callers(None, certificates=False)
"""Callers who are not identified."""


def new_metrics() -> Metrics:
    """The metrics of a server on a CPU, without the native library."""
    return Metrics("0", "0", "cpu", "")


def endings_of(metrics: Metrics) -> Endings:
    """Endings of which there is no account but metrics and the log."""
    return Endings(metrics, Refusals())


def due_messages(
    most_of_one: int = 1000, *, max_time: float | None = None, unhurried: OpenRpcs | None = None
) -> MessagesDue:
    """Messages that may take for ever."""
    return MessagesDue(most_of_one, None, max_time, unhurried)


def unread_of(metrics: Metrics) -> UnreadReplies:
    """Replies that need not be read."""
    return UnreadReplies(inf, ANYBODY, endings_of(metrics))


def rpcs_of(metrics: Metrics) -> Rpcs:
    """RPCs whose replies need not be read."""
    return Rpcs(ANYBODY, metrics, endings_of(metrics), due_messages(), unread_of(metrics))


def streams_of(
    engine: Engine,
    metrics: Metrics,
    readers: Mapping[str, Read],
    *,
    max_message_calls: int = 64,
    max_unanswered: int = 64,
    max_shared_bytes: int = 1 << 20,
) -> Streams:
    """Streams of anybody, whose calls are neither recorded nor answered as they are read."""
    return Streams(
        engine=engine,
        metrics=metrics,
        readers=readers,
        callers=ANYBODY,
        max_message_calls=max_message_calls,
        max_unanswered=max_unanswered,
        max_shared_bytes=max_shared_bytes,
        endings=endings_of(metrics),
        reading_turns=ReadingTurns(),
        tracing=None,
        fast_path=None,
        unread=unread_of(metrics),
    )
