"""Which keys a query reaches by its position alone: causal masks and sliding windows are both bands.

Query i stands at `offset + i` and reaches the keys from `offset + i - left` to `offset + i + right`, -1 being no bound.
Plain integers in and out, but for `tensor` and `edges`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Band:
    """The band of `query_length` queries over `kv_length` keys."""

    query_length: int
    kv_length: int
    offset: int
    left: int
    right: int

    def begin(self, query: int) -> int:
        """The first key that a query reaches, if it reaches any."""
        return max(0, self.offset + query - self.left) if self.left >= 0 else 0

    def end(self, query: int) -> int:
        """One beyond the last key that a query reaches, if it reaches any; may be negative."""
        return min(self.kv_length, self.offset + query + self.right + 1) if self.right >= 0 else self.kv_length

    @property
    def is_everything(self) -> bool:
        """Whether every query reaches every key."""
        return self.end(0) >= self.kv_length and self.begin(self.query_length - 1) == 0

    @property
    def is_lower_triangle(self) -> bool:
        """Whether query i reaches exactly the keys up to i, as kernels with a causal flag have it."""
        return self.right == 0 and self.offset == 0 and self.begin(self.query_length - 1) == 0

    def reach(self) -> tuple[int, int]:
        """The range of keys outside of which no query reaches; (0, 0) if no query reaches any key."""
        begin, end = self.begin(0), self.end(self.query_length - 1)
        return (begin, end) if begin < end else (0, 0)

    def narrowed(self) -> tuple[Band, int, int]:
        """The same band over the keys within reach, and their range."""
        begin, end = self.reach()
        return Band(self.query_length, end - begin, self.offset - begin, self.left, self.right), begin, end

    def queries(self, start: int, stop: int) -> Band:
        """The band of some of the queries."""
        return Band(stop - start, self.kv_length, self.offset + start, self.left, self.right)

    def from_bottom_right(self) -> tuple[int, int] | None:
        """The band as (left, right) of queries that stand at the keys S - Lq + i; None if it is no such band.

        For a band narrowed to the keys within reach. Bounds beyond all keys are open.
        """
        corner = self.kv_length - self.query_length
        left = self.left if self.left < self.kv_length else -1
        if self.offset == corner and (self.right <= 0 or corner >= 0):
            return left, self.right if self.right < self.kv_length else -1
        if self.right > 0 and self.offset + self.right == corner:
            left = self.left + self.right if self.left >= 0 else -1
            return left if left < self.kv_length else -1, 0
        return (-1, -1) if self.is_everything else None

    def edges(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The first key that each query reaches, and one beyond its last, int64 [Lq]: equal if it reaches none."""
        at = torch.arange(self.query_length, device=device) + self.offset
        begin = at - self.left if self.left >= 0 else torch.zeros_like(at)
        end = at + self.right + 1 if self.right >= 0 else torch.full_like(at, self.kv_length)
        begin = begin.clamp(0, self.kv_length)
        return begin, end.clamp(max=self.kv_length).maximum(begin)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Bool [Lq, S], true where the query reaches the key."""
        query = torch.arange(self.query_length, device=device).unsqueeze(1) + self.offset
        key = torch.arange(self.kv_length, device=device)
        reached = torch.ones(self.query_length, self.kv_length, dtype=torch.bool, device=device)
        if self.left >= 0:
            reached &= key >= query - self.left
        if self.right >= 0:
            reached &= key <= query + self.right
        return reached
