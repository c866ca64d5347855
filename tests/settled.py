"""The settings of a client without TLS, a token, or names to look up again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnserve import TLS
from attnserve._settings.config import Settings


def settings_of(
    address: str,
    *,
    timeout: float | None = None,
    retries: int = 0,
    options: Sequence[tuple[str, Any]] = (),
    tls: TLS | None = None,
) -> Settings:
    """The settings, of a client with one stream."""
    return Settings(address, "stream", timeout, retries, 1, options, tls, None, 10.0)
