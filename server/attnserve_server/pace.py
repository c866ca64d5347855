"""How long work takes, learnt from batches that have run: so much for each FLOP, and so much for each request.

Small requests are bounded by what every request costs, in the event loop and on the device, and large ones by their
FLOPs. Both figures are learnt together: each batch moves them by its error, each by the part that it has in the batch,
so that a day of small requests leaves alone what is known of large ones. No clock, no torch.
"""

from __future__ import annotations

from math import exp, log
from typing import Final

FIRST_FLOP_SECONDS: Final = 2e-11
"""Before anything is known: a processor of 50 GFLOP/s."""
FIRST_REQUEST_SECONDS: Final = 2e-4
FLOP_SECONDS: Final = (1e-18, 1e-3)
"""Nothing is faster or slower, whatever clocks say."""
REQUEST_SECONDS: Final = (1e-9, 1e3)
CLOCK_SECONDS: Final = 1e-9
"""Less is not measured."""
LEARNING: Final = 0.2
"""The part of an error that one batch corrects; the first one corrects all of it, the second half, and so on."""
LARGEST_ERROR: Final = 2.0
"""What is taken of an error at most, as the logarithm of a factor: what is none of a batch's own may hold it up."""
FORGETTING: Final = 0.999
"""What each batch leaves of the largest cost that has been seen."""


class Pace:
    """The measured rate."""

    def __init__(
        self, flop_seconds: float = FIRST_FLOP_SECONDS, request_seconds: float = FIRST_REQUEST_SECONDS
    ) -> None:
        self._flop_seconds = flop_seconds
        self._request_seconds = request_seconds
        self._largest = 0.0
        self._batches = 0
        self.request_flops = 0.0
        """The FLOPs of a request, as requests are at the moment."""

    def seconds(self, flops: float, requests: int) -> float:
        """How long so many requests with so many FLOPs together should take."""
        return flops * self._flop_seconds + requests * self._request_seconds

    def work(self, flops: float) -> float:
        """What a request costs with all that goes with it, in FLOPs."""
        return flops + self._request_seconds / self._flop_seconds

    def work_of(self, seconds: float) -> float:
        """The FLOPs that take so long."""
        return seconds / self._flop_seconds

    def least_seconds(self, flops: float) -> float:
        """How long a request takes at the least, as far as is known: one larger than any that has run takes longer than
        those, but who knows how long.
        """
        return self.seconds(min(flops, self._largest), 1)

    def learn(self, flops: float, requests: int, largest: float, seconds: float) -> None:
        """Takes notice of a batch: its FLOPs, its requests, the FLOPs of the largest of them, and how long it took."""
        if seconds <= 0 or flops + requests <= 0:
            return
        seconds = max(seconds, CLOCK_SECONDS)
        by_flops, by_requests = flops * self._flop_seconds, requests * self._request_seconds
        expected = by_flops + by_requests
        self._batches += 1
        gain = max(LEARNING, 1 / self._batches)
        error = log(seconds / expected)
        if gain == LEARNING:
            error = max(-LARGEST_ERROR, min(LARGEST_ERROR, error))
        self.request_flops += gain * (flops / requests - self.request_flops)
        step = gain * error * expected / (by_flops * by_flops + by_requests * by_requests)
        self._flop_seconds = _within(FLOP_SECONDS, self._flop_seconds * exp(step * by_flops))
        self._request_seconds = _within(REQUEST_SECONDS, self._request_seconds * exp(step * by_requests))
        self._largest = max(largest, self._largest * FORGETTING)


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])
