"""Connections of this process by whom they are with: gRPC has no way to close one.

In: a connection's other end, as gRPC names it. Out: whether it was closed; gRPC notices, and ends what is on it.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

DESCRIPTORS: Final = Path("/dev/fd")


class Peer(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int


def disconnect(*peers: str) -> bool:
    """Closes the connections with peers, such as `ipv4:127.0.0.1:50000` or `ipv6:%5B::1%5D:50000`; returns whether
    there were any. Those on a unix socket have no address and cannot be told apart.
    """
    wanted = set(map(_parsed, peers)) - {None}
    if not wanted:
        return False
    found = False
    for name in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # closed since, or not connected
            number = int(name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                # A duplicate stays the same connection, whatever becomes of the number meanwhile.
                with socket.socket(fileno=os.dup(number)) as connection:
                    if _peer_of(connection) in wanted:
                        connection.shutdown(socket.SHUT_RDWR)
                        found = True
    return found


def _parsed(peer: str) -> Peer | None:
    scheme, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return Peer(_plain(host.strip("[]")), int(port))


def _peer_of(connection: socket.socket) -> Peer | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port, *_ = connection.getpeername()
    return Peer(_plain(host), port)


def _plain(host: str) -> str:
    """An address in one form: a socket for both versions of IP shows those of version 4 as of version 6."""
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)
