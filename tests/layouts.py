"""Learns the layouts of requests without caches, without going through the fast path."""

from __future__ import annotations

import messages

from attnserve_server.native.layouts import layout_of
from attnserve_server.native.messages import Messages


def learn(of: Messages, message: bytes) -> bool:
    """Makes the layout of the request in `message` known. Returns False if it cannot be learnt."""
    request = messages.read_request(message)
    layout = layout_of(request)
    return layout is not None and of.learn(request.problem, layout, request.payloads, 0, len(message))
