"""The factors on scores, scale and softcap, and for which of them float32 suffices."""

from __future__ import annotations

from typing import Final

MAX_FACTOR: Final = 1e20
"""With a scale or softcap above this, scores may leave the range of float32 although queries and keys are ordinary."""
