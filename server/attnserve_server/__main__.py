"""The command line: `attnserve-server`, also `python -m attnserve_server`.

In: flags and environment variables (see `settings.command_line`). Out: a running server, until it is told to stop.
Standard output says what it runs on and with which settings (see `startup`), and finally that it is ready; log lines go
to standard error. Exit status: 0 after a drain, 3 if the grace period ended before the work did, 4 if the device
failed, 2 if a setting is wrong, 1 if the server cannot start.
`attnserve-server layers check` and `attnserve-server token` start nothing: see `layers.check` and `access.tokens`.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from attnserve_server.access import tokens
from attnserve_server.host.allocator import keep_one_heap
from attnserve_server.layers import check
from attnserve_server.observability import logs
from attnserve_server.settings import command_line
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import StartError
from attnserve_server.startup import Startup, surroundings

logger = logging.getLogger(__name__)


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Until the server serves, a signal to stop ends the process with status 0, whatever it is loading. By default the
    first process of a container would not get the signal, and be killed when its grace period is over.
    """

    def end(*_: object) -> None:
        os._exit(0)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            if signal.getsignal(number) is end:  # not taken over by serving
                signal.signal(number, handler)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server, or the command `layers` or `token`, and returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["layers"]:
        return check.main(arguments[1:])
    if arguments[:1] == ["token"]:
        return tokens.main(arguments[1:])
    config: Config | None = None
    try:
        config = command_line.load(arguments, os.environ)
        logs.configure(config.log_level, config.log_format)
        logs.take_over()
        for name, meant in command_line.misspelled(os.environ):
            logger.warning("%s is no setting: %s is", name, meant)
        for module in ("torch", "prometheus_client", "grpc_health", "grpc_reflection", "safetensors"):
            if find_spec(module) is None:
                raise StartError(f"{module} is not installed: pip install 'attnserve[server]'")
        import prometheus_client

        # Creation times of counters are redundant: the process collector reports when all of them were made.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        with _ending_at_once():
            keep_one_heap()
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
        if config is not None and config.log_format == "json":
            logger.critical("attnserve-server: %s", error)
        else:
            print(f"attnserve-server: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
