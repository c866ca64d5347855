"""The place of an operation in the lines of the layers that it changes, and what it appends there. Pure.

In: what it means to do. Out: where its tokens go, and the layers as they were, where that is taken back. The store
makes a reservation, sees to it that there are pages, and counts what comes of it; nothing else changes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from attnserve_server.caches.cache import Cache
from attnserve_server.caches.changes import Append, Change
from attnserve_server.caches.layer import CacheLayer, Placement

C = TypeVar("C", bound=Change, covariant=True)


@dataclass(slots=True, eq=False)
class Reservation(Generic[C]):
    """What an operation means to do to layers of caches, each once."""

    caches: set[Cache]
    changes: Sequence[tuple[CacheLayer, C]]
    in_line: bool = field(default=False, init=False)
    """Whether it waits in the lines of the layers, and has been promised pages there."""
    placed: bool = field(default=False, init=False)
    """Whether its tokens have their places."""
    is_open: bool = field(default=True, init=False)

    @property
    def layers(self) -> list[CacheLayer]:
        """The layers, each once."""
        return [layer for layer, _ in self.changes]

    @property
    def has_turn(self) -> bool:
        """Whether it stands first in its lines, or in none."""
        return not self.in_line or all(layer.is_first(change) for layer, change in self.changes)

    def wait(self, first: bool = False) -> None:
        """Lines up, behind all others or before them."""
        self.in_line = True
        for layer, change in self.changes:
            layer.wait(change, first)

    def wait_no_more(self) -> None:
        """Leaves the lines, if it is there."""
        if self.in_line:
            self.in_line = False
            for layer, change in self.changes:
                layer.wait_no_more(change)


def place(reservation: Reservation[Append], append_ids: Sequence[int] = ()) -> list[Placement]:
    """Makes the layers longer by the tokens of a reservation, and says where they go, layer by layer. The appends have
    these ids, or none.
    """
    placements = []
    append_ids = append_ids or [0] * len(reservation.changes)
    for (layer, append), append_id in zip(reservation.changes, append_ids, strict=True):
        append.before, append.append_id_before = layer.length, layer.append_id
        placement, append.copied = layer.append(append.tokens, append_id)
        placements.append(placement)
    reservation.placed = True
    return placements


def undo(reservation: Reservation[Append]) -> None:
    """Takes the appends back: the layers are as they were before.

    Raises ValueError if another operation has changed a layer since.
    """
    if any(layer.length != append.before + append.tokens for layer, append in reservation.changes):
        raise ValueError("an append is undone out of turn")
    for layer, append in reservation.changes:
        layer.restore(append.before, append.copied, append.append_id_before)
        append.copied = None
    reservation.placed = False
