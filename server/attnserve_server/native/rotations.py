"""The angles by which positions rotate pairs of elements (RoPE), by the native library.

In: positions, and the frequency of each pair. Out: cosines and sines, of float32: each number depends on its own
position and frequency alone, whatever the widths.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from attnserve_server.native import library

ASIDE_PAIRS: Final = 2_000
"""More pairs than these take longer than giving the GIL away and getting it back."""


class Rotations:
    """The library's rotations."""

    def __init__(self) -> None:
        """Raises OSError if there is no library."""
        path, address, size = str(library.PATH), ctypes.c_void_p, ctypes.c_int64
        self._aside = ctypes.CDLL(path).attnserve_rotations
        self._at_once = ctypes.PyDLL(path).attnserve_rotations
        for function in (self._aside, self._at_once):
            function.argtypes, function.restype = [address, size, address, size, address], None

    def of(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """float32 [n, 2 pairs]: for contiguous int64 positions [n] and float64 frequencies [pairs], the cosines of all
        angles, positions times frequencies, then their sines. Angles are float64.
        """
        count, pairs = len(positions), len(frequencies)
        found = torch.empty(count, 2 * pairs)
        function = self._aside if count * pairs > ASIDE_PAIRS else self._at_once
        function(frequencies.data_ptr(), pairs, positions.data_ptr(), count, found.data_ptr())
        return found
