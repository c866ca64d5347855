"""The command line: `attnserve-server`, also `python -m attnserve_server`.

In: flags and environment variables (see `settings.command_line`). Out: a running server, until it is told to stop.
Standard output says what it runs on and with which settings (see `startup`), and finally that it is ready; log lines go
to standard error. Exit status: 0 after a drain; the others are in `exit_statuses`.
`attnserve-server layers check` and `attnserve-server token` start nothing: see `layers.check` and `access.tokens`.

Nothing is imported here that takes long: a signal may come as soon as the process has begun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from attnserve_server.stop_signals import ending_at_once

_INTERRUPTED: Final = 130
"""The exit status by convention for a command ended by ctrl-c."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server, or the command `layers` or `token`, and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["layers"]:
            from attnserve_server.layers import check

            return check.main(arguments[1:])
        if arguments[:1] == ["token"]:
            from attnserve_server.access import tokens

            return tokens.main(arguments[1:])
    except KeyboardInterrupt:
        return _INTERRUPTED
    with ending_at_once():
        from attnserve_server.starting import start

        return start(arguments)


if __name__ == "__main__":
    sys.exit(main())
