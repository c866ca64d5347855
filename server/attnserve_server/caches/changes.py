"""What those who wait for their turn mean to do to a layer: how long it will be then, and how many pages that takes.

In: changes in the order of their turns, and how the layer is now. Out: numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Change:
    """What an operation means to do to one layer."""


@dataclass(slots=True, eq=False)
class Share(Change):
    """To share all its pages with that of a fork."""


@dataclass(slots=True, eq=False)
class Cut(Change):
    """To cut off what is behind the first `length` tokens."""

    length: int


@dataclass(slots=True, eq=False)
class Append(Change):
    """To append so many tokens; and, from its turn on, what that has done."""

    tokens: int
    before: int = 0
    """The tokens that the layer had before."""
    append_id_before: int = 0
    """The id of the append that had changed it last."""
    copied: int | None = None
    """The page that a copy was made of, because others hold it too. It is held until the copy has been made for sure
    and will not be undone: otherwise it might be freed, and written by its next owner, before.
    """


class Foreseen(NamedTuple):
    """A layer when all who wait have had their turn, if each does what it means to do."""

    length: int
    pages: int
    """The most free pages that will have been taken by then, less those that are given back, at any time."""


def foresee(changes: Iterable[Change], length: int, shared: int, per_page: int) -> Foreseen:
    """What comes of changes to a layer of so many tokens, `per_page` to a page, whose first `shared` pages others hold
    too: these are not free when it lets go of them, and a last one that is not full is copied before it grows.
    """
    taken = most = 0
    pages = -(-length // per_page)
    for change in changes:
        if isinstance(change, Append):
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
