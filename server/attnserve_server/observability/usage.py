"""Usage of the server by each identified caller.

In: callers' names, once an RPC or stream, and what was computed for them or refused to them. Out: counts, of at most
MAX_CALLERS identified callers; all unidentified ones count as one more, and so do all beyond the bound.
"""

from __future__ import annotations

from typing import Final

ANONYMOUS: Final = "anonymous"
OTHER: Final = "other"
MAX_CALLERS: Final = 100
"""Each caller adds a few time series to the metrics, for as long as the server runs."""


class Usage:
    """What one caller has used."""

    __slots__ = ("device_seconds", "flops", "query_tokens", "rejected", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.query_tokens = 0
        self.flops = 0
        self.device_seconds = 0.0
        self.rejected = 0

    def computed(self, query_tokens: int, flops: int, device_seconds: float, requests: int = 1) -> None:
        """A request was computed for it, or so many together; the device took so long for that."""
        self.requests += requests
        self.query_tokens += query_tokens
        self.flops += flops
        self.device_seconds += device_seconds


class UsageByCaller:
    """The usage of every caller, by name, in the order in which they came."""

    def __init__(self) -> None:
        self._by_name = {ANONYMOUS: Usage()}

    def of(self, name: str | None) -> Usage:
        """The usage of a caller, to be kept while it is served; None is an unidentified one."""
        name = ANONYMOUS if name is None else name
        usage = self._by_name.get(name)
        if usage is None:
            if len(self._by_name) > MAX_CALLERS:
                name = OTHER
            usage = self._by_name.setdefault(name, Usage())
        return usage

    def items(self) -> list[tuple[str, Usage]]:
        """All callers so far."""
        return list(self._by_name.items())
