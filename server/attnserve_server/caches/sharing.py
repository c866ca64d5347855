"""Which queries read the same first pages, and so are computed together: what they share is then read once for all.

Forks of a cache hold the same pages up to where they diverge. In: the pages of each query. Out: groups. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Group(NamedTuple):
    """Queries, by their places, whose first `shared` pages are the same; 0 for a query alone."""

    members: list[int]
    shared: int


def groups(pages: Sequence[NDArray[np.int32]], largest: int) -> list[Group]:
    """Divides queries into groups of at most `largest`, so that they read the fewest pages."""
    # Queries that share their first pages are then neighbours; the order does not matter otherwise.
    order = sorted(range(len(pages)), key=lambda place: pages[place].tobytes())
    count = -(-len(order) // largest)
    found: list[Group] = []
    for part in range(count):
        members = order[len(order) * part // count : len(order) * (part + 1) // count]
        common = [_common(pages[one], pages[other]) for one, other in pairwise(members)]
        found += _divided(members, common)[1]
    return found


def _divided(members: list[int], common: list[int]) -> tuple[int, list[Group]]:
    """Groups neighbouring queries; `common[i]` is how many first pages query i shares with the next. They are one
    group, or they are divided where they share the fewest pages, whichever saves more reads of pages. Returns how many
    are saved, and the groups.
    """
    least = min(common, default=0)
    whole = least * len(common)
    if len(common) * max(common, default=0) == whole:
        return whole, [Group(members, least)] if whole else [Group([member], 0) for member in members]
    cut = common.index(least) + 1
    before, left = _divided(members[:cut], common[: cut - 1])
    behind, right = _divided(members[cut:], common[cut:])
    return (whole, [Group(members, least)]) if whole >= before + behind else (before + behind, [*left, *right])


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many first elements are the same."""
    count = min(len(one), len(other))
    differing = (one[:count] != other[:count]).nonzero()[0]
    return int(differing[0]) if len(differing) else count
