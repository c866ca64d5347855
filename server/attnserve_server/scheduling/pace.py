"""How long work takes, learnt from batches that have run: for each kind of work so much a request, and so much a FLOP.

Small requests are bounded by what every request costs, in the event loop and on the device, and large ones by their
FLOPs; and a FLOP takes one kernel much longer than another. Both figures of a kind are learnt together, as logarithms,
with how uncertain they are (an extended Kalman filter): a batch moves most what it says most of and what is known
least. So a day of small requests, or of another kind, leaves alone what is known of large ones, and the first large
one corrects what nothing was known of. A kind that has not run yet is taken to be like all others. No clock, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Final

FIRST_FLOP_SECONDS: Final = 2e-11
"""Before anything is known: a processor of 50 GFLOP/s."""
FIRST_REQUEST_SECONDS: Final = 2e-4
LEAST_SECONDS: Final = 1e-18
"""Nothing takes less or more, whatever clocks say."""
MOST_SECONDS: Final = 1e3

UNKNOWN_FLOP: Final = 1.0
"""The variance of the logarithm of a FLOP's time, where nothing is known of it; below that of a request's, because a
small request that is slow is slow by what is around its FLOPs."""
UNKNOWN_REQUEST: Final = 6.0
NOISE: Final = 0.1
"""The same of how long a batch takes, where everything is known."""
CHANGE: Final = NOISE / 20
"""What a batch adds to the variance of what it was about: with `NOISE`, the last five batches decide."""
SURPRISE: Final = 3.0
"""More standard deviations than these are a surprise: what follows counts more. Of a batch that took so much longer no
more is believed, for anything may hold it up; nothing makes one faster than it can be.
"""
DOUBT: Final = 3.0
"""By how many times its variance what was surprising becomes more uncertain."""

LEARNING: Final = 0.2
"""The part of one batch in what requests are like at the moment; the first has all, the second half, and so on."""
FORGETTING: Final = 0.999
"""What each batch leaves of the largest cost that has been seen."""
MAX_KINDS: Final = 256
"""The kinds that are remembered; the one that ran longest ago is forgotten first."""


@dataclass(slots=True)
class Part:
    """So much work of one kind: how many requests, their FLOPs together, and those of the largest."""

    requests: int
    flops: float
    largest: float


@dataclass(slots=True)
class Amount:
    """Work of several kinds, counted."""

    kinds: dict[str, Part] = field(default_factory=dict)

    def add(self, kind: str, flops: float) -> None:
        """Counts a request in."""
        part = self.kinds.get(kind)
        if part is None:
            self.kinds[kind] = Part(1, flops, flops)
            return
        part.requests += 1
        part.flops += flops
        if flops > part.largest:
            part.largest = flops

    def remove(self, kind: str, flops: float) -> None:
        """Counts a request out. The largest is that of all there have been since there was none of its kind."""
        part = self.kinds[kind]
        if part.requests == 1:
            del self.kinds[kind]
            return
        part.requests -= 1
        part.flops -= flops

    def together(self) -> Part:
        """What it is, whatever the kinds."""
        parts = self.kinds.values()
        if len(parts) == 1:
            return next(iter(parts))
        requests, flops = sum(part.requests for part in parts), sum(part.flops for part in parts)
        return Part(requests, flops, max((part.largest for part in parts), default=0))


class Rate:
    """What a request and a FLOP take, and the covariance of the logarithms of the two."""

    __slots__ = ("_covariance", "_flop_variance", "_request_variance", "flop_seconds", "largest", "request_seconds")

    def __init__(self, flop_seconds: float, request_seconds: float) -> None:
        self.flop_seconds = flop_seconds
        self.request_seconds = request_seconds
        self.largest = 0.0
        """The FLOPs of the largest request that has run, not too long ago."""
        self._flop_variance = UNKNOWN_FLOP
        self._request_variance = UNKNOWN_REQUEST
        self._covariance = 0.0

    def seconds(self, flops: float, requests: int) -> float:
        """How long so many requests with so many FLOPs together should take."""
        return flops * self.flop_seconds + requests * self.request_seconds

    def least_seconds(self, flops: float, requests: int) -> float:
        """The same, as far as is known: what is larger than any that has run takes longer, but who knows how long."""
        return self.seconds(min(flops, requests * self.largest), requests)

    def learn(self, part: Part, share: float, error: float) -> None:
        """Takes notice of a part of a batch, which should have taken such a share of its time, and by how much the
        logarithm of that was wrong.
        """
        by_flops, by_requests = part.flops * self.flop_seconds, part.requests * self.request_seconds
        flops = by_flops / (by_flops + by_requests)  # how much the time follows a change of each
        requests = 1.0 - flops
        flop_gain = flops * self._flop_variance + requests * self._covariance
        request_gain = flops * self._covariance + requests * self._request_variance
        variance = flops * flop_gain + requests * request_gain + NOISE / (share * share)
        surprise = error * error > SURPRISE * SURPRISE * variance
        step = (SURPRISE * sqrt(variance) if surprise and error > 0 else error) / variance
        self.flop_seconds = min(max(self.flop_seconds * exp(step * flop_gain), LEAST_SECONDS), MOST_SECONDS)
        self.request_seconds = min(max(self.request_seconds * exp(step * request_gain), LEAST_SECONDS), MOST_SECONDS)
        self.largest = max(part.largest, self.largest * FORGETTING)
        if surprise:
            if self._flop_variance < UNKNOWN_FLOP:
                self._flop_variance *= 1 + DOUBT * flops
            if self._request_variance < UNKNOWN_REQUEST:
                self._request_variance *= 1 + DOUBT * requests
            return
        # Of what had no part nothing was learnt, and nothing is forgotten.
        self._flop_variance += CHANGE * flops * flops - flop_gain * flop_gain / variance
        self._request_variance += CHANGE * requests * requests - request_gain * request_gain / variance
        self._covariance -= flop_gain * request_gain / variance


class Pace:
    """The measured rates, of each kind of work and of all together."""

    def __init__(
        self, flop_seconds: float = FIRST_FLOP_SECONDS, request_seconds: float = FIRST_REQUEST_SECONDS
    ) -> None:
        self._all = Rate(flop_seconds, request_seconds)
        self._rates: dict[str, Rate] = {}
        self.batches = 0
        """Of how many batches something has been learnt."""
        self.request_flops = 0.0
        """The FLOPs of a request, as requests are at the moment."""
        self.request_seconds = request_seconds
        """How long one should take, as they are at the moment."""

    def seconds(self, amount: Amount) -> float:
        """How long so much work should take."""
        seconds = 0.0
        for kind, part in amount.kinds.items():
            seconds += self._rates.get(kind, self._all).seconds(part.flops, part.requests)
        return seconds

    def least_seconds(self, amount: Amount) -> float:
        """How long it takes at the least, as far as is known."""
        seconds = 0.0
        for kind, part in amount.kinds.items():
            if (rate := self._rates.get(kind)) is not None:
                seconds += rate.least_seconds(part.flops, part.requests)
        return seconds

    def least_seconds_of(self, kind: str, flops: float) -> float:
        """How long one request takes at the least, as far as is known."""
        rate = self._rates.get(kind)
        return 0.0 if rate is None else rate.least_seconds(flops, 1)

    def work(self, flops: float) -> float:
        """What a request costs with all that goes with it, in FLOPs: the same for every kind, so that what is learnt of
        kinds changes nobody's share.
        """
        return flops + self._all.request_seconds / self._all.flop_seconds

    def work_of(self, seconds: float) -> float:
        """The FLOPs that take so long."""
        return seconds / self._all.flop_seconds

    def learn(self, batch: Amount, seconds: float) -> None:
        """Takes notice of how long a batch took."""
        whole = batch.together()
        if seconds <= 0 or not whole.requests:
            return
        expected = self.seconds(batch)
        error = log(max(seconds, LEAST_SECONDS) / expected)
        for kind, part in batch.kinds.items():
            rate = self._rates.pop(kind, None) or self._new_rate()
            self._rates[kind] = rate
            rate.learn(part, rate.seconds(part.flops, part.requests) / expected, error)
        in_all = self._all.seconds(whole.flops, whole.requests)
        self._all.learn(whole, 1.0, log(max(seconds, LEAST_SECONDS) / in_all))
        self.batches += 1
        gain = max(LEARNING, 1 / self.batches)
        self.request_flops += gain * (whole.flops / whole.requests - self.request_flops)
        self.request_seconds += gain * (self.seconds(batch) / whole.requests - self.request_seconds)

    def _new_rate(self) -> Rate:
        """That of a kind which nothing is known of."""
        if len(self._rates) >= MAX_KINDS:
            del self._rates[next(iter(self._rates))]
        return Rate(self._all.flop_seconds, self._all.request_seconds)
