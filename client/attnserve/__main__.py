"""The command `attnserve`, as `python -m attnserve`."""

from __future__ import annotations

import sys

from attnserve._commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
