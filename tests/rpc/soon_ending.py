"""The real server, for which links are fast: a reply may take no longer for being long. Then connections are closed
after as many seconds as the first argument says; the other arguments are the server's flags.
"""

from __future__ import annotations

import sys

from attnserve_server import __main__
from attnserve_server.rpc import unread

if __name__ == "__main__":
    unread.REPLY_BYTES_PER_SECOND = unread.CONNECTION_BYTES_PER_SECOND = 1 << 40  # type: ignore[misc]
    unread.FAREWELL_S = float(sys.argv.pop(1))  # type: ignore[misc]
    sys.exit(__main__.main())
