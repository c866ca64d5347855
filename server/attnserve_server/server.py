"""The parts put together: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import torch

from attnserve_server import __version__
from attnserve_server.access.opening import open_access
from attnserve_server.caches.opening import open_caches
from attnserve_server.devices import Device, DeviceError, open_device
from attnserve_server.errors import FailedPrecondition, OutOfMemory
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.layers.errors import LayerError
from attnserve_server.layers.registry import Registry
from attnserve_server.observability import scraped
from attnserve_server.observability.health import Health
from attnserve_server.observability.http import HttpServer
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.refusals import Refusals
from attnserve_server.observability.tracing import open_tracing
from attnserve_server.requests.limits import RequestLimits, default_request_flops
from attnserve_server.rpc.services import Parts, Services
from attnserve_server.scheduling.opening import open_engine
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


LAST_CALLS_S: Final = 0.05
"""A server that has drained still refuses what arrives, until nothing more has come for this long. When gRPC stops, it
cancels the calls that wait to begin; and clients are set up to retry UNAVAILABLE, but not CANCELLED.
"""
MOST_LAST_CALLS_S: Final = 1.0
"""How long it does so at most."""
LAST_REPLIES_S: Final = 1.0
"""How long, after the grace, replies that are nearly there may still be sent, and so may what callers are told last."""
FAREWELL_S: Final = 5.0
"""How long a server whose device failed waits until its callers have been told."""


class Server:
    """One server: a device, an engine, a gRPC port and an HTTP port. Made on the event loop that it lives on."""

    def __init__(self, config: Config, open_device: OpenDevice) -> None:
        self._config = config
        self.device = open_device(config)
        self.cuts_off = False
        """Whether it ends, or has ended, with replies unsent."""
        self.hangs = False
        """Whether gRPC has not stopped: it still waits for a connection."""
        self.health = Health()
        self.metrics = Metrics(__version__, torch.__version__, self.device.name, self.device.instructions)
        self.metrics.watch(scraped.state(self.health))
        self.tracing = open_tracing(config, os.environ, self.metrics, self.device.name)
        self.engine = open_engine(config, self.device, self.metrics, self.tracing)
        self._watchdog = Watchdog(self.engine, config.stuck_after) if config.stuck_after else None
        self.registry = Registry(self.device, _model_directory(config), self.metrics.layers, config.max_layers)
        self.caches = open_caches(config, self.device)
        self.metrics.watch_caches(self.caches.store, self.caches.expiry.look)
        self.limits = RequestLimits(
            max_rank=config.max_rank,
            max_elements=config.max_elements,
            max_sequences=config.max_sequences,
            max_request_flops=config.max_request_flops or default_request_flops(self.device.threads, config.max_flops),
        )
        access = open_access(config)
        if access.tls is not None:
            self.metrics.watch(scraped.certificate(access.tls.expiry))
        self.metrics.watch(scraped.reloads(access.reloads))
        self._refusals = Refusals()
        self._services = Services(
            config,
            Parts(
                device=self.device,
                engine=self.engine,
                registry=self.registry,
                caches=self.caches,
                limits=self.limits,
                access=access,
                health=self.health,
                metrics=self.metrics,
                refusals=self._refusals,
                tracing=self.tracing,
            ),
        )
        self._http = HttpServer(
            config.http_listen,
            self.metrics.registry,
            self.health,
            access.callers,
            access.tls.http_context() if access.tls is not None and config.http_tls else None,
            self._refusals,
        )

    async def start(self) -> tuple[str, str]:
        """Binds both ports, warms the device up and becomes ready; returns the addresses of gRPC and HTTP."""
        http_address = await self._http.start()
        address = await self._services.start()
        for line in openness(self._config):
            logger.warning("%s", line)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.device.warm_up)
        except Exception as error:
            logger.exception("the device does not compute")
            raise StartError(f"device {self.device.name} does not compute: {type(error).__name__}") from None
        if self._config.layers:
            await self._load_layers()
        self.engine.open()
        self.caches.expiry.begin()
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
        await self._refuse_last_calls()
        self._services.end_streams()

    async def cut_draining_short(self) -> None:
        """Ends the draining: what is in flight is cut off, if anything is."""
        self.health.refuse()
        self.cuts_off = not await self.engine.drain(0)
        if not self.cuts_off:
            await self._refuse_last_calls()
            self._services.end_streams()

    async def _refuse_last_calls(self) -> None:
        """Returns when nothing has been refused for a while."""
        clock = asyncio.get_running_loop().time
        begin = now = clock()
        while now < (until := min(max(begin, self.engine.refused_at) + LAST_CALLS_S, begin + MOST_LAST_CALLS_S)):
            await asyncio.sleep(until - now)
            now = clock()

    async def abandon(self) -> None:
        """Gives the server up: reports itself as failed, and lets the replies that tell callers so be sent."""
        self.health.set("failed")
        await self.engine.drain(FAREWELL_S)
        self._services.end_streams()

    async def stop(self) -> None:
        """Ends whatever is left, once replies that are nearly there have had a last moment."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.cuts_off:
            self.cuts_off = not await self.engine.drain(LAST_REPLIES_S)
            self._services.end_streams()
        self.health.close()
        self.hangs = not await self._services.stop(0.0 if self.cuts_off else LAST_REPLIES_S)
        await self._http.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self._refusals.close()
        self.caches.expiry.end()
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
