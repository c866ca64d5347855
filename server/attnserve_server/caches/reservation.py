"""Pages promised to the appends of one operation, and what it takes to undo them."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnserve_server.caches.cache import Cache


@dataclass(slots=True)
class Append:
    """What an operation may append to one layer of a cache, and what it has."""

    tokens: int
    """How many more tokens it may append."""
    before: int = 0
    """The tokens of the layer before the first append."""
    appended: int = 0
    copied: int | None = None
    """The page that a copy was made of, because others hold it too. It is held until the copy has been made for sure
    and will not be undone: otherwise it might be freed, and written by its next owner, before.
    """


@dataclass(slots=True, eq=False)
class Reservation:
    """The appends that an operation was promised. Only the store changes it."""

    appends: dict[tuple[Cache, int], Append]
    """By cache and layer."""
    pages: int
    """Pages that were promised and have not been taken."""
    is_open: bool = field(default=True, init=False)
