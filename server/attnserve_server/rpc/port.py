"""The port that gRPC is served on: gRPC's options for connections and messages, how the port is bound, and its end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Final

import grpc
from grpc import aio

from attnserve_server.settings.config import Config
from attnserve_server.settings.units import Address, parse_address
from attnserve_server.start_errors import ListenError

_UNBEGUN: Final = {"grpc.server.max_pending_requests": 1000, "grpc.server.max_pending_requests_hard_limit": 3000}
"""gRPC's own bounds on RPCs that have arrived and not begun."""

HANDSHAKE_TIMEOUT_MS: Final = 20_000
"""How long it may take until the caller's HTTP/2 settings come, with the TLS handshake before them: until then,
anybody can have a descriptor of the process. gRPC's default is two minutes.
"""

SETTINGS_TIMEOUT_MS: Final = 30_000
"""How long a connection may take to acknowledge our HTTP/2 settings. The acknowledgement may wait behind megabytes that
the caller sends slowly. But a connection that is reset right after it has begun, while the server is busy, keeps its
descriptor for as long: with gRPC's default, for a minute.
"""

KEEPALIVE_MS: Final = 60_000
"""After how long without a word a caller is pinged. Otherwise one whose machine has vanished would keep its streams,
and its places among `max_caller_streams`, for hours."""
KEEPALIVE_TIMEOUT_MS: Final = 20_000
"""How long a caller may take to answer a ping. A synchronous client in C++ that has no calls reads every 5 s."""

CONNECTION_RPCS: Final = 4096
"""The most RPCs of a connection at a time, if `max_requests` is not more: unary calls beyond that wait in their client.
Without a bound, gRPC takes streams that are begun and reset at once as fast as they come, and delays others meanwhile.
"""

UNCOMPRESSED: Final = 1 << 0
"""The algorithms by which messages may be compressed: none. 250 KB can be 250 MB, which gRPC unpacks before anything of
ours sees the message; and tensors hardly shrink.
"""

LOOPBACK: Final = ("127.0.0.1", "::1")
"""What `localhost` means, whatever the hosts file says: it may be served without TLS and identified callers."""
FREE_PORT_TRIES: Final = 100
"""How many ports that are free on a name's first address are tried on its others."""

_HANDLER: Final = "_schedule_rpc_coro"
"""What gRPC calls the coroutine in which the handler of an RPC runs."""


def channel_options(config: Config) -> Iterator[tuple[str, int]]:
    """The options of a server's channels."""
    yield "grpc.so_reuseport", 0
    yield "grpc.max_concurrent_streams", min(max(CONNECTION_RPCS, config.max_requests), 2**31 - 1)
    yield "grpc.max_receive_message_length", config.max_message_bytes
    yield "grpc.max_send_message_length", -1
    yield "grpc.keepalive_time_ms", KEEPALIVE_MS
    yield "grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS
    yield "grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS  # which is the one that gRPC 1.85 obeys
    yield "grpc.keepalive_permit_without_calls", 1
    yield "grpc.http2.max_pings_without_data", 0  # no bound: an idle stream may stay
    yield "grpc.http2.min_ping_interval_without_data_ms", 10_000
    yield "grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS
    yield "grpc.http2.settings_timeout", SETTINGS_TIMEOUT_MS
    yield "grpc.compression_enabled_algorithms_bitset", UNCOMPRESSED
    yield from _for_unbegun_calls(config)


def _for_unbegun_calls(config: Config) -> Iterator[tuple[str, int]]:
    """The bounds on RPCs that wait for the event loop to begin them. gRPC's core cancels some beyond one number, all
    beyond another, and those that have waited too long (seconds). Its default numbers may be lower than the number of
    requests that there is room for.
    """
    for name, least in _UNBEGUN.items():
        yield name, min(max(least, config.max_requests), 2**31 - 1)
    if config.max_queue_time:
        yield "grpc.server_max_unrequested_time_in_server", min(max(2, ceil(2 * config.max_queue_time)), 2**31 - 1)


