"""The place of an operation in the queues of the layers that it changes, and what it appends there. Pure.

In: the changes that it is to make. Out: where its tokens go; the layers as they were, if that is undone. The store
makes a reservation, secures its pages, and counts its outcome; nothing else changes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.changes import Change, Grow
from attnserve_server.caches.layer import CacheLayer, Placement

C = TypeVar("C", bound=Change, covariant=True)


class OfEachLayer(Generic[C]):
    """Changes of whole caches: of each, the same to all layers. A cache may have hundreds, and many requests may wait
    for it: so this takes no memory for each.
    """

    __slots__ = ("_changes",)

    def __init__(self, changes: Sequence[tuple[Cache, C]]) -> None:
        """These changes, one for each cache."""
        self._changes = changes

    def __iter__(self) -> Iterator[tuple[CacheLayer, C]]:
        return ((layer, change) for cache, change in self._changes for layer in cache.layers)


@dataclass(slots=True, eq=False)
class Reservation(Generic[C]):
    """What an operation is to do to layers of one owner's caches, each of them once."""

    caches: set[Cache]
    changes: Iterable[tuple[CacheLayer, C]]
    """Can be iterated again and again."""
    source: str
    """The field of the request that its tokens come from, for errors; none if it appends nothing."""
    in_line: bool = field(default=False, init=False)
    """Whether it waits in the queues of the layers, and counts in what they are promised."""
    placed: bool = field(default=False, init=False)
    """Whether its tokens have been placed."""
    is_open: bool = field(default=True, init=False)

    @property
    def layers(self) -> list[CacheLayer]:
        """The layers, each once."""
        return [layer for layer, _ in self.changes]

    @property
    def owner(self) -> str | None:
        """Whose caches they are."""
        return next((cache.owner for cache in self.caches), None)

    @property
    def has_turn(self) -> bool:
        """Whether it is first in its queues, or in none."""
        return not self.in_line or all(layer.is_first(change) for layer, change in self.changes)

    def wait(self, first: bool = False) -> None:
        """Joins the queues, behind all others or before them."""
        self.in_line = True
        for layer, change in self.changes:
            layer.wait(change, first)

    def wait_no_more(self) -> None:
        """Leaves the queues, if it is in them."""
        if self.in_line:
            self.in_line = False
            for layer, change in self.changes:
                layer.wait_no_more(change)


def place(reservation: Reservation[Grow], append_ids: Sequence[int]) -> list[Placement]:
    """Extends the layers by the tokens of a reservation, and says where these go, layer by layer. The appends have
    these ids; 0 is none.
    """
    placements = []
    for (layer, append), append_id in zip(reservation.changes, append_ids, strict=True):
        append.before, append.appends_before = layer.length, layer.appends
        placement, append.copied = layer.append(append.tokens, append_id)
        placements.append(placement)
    reservation.placed = True
    return placements


def undo(reservation: Reservation[Grow]) -> None:
    """Takes back the appends: the layers are as they were before.

    Raises ValueError if another operation has changed a layer since.
    """
    if any(layer.length != append.before + append.tokens for layer, append in reservation.changes):
        raise ValueError("an append is undone out of turn")
    for layer, append in reservation.changes:
        layer.restore(append.before, append.copied, append.appends_before)
        append.copied = None
    reservation.placed = False
