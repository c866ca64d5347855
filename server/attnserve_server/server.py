"""The parts put together: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from grpc import aio

from attnserve_server import __version__
from attnserve_server.access.callers import Callers
from attnserve_server.access.grants import GrantsFile
from attnserve_server.access.tls import ServerTls
from attnserve_server.caches.fast_path import CacheFastPath
from attnserve_server.caches.opening import open_caches
from attnserve_server.caches.request import read_attend
from attnserve_server.devices import Device, DeviceError, open_device
from attnserve_server.errors import FailedPrecondition, OutOfMemory
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.layers.cached_request import read_apply
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.registry import Registry
from attnserve_server.observability.health import Health
from attnserve_server.observability.http import HttpServer
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.tracing import open_tracing
from attnserve_server.requests.limits import (
    BATCH_FLOPS,
    CUDA_BATCH_BYTES,
    CUDA_LAYER_DISCOUNT,
    RequestLimits,
    default_request_flops,
)
from attnserve_server.rpc import port
from attnserve_server.rpc.cache_service import CACHE_SERVICE_NAME, CacheService
from attnserve_server.rpc.calls import Read
from attnserve_server.rpc.fast_path import FastPath
from attnserve_server.rpc.health_service import HEALTH_SERVICE_NAME, HealthService
from attnserve_server.rpc.info import server_info
from attnserve_server.rpc.layer_service import LAYER_SERVICE_NAME, LayerService
from attnserve_server.rpc.messages_due import MessagesDue
from attnserve_server.rpc.open_rpcs import OpenRpcs
from attnserve_server.rpc.reflection import Reflection
from attnserve_server.rpc.rpcs import Rpcs
from attnserve_server.rpc.service import SERVICE_NAME, AttentionService
from attnserve_server.rpc.stream import Streams
from attnserve_server.rpc.stream_life import StreamLife
from attnserve_server.rpc.unread import REPLY_BYTES_PER_SECOND, UnreadReplies
from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.batching import BatchQueue
from attnserve_server.scheduling.engine import Engine
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.watchdog import Watchdog
from attnserve_server.settings.config import Config
from attnserve_server.settings.openness import openness
from attnserve_server.start_errors import ConfigError, StartError

logger = logging.getLogger(__name__)

OpenDevice: TypeAlias = Callable[[Config], Device]
"""Opens the device that a configuration asks for. Raises StartError."""


def configured_device(config: Config) -> Device:
    """The device that a configuration asks for."""
    try:
        return open_device(config.device, config.threads or usable_cpus(), config.inline_flops, config.native_kernel)
    except DeviceError as error:
        raise StartError(str(error)) from None


SERVICE_NAMES = (SERVICE_NAME, LAYER_SERVICE_NAME, CACHE_SERVICE_NAME, HEALTH_SERVICE_NAME)
CONNECTION_STREAMS = 1024
"""The most watches of health and streams of reflection on one connection: anybody may open them. A proxy may have one
connection for all its clients, each of which watches.
"""
UNIDENTIFIED_STREAMS = 16_384
"""The most of those on all connections: they take 250 MiB."""
UNSENT_MESSAGES = 16_384
"""The most unary calls of all callers that wait for their messages: they take 350 MiB."""
LAST_CALLS_S = 0.05
"""How long a server that has drained still refuses what has arrived: when gRPC stops, it cancels the calls that wait to
begin, and clients are set up to retry UNAVAILABLE, but not CANCELLED.
"""
STOP_S = 3.0
"""How long gRPC may take to stop, of which one second is for what callers are told last: it waits up to 20 s for each
connection that stands still.
"""
FAREWELL_S = 5.0
"""How long a server whose device failed waits until its callers have been told."""
STREAM_SHARE = 4
"""A stream with more than one in this many of all requests that may be in flight is not read from until it has fewer.
"""


class Server:
    """One server: a device, an engine, a gRPC port and an HTTP port. Made on the event loop that it lives on."""

    def __init__(self, config: Config, open_device: OpenDevice = configured_device) -> None:
        self._config = config
        self.device = open_device(config)
        self.cuts_off = False
        """Whether it ends, or has ended, with replies unsent."""
        self.hangs = False
        """Whether gRPC has not stopped: it still waits for a connection."""
        self.health = Health()
        self.metrics = Metrics(__version__, torch.__version__, self.device.name, self.device.instructions)
        self.tracing = open_tracing(config, os.environ, self.metrics, self.device.name)
        self.batch_flops = config.max_batch_flops or min(BATCH_FLOPS, config.max_flops)
        """The most floating-point operations of a batch, as configured or by default."""
        on_gpu = not self.device.threads
        admission = Admission(
            config.max_requests,
            config.max_bytes,
            config.max_flops,
            config.max_message_bytes,
            config.max_queue_time,
        )
        queue: BatchQueue[Entry] = BatchQueue(
            self.batch_flops,
            config.max_batch_requests,
            config.priority_aging,
            admission.pace,
            CUDA_BATCH_BYTES if on_gpu else None,
            CUDA_LAYER_DISCOUNT if on_gpu and not config.max_batch_flops else 1,
        )
        self.engine = Engine(self.device, queue, admission, self.metrics, config.max_wait, self.tracing)
        self._watchdog = Watchdog(self.engine, config.stuck_after) if config.stuck_after else None
        self.metrics.watch(
            queue_requests=lambda: queue.requests + self.engine.waiting_for_turns,
            queue_bytes=lambda: queue.bytes,
            in_flight_requests=lambda: admission.requests,
            in_flight_bytes=lambda: admission.bytes,
            in_flight_flops=lambda: admission.flops,
            in_flight_seconds=lambda: admission.seconds,
            limits={
                "requests": config.max_requests,
                "bytes": config.max_bytes,
                "flops": config.max_flops,
                "seconds": config.max_queue_time,
            },
        )
        self.metrics.watch_callers(admission.bytes_of_callers)
        worker = self.engine.worker
        self.metrics.watch_device(lambda: worker.busy_seconds, lambda: worker.batch_seconds, self.device.memory)
        self.metrics.watch_state(self.health)
        self.registry = Registry(self.device, _model_directory(config), self.metrics.layers, config.max_layers)
        self.caches = open_caches(config, self.device)
        self.metrics.watch_caches(self.caches.store)
        self.limits = RequestLimits(
            max_rank=config.max_rank,
            max_elements=config.max_elements,
            max_sequences=config.max_sequences,
            max_request_flops=config.max_request_flops or default_request_flops(self.device.threads, config.max_flops),
        )
        readers: dict[str, Read] = {
            "attend": partial(read_attend, self.caches, limits=self.limits),
            "apply": partial(read_apply, self.caches, self.registry, limits=self.limits),
        }
        tls = _tls(config)
        if tls is not None:
            self.metrics.watch_certificate(tls.expiry)
        certificates = bool(config.tls_client_ca)
        grants = GrantsFile(Path(config.callers), certificates=certificates) if config.callers else None
        reloads = (("callers", grants), ("tls", tls))
        self.metrics.watch_reloads({name: files.reload_failed for name, files in reloads if files is not None})
        callers = Callers(grants, certificates=certificates)
        rpcs = Rpcs(callers, self.metrics, messages_due=_messages_due(config))
        self._refusals = rpcs.refusals
        # With a grace of 0, a stream would end before its caller could leave it.
        stream_life = (
            StreamLife(config.max_connection_age, max(1.0, config.drain_grace)) if config.max_connection_age else None
        )
        unread = None
        if config.max_unread_time:
            unread = UnreadReplies(config.max_unread_time, self.metrics, callers, rpcs.refusals)
        fast_path = None
        if self.device.messages is not None and config.inline_flops:
            fast_path = FastPath(
                self.engine,
                self.metrics,
                self.device.messages,
                min(config.max_message_calls, config.max_batch_requests),
                config.max_message_bytes,
                CacheFastPath(self.caches, self.device.messages, self.limits),
            )
        streams = Streams(
            self.engine,
            self.metrics,
            readers,
            callers,
            config.max_message_calls,
            max(1, config.max_requests // STREAM_SHARE),
            rpcs.refusals,
            self.tracing,
            fast_path,
            unread,
        )
        info = partial(server_info, config, self.device, self.limits, self.batch_flops, self.caches.store.pool_bytes)
        self._service = AttentionService(streams, rpcs, info, config.max_caller_streams, stream_life)
        self._layer_service = LayerService(
            self.registry, rpcs, self.engine.check_open, administration=config.layer_administration
        )
        self._cache_service = CacheService(self.caches, rpcs, self._service, config.cache_ttl, self.limits)
        for_anybody = OpenRpcs(CONNECTION_STREAMS, UNIDENTIFIED_STREAMS)
        of_anybody = MessagesDue(CONNECTION_STREAMS, UNIDENTIFIED_STREAMS, config.max_unread_time or None)
        self._health_service = HealthService(self.health, rpcs, for_anybody, of_anybody)
        self._reflection = Reflection(rpcs, for_anybody) if config.reflection else None
        self._http = HttpServer(
            config.http_listen,
            self.metrics.registry,
            self.health,
            callers,
            tls.http_context() if tls is not None and config.http_tls else None,
            rpcs.refusals,
        )
        self._credentials = None if tls is None else tls.grpc_credentials
        self._grpc = aio.server(
            options=(
                *port.channel_options(config),
                *(stream_life.channel_options if stream_life is not None else ()),
            )
        )

    async def start(self) -> tuple[str, str]:
        """Binds both ports, warms the device up and becomes ready; returns the addresses of gRPC and HTTP."""
        http_address = await self._http.start()
        self._service.register(self._grpc)
        self._layer_service.register(self._grpc)
        self._cache_service.register(self._grpc)
        self._health_service.register(self._grpc)
        if self._reflection is not None:
            self._reflection.register(self._grpc, SERVICE_NAMES)
        address = port.bind(self._grpc, self._config.listen, self._credentials)
        for line in openness(self._config):
            logger.warning("%s", line)
        await self._grpc.start()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.device.warm_up)
        except Exception as error:
            logger.exception("the device does not compute")
            raise StartError(f"device {self.device.name} does not compute: {type(error).__name__}") from None
        if self._config.layers:
            await self._load_layers()
        self.engine.open()
        if self._watchdog is not None:
            self._watchdog.start()
        self.health.set("serving")
        return address, http_address

    async def _load_layers(self) -> None:
        """Loads the layers of the configured file, all or none; otherwise the server does not start."""
        path = self._config.layers
        try:
            await self.registry.load(Path(path))
        except (LayerError, OutOfMemory, FailedPrecondition) as error:
            raise StartError(f"layers ({path}): {error}") from None

    async def drain(self) -> None:
        """Stops taking requests and waits for those in flight, within the configured times; liveness stays true."""
        self.health.set("draining")
        logger.info("draining")
        await asyncio.sleep(self._config.drain_delay)
        self.health.refuse()
        if not await self.engine.drain(self._config.drain_grace):
            self.cuts_off = True
            logger.warning("requests were still in flight after the grace of %g s", self._config.drain_grace)
        await asyncio.sleep(LAST_CALLS_S)
        self._service.end_streams()

    async def hurry(self) -> None:
        """Ends the draining: what is in flight is cut off, if anything is."""
        self.health.refuse()
        self.cuts_off = not await self.engine.drain(0)
        if not self.cuts_off:
            await asyncio.sleep(LAST_CALLS_S)
            self._service.end_streams()

    async def abandon(self) -> None:
        """Gives the server up: reports itself as failed, and lets the replies that tell callers so be sent."""
        self.health.set("failed")
        await self.engine.drain(FAREWELL_S)
        self._service.end_streams()

    async def stop(self) -> None:
        """Ends whatever is left."""
        if self._watchdog is not None:
            self._watchdog.stop()
        self.health.close()
        try:
            await asyncio.wait_for(port.stop(self._grpc, grace=1.0), STOP_S)
        except TimeoutError:
            logger.warning("connections that stand still are cut off")
            self.hangs = True
        await self._http.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self._refusals.close()
        self.registry.close()
        self.engine.close()
        if not self.engine.is_computing and self.engine.failure is None:
            self.device.close()


def _model_directory(config: Config) -> Path | None:
    """The directory of definitions and weights; None if there is none. Raises ConfigError."""
    if not config.model_directory:
        return Path(config.layers).parent.resolve() if config.layers else None
    directory = Path(config.model_directory).resolve()
    if not directory.is_dir():  # a misspelt path or a missing volume: otherwise the first caller would find out
        raise ConfigError("model_directory", "a directory", config.model_directory)
    return directory


def _messages_due(config: Config) -> MessagesDue:
    """How many unary calls may wait for their messages, and how long: as long as a reply of that size could take."""
    longest = config.max_unread_time + config.max_message_bytes / REPLY_BYTES_PER_SECOND
    return MessagesDue(config.max_requests, UNSENT_MESSAGES, longest if config.max_unread_time else None)


def _tls(config: Config) -> ServerTls | None:
    """The TLS of a configuration, if it has any. Raises TlsError."""
    if not config.tls_certificate:
        return None
    client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
    return ServerTls(Path(config.tls_certificate), Path(config.tls_key), client_ca)
