"""Which results of the native kernel have no meaning, because it met NaN or infinities in a sequence.

In: calls, and the requests that own them. Out: the sequences of each request that other kernels must compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Broken: TypeAlias = dict[int, list[int]]
"""The places of sequences, in order, by the place of their request."""


def broken_of(calls: Sequence[int], owners: Sequence[int]) -> Broken:
    """The sequences that some calls belong to. `owners` has the place of each call's request: the calls of a request
    are adjacent, and its n-th call is its n-th sequence.
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
