"""A resident cache: its name, its origin, when its lease ends, and its layers. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from attnserve_server.caches.layer import CacheLayer, PageTable, pages_in, shared_pages
from attnserve_server.caches.shape import CacheShape


class Origin(NamedTuple):
    """Who made a cache, and by what it is found again other than by its name."""

    owner: str | None
    """The caller that made it; None where callers are not identified."""
    request_id: bytes = b""
    """The id of the request that made it, by which a resend is recognised; empty if it has none."""
    parent: str | None = None
    """The name of the cache that it was forked from, which may be gone; None if it was created."""
    alias: str = ""
    """Its owner's own name for it; empty if it has none."""


class Cache:
    """Keys and values that stay. Only the store changes them. Times are seconds of one clock."""

    __slots__ = (
        "alias", "created", "expires", "gone", "layers", "name", "number", "owner", "page_bytes", "parent",
        "request_id", "shape", "truncations", "ttl", "users",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        number: int,
        origin: Origin,
        shape: CacheShape,
        page_bytes: int,
        layers: Sequence[CacheLayer],
        ttl: float | None,
        now: float,
    ) -> None:
        """A cache of these layers. Without a `ttl` its lease never ends."""
        self.name = name
        self.number = number
        """Larger than that of all earlier caches of its owner that still exist."""
        self.owner, self.request_id, self.parent, self.alias = origin
        self.shape = shape
        self.page_bytes = page_bytes
        self.layers = layers
        """Empty, and all the same, once it is gone and nothing holds it any more."""
        self.ttl = ttl
        self.created = now
        self.expires = math.inf
        """When its lease ends. A cache in use has not expired, whatever this says."""
        self.truncations: tuple[int, ...] = ()
        """The ids of the latest truncations, by which resends are recognised; the last one first."""
        self.users = 0
        """Operations in flight that hold it."""
        self.gone = False
        """Whether callers can no longer find it. Its pages are freed when nothing holds it any more."""
        self.renew(now)

    def renew(self, now: float) -> None:
        """Starts its lease anew."""
        if self.ttl is not None:
            self.expires = now + self.ttl

    def expired(self, now: float) -> bool:
        """Whether its lease has ended; never while it is in use."""
        return not self.users and self.expires <= now

    def length(self, layer: int) -> int:
        """The tokens of a layer."""
        return self.layers[layer].length

    def has_append(self, layer: int, append_id: int) -> bool:
        """Whether one of the last appends to a layer has this id, and all its tokens are still there."""
        return self.layers[layer].has_append(append_id)

    def coming_length(self, layer: int) -> int:
        """The tokens that a layer will have after all waiting operations, if each succeeds."""
        return self.layers[layer].coming_length

    @property
    def lengths(self) -> list[int]:
        """The tokens of each layer."""
        return [layer.length for layer in self.layers]

    def pages(self, layer: int) -> array[int]:
        """The pages of a layer, in the order of its tokens: a copy, the caller's to keep."""
        return self.layers[layer].pages

    def table(self, layer: int) -> PageTable:
        """The pages of a layer, as an immutable table."""
        return self.layers[layer].table

    @property
    def bytes(self) -> int:
        """The bytes of its pages, shared ones included."""
        return pages_in(self.layers) * self.page_bytes

    @property
    def shared_bytes(self) -> int:
        """The bytes of its pages that others hold too."""
        return shared_pages(self.layers) * self.page_bytes
