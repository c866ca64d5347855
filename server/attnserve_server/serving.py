"""The life of the process: until it is told to stop, or its device fails.

In: a configuration. Out: lines of standard output that say where it serves, and an exit status: 0 after a drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator

from attnserve_server.exit_statuses import CUT_OFF, DEVICE_FAILED
from attnserve_server.host.event_loop import EventLoop
from attnserve_server.observability import logs, scraped
from attnserve_server.observability.tracing import endpoint_of, shown
from attnserve_server.scheduling.opening import batch_flops
from attnserve_server.server import OpenDevice, Server, configured_device
from attnserve_server.settings import units
from attnserve_server.settings.config import Config
from attnserve_server.startup import Startup
from attnserve_server.stop_signals import STOP_SIGNALS, exit_at_once

logger = logging.getLogger(__name__)


def run(config: Config, open_device: OpenDevice = configured_device) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains; a SIGINT meanwhile ends that. Raises StartError if the
    server cannot start.

    A signal before it serves ends the process at once, with status 0: there is nothing to drain, and loading cannot be
    stopped half-way.
    """
    loop = EventLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        status, at_once = runner.run(_serve(config, open_device, loop))
        if at_once:
            exit_at_once(status)


async def _serve(config: Config, open_device: OpenDevice, loop: EventLoop) -> tuple[int, bool]:
    """Serves; returns the exit status, and whether to exit at once: threads that compute, or gRPC that waits for
    connections, cannot be interrupted, and Python would wait for them.
    """
    stopping, interrupted, startup = asyncio.Event(), asyncio.Event(), Startup(config.log_format)

    def interrupt() -> None:
        (interrupted if stopping.is_set() else stopping).set()

    server = Server(config, open_device)
    server.metrics.watch(scraped.loop(lambda: loop.busy_seconds), scraped.log(logs.left_out))
    try:
        # The loop handles signals, because it waits while threads load: otherwise, a signal that comes just before it
        # waits would not wake it.
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, exit_at_once, 0)
        grpc_address, http_address = await server.start()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, interrupt if number == signal.SIGINT else stopping.set)
        for fact, value in _facts(config, server):
            startup.say(fact, value)
        startup.say("ready", f"grpc={grpc_address} http={http_address}", grpc=grpc_address, http=http_address)
        failed = asyncio.create_task(server.engine.failed.wait())
        hurried = asyncio.create_task(interrupted.wait())
        for phase in (stopping.wait, server.drain):
            ended = asyncio.create_task(phase())
            await asyncio.wait((ended, failed, hurried), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await server.abandon()
                break
            if hurried.done():
                ended.cancel()
                await server.cut_draining_short()
                break
            ended.result()
    finally:
        await server.stop()
        for number in STOP_SIGNALS:  # another signal must not kill a clean ending
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return _ending(server, interrupted.is_set())


def _facts(config: Config, server: Server) -> Iterator[tuple[str, str]]:
    """What a server that has started serves, on what, and within which bounds: names and values."""
    for layer in server.registry.all():
        size = layer.specification.parameter_bytes()
        yield "layer", f"{layer.name}, {layer.specification.kind}, {layer.outline}, {size} bytes"
    device = server.device
    threads = f", {device.threads} threads" * bool(device.threads)
    yield "computes_on", f"{device.name}, {device.description}{threads}"
    yield "kernels", ", ".join(name for name, _ in device.kernels())
    if endpoint := endpoint_of(config, os.environ):
        yield "traces_to", shown(endpoint) if server.tracing is not None else "nowhere, see the log"
    yield "cache_pool", units.format_size(server.caches.store.pool_bytes)
    yield "largest_request", f"{units.format_count(server.limits.max_request_flops)} FLOPs"
    yield "largest_batch", f"{units.format_count(batch_flops(config))} FLOPs"


def _ending(server: Server, interrupted: bool) -> tuple[int, bool]:
    """How a server that has stopped ended, which the log is told: what `_serve` returns."""
    if server.engine.failure is not None:
        logger.critical("%s; ending, so that the server is started again", server.engine.failure)
        return DEVICE_FAILED, True
    if interrupted and server.cuts_off:
        logger.warning("interrupted while draining: what was in flight is cut off")
        return CUT_OFF, True
    if server.engine.is_computing:
        logger.warning("requests that were still being computed are cut off")
        return CUT_OFF, True
    if server.cuts_off:
        logger.warning("replies that had not been sent are cut off")
        return CUT_OFF, True
    if server.registry.is_reading:
        logger.warning("layers that were still being read are given up")
        return CUT_OFF, True
    logger.info("ended")  # if this line is missing, the process was killed
    return 0, server.hangs
