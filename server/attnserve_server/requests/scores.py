"""What the way in which scores are made says about the kernels that can make them.

In: anything that says how its scores are made. Out: whether float32 has room for them, and whether they are plain
enough for kernels that never hold all scores of a query at once; each of these has further rules.
"""

from __future__ import annotations

from typing import Final, Protocol

MAX_FACTOR: Final = 1e20
"""With a scale or softcap above this, scores may leave the range of float32 although queries and keys are ordinary."""


class Scored(Protocol):
    """A call, a request, a query or a layer, by its scores."""

    @property
    def score(self) -> object | None:
        """None is the dot product; others are learned."""

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""

    @property
    def softcap(self) -> float:
        """0 is none."""


class Returning(Scored, Protocol):
    """What may also ask for its scores."""

    @property
    def return_scores(self) -> object | None:
        """Which ones, if any."""


def needs_float64(scored: Scored) -> bool:
    """Whether scores may leave the range of float32, whatever the queries and keys."""
    return max(abs(scored.scale), scored.softcap) > MAX_FACTOR or 0 < scored.softcap < 1 / MAX_FACTOR


def is_fusable(scored: Returning) -> bool:
    """Whether scores are dot products within float32 that are not capped, and are not asked for."""
    plain = scored.score is None and scored.softcap == 0 and scored.return_scores is None
    return plain and not needs_float64(scored)
