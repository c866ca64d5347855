"""Which results of the native kernel have no meaning, because it came upon NaN or infinities in a sequence.

In: calls, and whose they are. Out: the sequences of each request that are to be computed in another way, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Broken: TypeAlias = dict[int, list[int]]
"""The sequences of requests, both by their places and in their order."""


def broken_of(calls: Sequence[int], owners: Sequence[int]) -> Broken:
    """Whose sequences the results of some calls are. `owners` has the place of the request of each call: those of one
    request are together, and its n-th call is of its n-th sequence.
    """
    if not calls:
        return {}
    firsts: dict[int, int] = {}
    for call, owner in enumerate(owners):
        firsts.setdefault(owner, call)
    broken: Broken = {}
    for call in sorted(calls):
        broken.setdefault(owners[call], []).append(call - firsts[owners[call]])
    return broken
