"""How much queries reach by their positions alone, counted without looking at each: causal masks and windows.

Query i stands at `offset + i` and reaches the keys from `offset + i - left` to `offset + i + right`, -1 being no bound,
as in `kernels.band`, which needs torch. Plain integers in and out.
"""

from __future__ import annotations


def pairs_within_reach(query_length: int, kv_length: int, offset: int, left: int, right: int) -> int:
    """How many pairs of a query and a key that it reaches there are."""
    ends = query_length * kv_length
    if right >= 0:
        ends = _clipped(offset + right + 1, query_length, kv_length)
    return ends if left < 0 else ends - _clipped(offset - left, query_length, kv_length)


def keys_within_reach(query_length: int, kv_length: int, offset: int, left: int, right: int) -> int:
    """How many keys there are from the first to the last that any query reaches."""
    if not query_length:
        return 0
    end = kv_length if right < 0 else min(kv_length, offset + query_length + right)
    return max(0, end - max(0, offset - left) if left >= 0 else end)


def _clipped(start: int, count: int, most: int) -> int:
    """The sum of `count` consecutive numbers from `start` on, each at least 0 and at most `most`."""
    return _clipped_below(start + count, most) - _clipped_below(start, most)


def _clipped_below(end: int, most: int) -> int:
    """The sum of all numbers below `end`, those below 0 as 0 and those above `most` as that."""
    rising = max(0, min(end, most))
    return rising * (rising - 1) // 2 + max(0, end - most) * most
