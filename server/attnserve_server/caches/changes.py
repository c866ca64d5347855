"""The changes that wait for their turn on a layer: how long it will be after them, and how many pages they take.

In: changes in the order of their turns, and the layer's present state. Out: numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Change:
    """What an operation is to do to a layer. One that is the same for all layers may be one object."""


@dataclass(slots=True, eq=False)
class Share(Change):
    """Shares all pages of the layer with that of a fork."""


@dataclass(slots=True, eq=False)
class Cut(Change):
    """Cuts off everything behind the first `length` tokens."""

    length: int


@dataclass(slots=True, eq=False)
class Grow(Change):
    """Appends `tokens` tokens. From its turn on, it also has what is needed to undo that."""

    tokens: int
    before: int = 0
    """The tokens that the layer had before."""
    appends_before: bytes = b""
    """The last appends that it remembered."""
    copied: int | None = None
    """The shared page that is copied, if any. It is held until the copy has certainly been made and will not be undone:
    otherwise it might be freed, and overwritten by its next owner, before that.
    """


class Foreseen(NamedTuple):
    """A layer after all waiting changes, if each succeeds."""

    length: int
    pages: int
    """The most free pages, less those given back, that the changes take at any time until then."""


def foresee(changes: Iterable[Change], length: int, shared: int, per_page: int) -> Foreseen:
    """The outcome of changes to a layer of `length` tokens, `per_page` to a page. Others hold its first `shared` pages,
    too: these are not freed when the layer drops them. A last page that is shared and not full is copied before the
    layer grows.
    """
    taken = most = 0
    pages = -(-length // per_page)
    for change in changes:
        if isinstance(change, Grow):
            if change.tokens and length % per_page and shared == pages:
                taken, shared = taken + 1, shared - 1
            length += change.tokens
            before, pages = pages, -(-length // per_page)
            taken += pages - before
            most = max(most, taken)
        elif isinstance(change, Share):
            shared = pages
        elif isinstance(change, Cut) and change.length < length:
            length = change.length
            before, pages = pages, -(-length // per_page)
            taken -= before - max(pages, shared)
            shared = min(shared, pages)
    return Foreseen(length, most)
