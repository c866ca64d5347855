"""What the server says about itself while it starts: facts, one per line, on standard output; the last is `ready`.

In: a name, a value, and perhaps further fields. Out: `name: value` for people, or a JSON object for machines: that of a
log line, with `fact`, `value` and the rest as fields.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from attnserve_server import __version__
from attnserve_server.host import standard_output
from attnserve_server.host.cpus import usable_cpus
from attnserve_server.observability import logs

logger = logging.getLogger(__name__)


class Startup:
    """Prints facts in a log format: `text` or `json`. A server serves even if nobody can be told."""

    def __init__(self, log_format: str) -> None:
        self._formatter = logs.JsonFormatter() if log_format == "json" else None
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for names of files and layers, if it takes ASCII only

    def say(self, fact: str, value: str, *, note: str = "", **more: str) -> None:
        """Prints one fact. For people, an empty value is `none`, and `note` follows the value; `more` are fields,
        for machines.
        """
        line = f"{fact}: {value or 'none'}{note}"
        if self._formatter is not None:
            record = {"name": __name__, "levelno": logging.INFO, "levelname": "INFO", "msg": line}
            line = self._formatter.format(logging.makeLogRecord({**record, "fact": fact, "value": value, **more}))
        logs.flush()  # the lines before it: both may go to the same place
        try:
            print(line, flush=True)
        except OSError as error:
            logger.warning("%s", standard_output.give_up(error))


def surroundings() -> Iterator[tuple[str, str]]:
    """What the server runs on: names and values."""
    yield "attnserve", __version__
    yield "python", platform.python_version()
    for distribution in ("torch", "grpcio"):
        yield distribution, metadata.version(distribution)
    yield "grpc_experiments", os.environ.get("GRPC_EXPERIMENTS", "")
    yield "platform", platform.platform()
    yield "usable_cpus", str(usable_cpus())
