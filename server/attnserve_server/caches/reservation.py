"""Pages promised to one operation, what it has appended into them, and how that is taken back. Pure.

In: appends to layers of caches, within what was promised. Out: where their tokens go. The store makes a reservation and
counts what comes of it; nothing else changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.layer import Placement


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
    """The appends that an operation was promised."""

    appends: Mapping[tuple[Cache, int], Append]
    """By cache and layer."""
    pages: int
    """Pages that were promised and have not been taken."""
    is_open: bool = field(default=True, init=False)

    @property
    def caches(self) -> set[Cache]:
        """The caches, each once, however many of their layers."""
        return {cache for cache, _ in self.appends}

    def append(self, cache: Cache, layer: int, tokens: int) -> Placement:
        """Makes a layer longer by so many tokens, and says where they go. ValueError if they were not reserved."""
        append = self.appends.get((cache, layer))
        if not self.is_open or append is None or not 0 <= tokens <= append.tokens:
            raise ValueError(f"{tokens} tokens for layer {layer} were not reserved")
        target = cache.layers[layer]
        if (pages := target.pages_for(tokens)) > self.pages:
            raise ValueError("the cache was forked or truncated out of turn")
        if not append.appended:
            append.before = target.length
        placement, copied = target.append(tokens)
        append.copied = append.copied if copied is None else copied
        append.tokens -= tokens
        append.appended += tokens
        self.pages -= pages
        return placement

    def undo(self) -> int:
        """Takes all appends back: the layers are as they were before. Returns how many tokens those were.

        Raises ValueError if another operation has changed a layer since.
        """
        made = [(cache.layers[index], append) for (cache, index), append in self.appends.items() if append.appended]
        if any(layer.length != append.before + append.appended for layer, append in made):
            raise ValueError("an append is undone out of turn")
        undone = 0
        for layer, append in made:
            layer.restore(append.before, append.copied)
            undone += append.appended
            append.appended, append.copied = 0, None
        return undone
