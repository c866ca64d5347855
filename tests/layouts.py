"""Layouts of requests that have no caches, learnt without a fast path."""

from __future__ import annotations

import messages

from attnserve_server.native.layouts import layout_of
from attnserve_server.native.messages import Messages


def learn(of: Messages, message: bytes) -> bool:
    """Has the layout of the request that a message is known. Returns False if that cannot be."""
    request = messages.read_request(message)
    layout = layout_of(request)
    return layout is not None and of.learn(request.problem, layout, request.payloads, 0, len(message))
