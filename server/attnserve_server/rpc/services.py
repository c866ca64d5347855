"""All services of one server, on one gRPC port.

In: the parts of a server, which do the work. Out: a port that answers, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from grpc import aio

from attnserve_server.access.opening import Access
from attnserve_server.caches.fast_path import CacheFastPath
from attnserve_server.caches.request import read_attend
from attnserve_server.caches.work import CacheHost
from attnserve_server.devices import Device
from attnserve_server.host.allocator import UnusedMemory
from attnserve_server.layers.cached_request import read_apply
from attnserve_server.layers.registry import Registry
from attnserve_server.no_room import too_many_unsent
from attnserve_server.observability.health import Health
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.refusals import Refusals
from attnserve_server.observability.tracing import Tracing
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.rpc import port
from attnserve_server.rpc.cache_service import CACHE_SERVICE_NAME, CacheService
from attnserve_server.rpc.endings import Endings
from attnserve_server.rpc.engine_calls import EngineCalls
from attnserve_server.rpc.fast_path import FastPath
from attnserve_server.rpc.health_service import HEALTH_SERVICE_NAME, HealthService
from attnserve_server.rpc.info import server_info
from attnserve_server.rpc.layer_service import LAYER_SERVICE_NAME, LayerService
from attnserve_server.rpc.messages_due import MessagesDue
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.reading_turns import ReadingTurns
from attnserve_server.rpc.reflection import Reflection
from attnserve_server.rpc.rpcs import Rpcs
from attnserve_server.rpc.service import SERVICE_NAME, AttentionService
from attnserve_server.rpc.stream import Streams
from attnserve_server.rpc.stream_life import StreamLife
from attnserve_server.rpc.unread import REPLY_BYTES_PER_SECOND, UnreadReplies
from attnserve_server.scheduling.engine import Engine
from attnserve_server.settings.config import Config

logger = logging.getLogger(__name__)

SERVICE_NAMES: Final = (SERVICE_NAME, LAYER_SERVICE_NAME, CACHE_SERVICE_NAME, HEALTH_SERVICE_NAME)
CONNECTION_STREAMS: Final = 1024
"""The most watches of health and streams of reflection on one connection: anybody may open them. A proxy may have one
connection for all its clients, each of which watches.
"""
UNIDENTIFIED_STREAMS: Final = 16_384
"""The most watches and streams of reflection on all connections: they take 250 MiB."""
UNSENT_MESSAGES: Final = 16_384
"""The most unary calls of all callers that wait for their messages: they take 350 MiB."""
STRANGER_MESSAGE_S: Final = 2.0
"""How long the message of a health check may take. It is tiny, and should come with its headers. But anybody may send
one of up to `max_message_bytes`, and what has come of it is in memory.
"""
CONNECTION_STRANGERS: Final = 2
STRANGERS: Final = 16
"""How many of these messages may take so long, on one connection and in all. Any others may take
`messages_due.CROWDED_S`.
"""
STOP_S: Final = 3.0
"""How long gRPC may take to stop, its grace included: it waits up to 20 s for each connection that stands still."""
SHARED_MESSAGES: Final = 2
"""A message may have this many times the bytes that there are for each request (`max_bytes` / `max_requests`), and
still be kept by each of its calls (`Streams.max_shared_bytes`). By default, those that the SDK joins are no longer.
"""
STREAM_SHARE: Final = 4
"""A stream is not read from while it has more than one in this many of the requests that may be in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the services of a server give access to."""

    device: Device
    engine: Engine
    registry: Registry
    caches: CacheHost
    limits: RequestLimits
    access: Access
    health: Health
    metrics: Metrics
    refusals: Refusals
    tracing: Tracing | None


class Services:
    """The services of a server. Made on the event loop that it lives on."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._config = config
        self._tls = parts.access.tls
        engine, metrics, callers = parts.engine, parts.metrics, parts.access.callers
        endings = Endings(metrics, parts.refusals)
        reading_turns, unused_memory = ReadingTurns(), UnusedMemory()
        unread = UnreadReplies(config.max_unread_time or inf, callers, endings, unused_memory)
        rpcs = Rpcs(callers, metrics, endings, _messages_due(config), unread, parts.tracing)
        # With a grace of 0, a stream would end before its caller could leave it.
        stream_life = (
            StreamLife(config.max_connection_age, max(1.0, config.drain_grace)) if config.max_connection_age else None
        )
        streams = Streams(
            engine=engine,
            metrics=metrics,
            readers={
                "attend": partial(read_attend, parts.caches, limits=parts.limits),
                "apply": partial(read_apply, parts.caches, parts.registry, limits=parts.limits),
            },
            callers=callers,
            max_message_calls=config.max_message_calls,
            max_unanswered=max(1, config.max_requests // STREAM_SHARE),
            max_shared_bytes=SHARED_MESSAGES * config.max_bytes // config.max_requests,
            endings=endings,
            reading_turns=reading_turns,
            tracing=parts.tracing,
            fast_path=_fast_path(config, parts),
            unread=unread,
        )
        info = server_info(config, parts.device, parts.limits, parts.caches.store).SerializeToString()
        calls = EngineCalls(engine, metrics, rpcs, reading_turns)
        self._attention = AttentionService(streams, calls, rpcs, info, config.max_caller_streams, stream_life)
        layers = LayerService(
            parts.registry, rpcs, engine.check_open, unused_memory, administration=config.layer_administration
        )
        caches = CacheService(parts.caches, calls, rpcs, config.cache_ttl, parts.limits, reading_turns)
        strangers_streams = OpenRpcs(CONNECTION_STREAMS, UNIDENTIFIED_STREAMS)
        strangers_late = OpenRpcs(CONNECTION_STRANGERS, STRANGERS, too_many_unsent)
        strangers_messages = MessagesDue(CONNECTION_STREAMS, UNIDENTIFIED_STREAMS, STRANGER_MESSAGE_S, strangers_late)
        health = HealthService(parts.health, rpcs, strangers_streams, strangers_messages)
        options = [*port.channel_options(config), *(() if stream_life is None else stream_life.channel_options)]
        self._grpc = aio.server(options=options)
        for service in (self._attention, layers, caches, health):
            service.register(self._grpc)
        if config.reflection:
            Reflection(rpcs, strangers_streams).register(self._grpc, SERVICE_NAMES)

    async def start(self) -> str:
        """Binds the port and answers; returns the actual address. Raises ListenError."""
        address = port.bind(self._grpc, self._config.listen, None if self._tls is None else self._tls.grpc_credentials)
        await self._grpc.start()
        return address

    def end_streams(self) -> None:
        """Ends every stream of calls once what is in flight on it has been answered."""
        self._attention.end_streams()

    async def stop(self, grace: float) -> bool:
        """Ends whatever is left after a grace (seconds); returns whether gRPC has stopped: otherwise it still waits for
        a connection.
        """
        try:
            await asyncio.wait_for(port.stop(self._grpc, grace), STOP_S)
        except TimeoutError:
            logger.warning("connections that stand still are cut off")
            return False
        return True


def _messages_due(config: Config) -> MessagesDue:
    """How many unary calls may wait for their messages, and how long: as long as a reply of the longest message's size
    may take to be read.
    """
    longest = config.max_unread_time + config.max_message_bytes / REPLY_BYTES_PER_SECOND
    return MessagesDue(config.max_requests, UNSENT_MESSAGES, longest if config.max_unread_time else None)


def _fast_path(config: Config, parts: Parts) -> FastPath | None:
    """What answers messages as a whole, if the device can and may compute on the event loop."""
    native = parts.device.native
    if native is None or not config.inline_flops:
        return None
    return FastPath(
        parts.engine,
        parts.metrics,
        native.messages,
        min(config.max_message_calls, config.max_batch_requests),
        config.max_message_bytes,
        CacheFastPath(parts.caches, native.messages, parts.limits),
    )
