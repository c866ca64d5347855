"""What a request may ask of a layer beside its tensors: plain, frozen, hashable, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from attnserve_server.requests.options import ScoreStage


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """Absent `causal` and `window` are as the layer is defined.

    `bottom_right` says where queries without an explicit offset stand: query i at the key S - L + i, not at the key i.
    `average_scores` gives the mean over the heads of what `return_scores` asks for.
    """

    causal: bool | None = None
    window: tuple[int, int] | None = None
    bottom_right: bool = False
    return_lse: bool = False
    return_scores: ScoreStage | None = None
    average_scores: bool = False
