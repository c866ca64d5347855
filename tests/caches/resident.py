"""Caches without a store: pages that a test chooses, filled as a store would have them filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from attnserve_server.caches.layer import Placement, Write

CPU: Final = torch.device("cpu")


def placement(pages: Sequence[int], per_page: int, start: int, tokens: int) -> Placement:
    """Where `tokens` tokens behind the first `start` go, of a cache that has these pages."""
    writes, end = [], start + tokens
    for index in range(start // per_page, -(-end // per_page)):
        first = max(start, index * per_page)
        writes.append(Write(pages[index], first - index * per_page, min(end, (index + 1) * per_page) - first))
    return Placement([], writes)
