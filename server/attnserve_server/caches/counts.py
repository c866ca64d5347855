"""What has happened to the caches since the start: numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

EvictionReason: TypeAlias = Literal["lease", "pages", "caches"]
"""Why an expired cache was evicted: it was looked for, or its room was needed, for pages or for another cache."""


@dataclass(slots=True)
class Counts:
    """How often each event has happened."""

    created: int = 0
    forks: int = 0
    appends: int = 0
    """Appends to a layer that were not undone, counted when their reservation ends."""
    appended_tokens: int = 0
    """Their tokens."""
    truncations: int = 0
    deletions: int = 0
    """Caches deleted by callers."""
    evictions: dict[EvictionReason, int] = field(default_factory=lambda: dict.fromkeys(get_args(EvictionReason), 0))
    """Caches whose lease had ended."""
