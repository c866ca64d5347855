"""From a command line to a server that serves.

In: flags and environment variables. Out: what the server runs on and with which settings, on standard output, and an
exit status.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attnserve_server.host import standard_output
from attnserve_server.host.allocator import keep_one_heap
from attnserve_server.observability import logs
from attnserve_server.settings import command_line
from attnserve_server.start_errors import StartError, require
from attnserve_server.startup import Startup, surroundings

logger = logging.getLogger(__name__)


@contextmanager
def _for_good() -> Iterator[None]:
    """Exempts what is created meanwhile from garbage collection, now and later: modules stay.

    Those of torch have so many objects that the event loop would stop for 0.1 s at each full collection, and starting
    and ending would take a third longer. This costs 1 MiB.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def start(arguments: Sequence[str]) -> int:
    """Runs the server until it is told to stop, and returns the exit status."""
    standard_output.occupy_closed()
    keep_one_heap()  # before there are threads: the log starts the first one
    log_format = command_line.log_format(arguments, os.environ)
    logs.configure("info", log_format)
    logs.take_over()
    try:
        config = command_line.load(arguments, os.environ)
        logs.configure(config.log_level, config.log_format)
        for name, meant in command_line.misspelled(os.environ):
            logger.warning("%s is no setting: %s is", name, meant)
        require("torch", "prometheus_client", "grpc_health", "grpc_reflection", "safetensors")
        import prometheus_client

        # Creation times of counters are redundant: the process collector reports when all of them were made.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        startup = Startup(config.log_format)
        for name, value in surroundings():
            startup.say(name, value)
        for name, source in config.sources().items():
            startup.say(name, config.show(name), note=f" ({source})", source=source)
        # Only now, because this loads torch: --help and a wrong setting are answered at once.
        with _for_good():
            from attnserve_server.serving import run

        run(config)
    except StartError as error:
        if log_format == "json":
            logger.critical("attnserve-server: %s", str(error))
        else:
            logs.flush()
            print(f"attnserve-server: {error}", file=sys.stderr)
        return error.exit_status
    return 0
