"""The real server on a CPU, for which reading the weights of a layer takes an hour once it serves.

In: the server's flags.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, Final

from attnserve_server.layers import registry
from attnserve_server.observability import logs
from attnserve_server.serving import run
from attnserve_server.settings import command_line

BEGUN: Final = "reading, for an hour"


def read(*_: Any) -> Any:
    """Reads nothing."""
    logging.getLogger(__name__).warning(BEGUN)
    time.sleep(3600)


def main() -> None:
    """Runs the server."""
    config = command_line.load(sys.argv[1:], os.environ)
    logs.configure(config.log_level, config.log_format)
    setattr(registry, "load", read)  # noqa: B010  # mypy rejects the assignment
    run(config)


if __name__ == "__main__":
    main()
