"""What the address of a client names: one server, or several.

In: the argument `address`. Out: a `Target`: known addresses, or a way to look them up. Only names that stand for
several servers are looked up here, so that each server has a connection of its own; everything else is left to gRPC.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias
from urllib.parse import unquote

Address: TypeAlias = str | Sequence[str] | Callable[[], Sequence[str]]
"""One address, several, or a function that returns the current ones."""

_DNS: Final = re.compile(r"dns:///(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>\d+)")
_LIST: Final = re.compile(r"ipv[46]:((//)?/)?(?P<places>.*)")
_NO_PORT: Final = ("unix:", "unix-abstract:", "vsock:", "xds:", "google-c2p:")
"""The schemes that gRPC resolves without a port, or whose port it checks itself."""
_NAME: Final = re.compile(r"dns:((//[^/\s]*)?/)?(?P<place>.*)")
_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\[\]\s]+\]|[^\[\]\s:/,]+):(?P<port>[0-9]+)")
_LAST_PORT: Final = 65535
_EXPECTED: Final = "expected host:port, unix:/path or dns:///name:port"


@dataclass(frozen=True, slots=True)
class Target:
    """The servers that a client may call."""

    name: str
    """A name for all of them."""
    fixed: tuple[str, ...]
    """Their addresses, if they never change."""
    look_up: Callable[[], Sequence[str]] | None = None
    """Otherwise: returns the current addresses. It may block, and fail."""
    authority: str | None = None
    """The name that each server's certificate must have, if that is not in its address."""


def target_of(address: Address) -> Target:
    """What an address names. ValueError if it names nothing."""
    if callable(address):
        return Target(getattr(address, "__name__", "servers"), (), partial(_returned, address))
    if not isinstance(address, str):
        if not isinstance(address, Iterable):
            raise ValueError(f"address: {_EXPECTED}, found {address!r}")
        addresses = tuple(address)
        if not addresses or not all(isinstance(each, str) and each for each in addresses):
            raise ValueError(f"address: expected one at least, each host:port, found {address!r}")
        for each in addresses:
            check_address(each)
        return Target(",".join(addresses), addresses)
    check_address(address)
    if (named := _DNS.fullmatch(address)) is not None:
        host = named["host"].strip("[]")
        return Target(address, (), partial(look_up, host, int(named["port"])), host)
    several = _listed(address)
    return Target(address, tuple(several) if len(several) > 1 else (address,))


def _returned(function: Callable[[], Sequence[str]]) -> Sequence[str]:
    """The addresses that a function returns. ValueError if one of them is not valid."""
    found = function()
    addresses = (found,) if isinstance(found, str) else tuple(found)
    for each in addresses:
        if not isinstance(each, str):
            raise TypeError(f"address: {_EXPECTED}, found {each!r}")
        check_address(each)
    return addresses


def check_address(address: str) -> None:
    """ValueError if an address is not valid. gRPC would not say so: it takes port 443 if there is none, an impossible
    port modulo 65536, and a URL for a name that it looks up in vain, again and again.
    """
    if address.startswith(_NO_PORT):
        if not address.partition(":")[2].strip("/"):
            raise ValueError(f"address: {_EXPECTED}, found {address!r}")
        return
    for place in _places(address):
        found = _HOST_AND_PORT.fullmatch(place)
        if found is None:
            raise ValueError(f"address: {_EXPECTED}, found {address!r}")
        if not 1 <= int(found["port"]) <= _LAST_PORT:
            raise ValueError(f"address: expected a port from 1 to {_LAST_PORT}, found {address!r}")


def host_and_port(address: str) -> tuple[str, int] | None:
    """The host and the port of the server that an address names; None for several, and for one without a port."""
    places = [] if address.startswith(_NO_PORT) else _places(address)
    found = _HOST_AND_PORT.fullmatch(places[0]) if len(places) == 1 else None
    return None if found is None else (found["host"].strip("[]"), int(found["port"]))


def _places(address: str) -> list[str]:
    """The hosts with their ports in an address: what is behind the scheme, if that is one which is known here."""
    named = _NAME.fullmatch(address)
    return _listed(address) or [address if named is None else unquote(named["place"])]


def _listed(address: str) -> list[str]:
    """The addresses in one that lists them (``ipv4:``, ``ipv6:``), without the scheme; empty for any other."""
    found = _LIST.fullmatch(address)
    return [] if found is None else unquote(found["places"]).split(",")


def look_up(host: str, port: int) -> list[str]:
    """The current addresses of a name, each with the port. OSError if there are none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label that is empty, or too long
        raise OSError(f"{host!r} is no name that can be looked up") from None
    return sorted({_joined(str(place[0]), port) for *_, place in found})


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_looked_up(address: str) -> bool:
    """Whether an address is numeric, as `look_up` returns them, rather than a name."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False
