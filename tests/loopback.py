"""The loopback addresses of this machine, which are those of `localhost`: without IPv6 there is only one."""

from __future__ import annotations

import socket


def loopback() -> list[str]:
    """The addresses that can be listened on."""
    return [host for host in ("127.0.0.1", "::1") if _is_ours(host)]


def _is_ours(host: str) -> bool:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True
