"""What a request may ask of a layer besides its tensors: plain, frozen, hashable, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from attnserve_server.requests.options import ScoreStage, causal_window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """`causal` and `window` default to the layer's own.

    `bottom_right` places queries without an explicit offset: query i at key S - L + i, by its sequence's own
    lengths, instead of key i.
    `average_scores` gives the mean over heads of what `return_scores` asks for.
    """

    causal: bool | None = None
    window: tuple[int, int] | None = None
    bottom_right: bool = False
    return_lse: bool = False
    return_scores: ScoreStage | None = None
    average_scores: bool = False

    def within(self, causal: bool, window: tuple[int, int]) -> tuple[int, int]:
        """The window in which queries find their keys, in a layer that is causal or not and has a window of its own."""
        return causal_window(
            causal if self.causal is None else self.causal, window if self.window is None else self.window
        )