def bind(server: aio.Server, listen: str, credentials: Callable[[], grpc.ServerCredentials] | None) -> str:
    """Makes a server listen on `host:port` or `unix:/path`, over TLS if there are credentials. Returns the actual
    address, since port 0 means a free one. Each address needs credentials of its own, because gRPC asks only once for
    certificates that may change.

    A name may have several addresses. The server listens on all that this machine has, at one port, which must be free
    on each: otherwise callers of that name would reach another server. Raises ListenError.
    """
    if listen.startswith("unix:"):
        _make_way(listen)
        _add(server, listen, listen, credentials)
        return listen
    address = parse_address(listen)
    for own in _own_addresses(address):
        address = address._replace(port=_add(server, listen, str(own), credentials))
    return str(address)


def _add(
    server: aio.Server, listen: str, address: str, credentials: Callable[[], grpc.ServerCredentials] | None
) -> int:
    """Makes a server listen on an address that `listen` stands for; returns the port. Raises ListenError."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials())
    except RuntimeError:
        raise ListenError("listen", listen, "the address is taken or not ours") from None


def _own_addresses(address: Address) -> Sequence[Address]:
    """The numeric addresses of a name, as far as this machine has them. If there are several, port 0 becomes a port
    that is free on all of them. gRPC by itself would listen on those that it can get, even if that is only one, and not
    say which.

    Raises ListenError if one is taken, or the name has none.
    """
    found = [Address(host, address.port) for host in _hosts(address) if _is_ours(host)]
    if not found:
        return [address]  # gRPC reports that; or listens on 0.0.0.0 for `[::]` without IPv6
    if not address.port and len(found) > 1:
        return _at_a_free_port(address, found)
    for own in found:
        try:
            _probe(own)
        except OSError as error:
            why = error.strerror or str(error)
            raise ListenError("listen", str(address), why if own == address else f"{own}: {why}") from None
    return found


def _hosts(address: Address) -> Sequence[str]:
    """The addresses of a name, or the given address itself, each once. Raises ListenError if there are none."""
    if address.host.lower() == "localhost":
        return LOOPBACK
    try:
        resolved = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for names that cannot be looked up
        raise ListenError("listen", str(address), getattr(error, "strerror", None) or str(error)) from None
    hosts = []
    for _, _, _, _, (host, _, *rest) in resolved:
        scope = rest[1] if rest else 0
        hosts.append(f"{host}%{scope}" if scope else str(host))
    return list(dict.fromkeys(hosts))


def _is_ours(host: str) -> bool:
    """Whether this machine has an address: one without IPv6 has no IPv6 address."""
    try:
        _probe(Address(host, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _at_a_free_port(address: Address, hosts: Sequence[Address]) -> Sequence[Address]:
    """The same addresses with a port that is free on each. Raises ListenError if none is found."""
    for _ in range(FREE_PORT_TRIES):
        try:
            port = _probe(hosts[0])
            found = [host._replace(port=port) for host in hosts]
            for other in found[1:]:
                _probe(other)
        except OSError:
            continue
        return found
    raise ListenError("listen", str(address), "no port was found that is free on all of its addresses")


def _probe(address: Address) -> int:
    """Binds an address as gRPC would, and releases it; returns its port. Raises OSError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(address)
        port: int = probe.getsockname()[1]
        return port


async def stop(server: aio.Server, grace: float) -> None:
    """Stops a server: what still runs after the grace (seconds) is cancelled. Its handlers have ended then.

    `aio.Server.stop` returns when the connections are closed, which is mostly after the handlers have ended. If one
    were left, and cancelled with its event loop, gRPC would write a traceback to standard error.
    """
    await server.stop(grace)
    handlers = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == _HANDLER]
    if handlers:
        await asyncio.wait(handlers)


def _make_way(listen: str) -> None:
    """Checks that a unix socket can be made. gRPC would take over a socket that another server listens on and, if it
    can make none, would not say why.

    Raises ListenError if something answers there, or if there can be no socket at that path.
    """
    path = Path(listen.removeprefix("unix:").removeprefix("//"))
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno is None:  # Python's own check of the length, which is the kernel's
                raise ListenError("listen", listen, "the path is too long for a socket") from None
        else:
            raise ListenError("listen", listen, "another server listens there")
    if not path.parent.is_dir():
        raise ListenError("listen", listen, "there is no such directory")
    if os.path.lexists(path) and not path.is_socket():
        raise ListenError("listen", listen, "there is something that is not a socket")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ListenError("listen", listen, "the server may not write to that directory")
