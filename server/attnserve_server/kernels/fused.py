"""What fused kernels compute: those that never hold all scores of a query at once.

In: anything that says how scores are computed. Out: whether such a kernel may be asked at all; each has further rules.
"""

from __future__ import annotations

from typing import Protocol


class Scored(Protocol):
    """A call, a request or a query, by its scores."""

    @property
    def score(self) -> object | None:
        """None is the dot product; others are learned."""

    @property
    def softcap(self) -> float:
        """0 is none."""

    @property
    def return_scores(self) -> object | None:
        """Which scores are asked for, if any."""


def is_fusable(scored: Scored) -> bool:
    """Whether scores are dot products that are not capped, and are not asked for."""
    return scored.score is None and scored.softcap == 0 and scored.return_scores is None
