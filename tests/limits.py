"""The limits of one request, for tests that read requests: those of a server that is not configured, on a GPU."""

from __future__ import annotations

from attnserve_server.requests.limits import RequestLimits
from attnserve_server.settings.config import Config

_CONFIG = Config()
LIMITS = RequestLimits(
    max_rank=_CONFIG.max_rank,
    max_elements=_CONFIG.max_elements,
    max_sequences=_CONFIG.max_sequences,
    max_request_flops=_CONFIG.max_flops,
)
