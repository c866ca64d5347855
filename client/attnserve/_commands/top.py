"""`attnserve top`: one server's load and latency, live in a terminal, from its metrics.

In: the address of its HTTP port. Out: a view that is redrawn at each reading until interrupted; or, once, a view or
JSON, for scripts. Needs the extra `top`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections import deque
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from attnserve._commands.connection_flags import UsageError, set_up
from attnserve._commands.endpoint import Endpoint
from attnserve._commands.reading import Reading
from attnserve._commands.top_figures import Figures, figures, without_nan
from attnserve._commands.top_view import view

_HISTORY: Final = 40


def run(parsed: argparse.Namespace) -> int:
    """Runs the parsed command, and returns its exit status. UsageError if it is invalid."""
    endpoint = set_up(Endpoint, parsed, timeout=parsed.timeout)
    if parsed.once or parsed.json:
        return _once(parsed, endpoint)
    try:
        return _live(parsed, endpoint)
    except KeyboardInterrupt:  # the way to end it
        return 0


def _once(parsed: argparse.Namespace, endpoint: Endpoint) -> int:
    try:
        before = Reading.of(endpoint)
        time.sleep(parsed.interval)
        found = figures(before, Reading.of(endpoint))
    except OSError as error:
        print(f"attnserve: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(json.dumps(without_nan(dataclasses.asdict(found)), indent=2))
    else:
        Console(highlight=False).print(view(found, parsed.address, time.time()))
    return 0


def _live(parsed: argparse.Namespace, endpoint: Endpoint) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        raise UsageError("top: not a terminal; in scripts, use --once or --json")
    # An end by SIGTERM, too, must give the terminal back as it was.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    before: Reading | None = None
    last: Figures | None = None
    history: deque[float] = deque(maxlen=_HISTORY)
    answered_at = time.time()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            said, gone_since = Text(f"every {parsed.interval:g} s; ctrl-c ends it", style="dim"), None
            try:
                after = Reading.of(endpoint)
                if before is not None:
                    last = figures(before, after)
                    history.append(last.requests)
                before, answered_at = after, time.time()
            except OSError as error:  # the server may come back: servers are replaced
                said, gone_since = Text(str(error), style="bold red"), answered_at
            shown = []
            if last is not None:
                shown = [view(last, parsed.address, time.time(), tuple(history), gone_since=gone_since)]
            live.update(Group(said, *shown), refresh=True)
            time.sleep(parsed.interval)
