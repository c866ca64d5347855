"""The port that gRPC is served on: what its core is told of connections and messages, and how it is bound."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Final

import grpc
from grpc import aio

from attnserve_server.config import Config
from attnserve_server.start_errors import ListenError

_UNBEGUN: Final = {"grpc.server.max_pending_requests": 1000, "grpc.server.max_pending_requests_hard_limit": 3000}
"""gRPC's own bounds on the RPCs that have arrived and not begun."""

SETTINGS_TIMEOUT_MS: Final = 10_000
"""How long a connection may take to say how it speaks HTTP/2. One that is reset right after it has begun, while the
server is busy, keeps its descriptor for so long: by gRPC's default for a minute.
"""


def channel_options(config: Config) -> Iterator[tuple[str, int]]:
    """The options of a server's channels."""
    yield "grpc.so_reuseport", 0
    yield "grpc.max_receive_message_length", config.max_message_bytes
    yield "grpc.max_send_message_length", -1
    yield "grpc.keepalive_permit_without_calls", 1
    yield "grpc.http2.min_ping_interval_without_data_ms", 10_000
    yield "grpc.http2.settings_timeout", SETTINGS_TIMEOUT_MS
    yield from _for_unbegun_calls(config)


def _for_unbegun_calls(config: Config) -> Iterator[tuple[str, int]]:
    """What gRPC's core does with RPCs that wait for the event loop to begin them. Beyond a number it cancels some,
    beyond another all, and those that have waited for so many seconds. By default there may be fewer than the requests
    that there is room for.
    """
    for name, least in _UNBEGUN.items():
        yield name, min(max(least, config.max_requests), 2**31 - 1)
    if config.max_queue_time:
        yield "grpc.server_max_unrequested_time_in_server", min(max(2, ceil(2 * config.max_queue_time)), 2**31 - 1)


def bind(server: aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """Has a server listen on `host:port` or `unix:/path`, over TLS if there are credentials. Returns where it does, as
    port 0 is a free one. Raises ListenError.
    """
    is_unix = listen.startswith("unix:")
    if is_unix:
        _make_way(listen)
    try:
        if credentials is None:
            number = server.add_insecure_port(listen)
        else:
            number = server.add_secure_port(listen, credentials)
    except RuntimeError:
        raise ListenError("listen", listen, "the address is taken or not ours") from None
    return listen if is_unix else f"{listen.rpartition(':')[0]}:{number}"


def _make_way(listen: str) -> None:
    """Sees to it that a unix socket can be made: gRPC would take over one that another server listens on.

    Raises ListenError if something answers there, or if there is no such directory.
    """
    path = Path(listen.removeprefix("unix:").removeprefix("//"))
    if not path.parent.is_dir():
        raise ListenError("listen", listen, "there is no such directory")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ListenError("listen", listen, "another server listens there")
