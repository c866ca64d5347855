"""Caches without a store: pages that a test chooses, filled as a store would fill them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from cases import DTYPES, Case

from attnserve_server.caches.layer import Placement, Write
from attnserve_server.caches.shape import CacheShape
from attnserve_server.host.cpus import CACHE_LINE

CPU: Final = torch.device("cpu")


def placement(pages: Sequence[int], per_page: int, start: int, tokens: int) -> Placement:
    """Where `tokens` tokens after the first `start` go, in a cache that has these pages."""
    writes, end = [], start + tokens
    for index in range(start // per_page, -(-end // per_page)):
        first = max(start, index * per_page)
        writes.append(Write(pages[index], first - index * per_page, min(end, (index + 1) * per_page) - first))
    return Placement([], writes)


def page_bytes_for(shape: CacheShape, tokens: int) -> int:
    """The smallest page that holds `tokens` tokens; with short rows it may hold more."""
    half = shape.num_kv_heads * max(shape.head_dim, shape.value_dim) * shape.item_bytes * tokens
    return 2 * -(-half // CACHE_LINE) * CACHE_LINE


def stored(case: Case, storage: str) -> Case:
    """The case with keys and values as they are after storage in dtype `storage`."""
    with np.errstate(over="ignore"):
        key, value = (part.astype(DTYPES[storage]) for part in (case.key, case.value))
    return Case(case.query, key, value, case.options)
