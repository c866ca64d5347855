"""The real server, which pings callers after half a second without a word, and gives them 5 s to answer.

In: the server's flags.
"""

from __future__ import annotations

import sys

from attnserve_server import __main__
from attnserve_server.rpc import port

if __name__ == "__main__":
    port.KEEPALIVE_MS, port.KEEPALIVE_TIMEOUT_MS = 500, 5_000  # type: ignore[misc]
    sys.exit(__main__.main())
