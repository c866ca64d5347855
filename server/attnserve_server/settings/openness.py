"""What anybody on the network can do, as a server is configured: warnings for its log.

In: a configuration. Out: a line for each thing; none where only this machine is served. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnserve_server.settings.config import Config


def openness(config: Config) -> Iterator[str]:
    """What is open to others."""
    if not config.is_local:
        if not config.identifies_callers:
            more = ", and load and unload layers" * config.layer_administration
            yield f"anybody who can reach {config.listen} may use the server{more}: callers are not identified"
        if not config.tls_certificate:
            yield f"traffic on {config.listen} is not encrypted" + ", tokens included" * bool(config.callers)
    if not config.is_http_local:
        if not config.callers:
            yield f"anybody who can reach {config.http_listen} may read the metrics: callers are not identified"
        elif not config.http_tls:
            yield f"traffic on {config.http_listen} is not encrypted, tokens that may read the metrics included"
