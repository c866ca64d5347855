"""What the address of a client names: one server, or several.

In: the argument `address`. Out: a `Target`: addresses that are known, or a way to find out. Only names that stand for
several servers are looked up here, so that each server has a connection of its own; all else is left to gRPC.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

Address: TypeAlias = str | Sequence[str] | Callable[[], Sequence[str]]
"""One address, several, or what says which there are now."""

_DNS: Final = re.compile(r"dns:///(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>\d+)")
_LISTS: Final = ("ipv4:", "ipv6:")
_LAST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Target:
    """The servers that a client may ask."""

    name: str
    """What they are called together."""
    fixed: tuple[str, ...]
    """Their addresses, where those are known for good."""
    look_up: Callable[[], Sequence[str]] | None = None
    """What says which addresses there are now, otherwise. It may take its time, and fail."""
    authority: str | None = None
    """The name by which each of them is to be trusted, where that is not its address."""


def target_of(address: Address) -> Target:
    """What an address names. ValueError if it names nothing."""
    if callable(address):
        return Target(getattr(address, "__name__", "servers"), (), address)
    if not isinstance(address, str):
        addresses = tuple(address)
        if not addresses or not all(isinstance(each, str) and each for each in addresses):
            raise ValueError(f"address: expected one at least, each host:port, found {address!r}")
        for each in addresses:
            check_port(each)
        return Target(",".join(addresses), addresses)
    if not address:
        raise ValueError("address: expected host:port, unix:/path or dns:///name:port, found ''")
    check_port(address)
    if (named := _DNS.fullmatch(address)) is not None:
        host = named["host"].strip("[]")
        return Target(address, (), partial(look_up, host, int(named["port"])), host)
    scheme = next((scheme for scheme in _LISTS if address.startswith(scheme)), "")
    if scheme and "," in address:
        return Target(address, tuple(address.removeprefix(scheme).split(",")))
    return Target(address, (address,))


def check_port(address: str) -> None:
    """ValueError if an address has a port that there cannot be: gRPC would take another one, modulo 65536."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) > _LAST_PORT and not address.startswith("unix:"):
        raise ValueError(f"address: expected a port of at most {_LAST_PORT}, found {address!r}")


def look_up(host: str, port: int) -> list[str]:
    """The addresses that a name has now, each with the port. OSError if there are none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label that is empty, or too long
        raise OSError(f"{host!r} is no name that can be looked up") from None
    return sorted({_joined(str(place[0]), port) for *_, place in found})


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_looked_up(address: str) -> bool:
    """Whether an address is a number, as `look_up` gives them, and no name."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False
