"""How long work takes, learnt from batches that have run: for each kind of work, the time per request and per FLOP. And
how much of a batch a request fills, learnt from batches as they are formed.

Small requests are bounded by what every request costs, in the event loop and on the device, and large ones by their
FLOPs; and a FLOP takes much longer in some kernels than in others. Both figures of a kind are learnt together, as
logarithms, with their uncertainty (an extended Kalman filter): a batch changes most the figure that it depends on most
and that is known least. So a day of small requests, or of another kind, does not disturb what is known of large ones,
and the first large one corrects what was unknown. A kind that has not run yet is taken to be like all others. No clock,
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Final

FIRST_FLOP_SECONDS: Final = 2e-11
"""Before anything is known: a processor of 50 GFLOP/s."""
FIRST_REQUEST_SECONDS: Final = 2e-4
LEAST_SECONDS: Final = 1e-18
"""No figure is less than this or more than `MOST_SECONDS`, whatever clocks say."""
MOST_SECONDS: Final = 1e3

UNKNOWN_FLOP: Final = 1.0
"""The variance of the logarithm of the time per FLOP while it is unknown. It is less than that of the time per request,
because a slow small request is slow in what surrounds its FLOPs."""
UNKNOWN_REQUEST: Final = 6.0
NOISE: Final = 0.1
"""The variance of the logarithm of a batch's time when both figures are known."""
CHANGE: Final = NOISE / 20
"""What a batch adds to the variance of the figure that it depends on: with `NOISE`, the last five batches decide."""
SURPRISE: Final = 3.0
"""An error of more standard deviations than this is a surprise: the batches that follow count more. If the batch took
longer than expected, the error is capped at this, since anything may hold a batch up. If it took less, the error counts
in full: nothing makes a batch faster than it can be.
"""
DOUBT: Final = 3.0
"""By how many times its variance a figure becomes more uncertain after a surprise."""

LEARNING: Final = 0.2
"""The weight of one batch in moving averages. The first ones weigh more: 1, a half, a third, and so on down to this."""
FORGETTING: Final = 0.999
"""The factor by which each batch reduces the largest cost seen."""
MAX_KINDS: Final = 256
"""How many kinds are remembered; the one that ran longest ago is forgotten first."""


@dataclass(slots=True)
class Tally:
    """Work of one kind: the number of requests, their FLOPs together, and those of the largest."""

    requests: int
    flops: float
    largest: float


@dataclass(slots=True)
class Amount:
    """Work, counted by kind."""

    kinds: dict[str, Tally] = field(default_factory=dict)

    def add(self, kind: str, flops: float) -> None:
        """Counts a request in."""
        tally = self.kinds.get(kind)
        if tally is None:
            self.kinds[kind] = Tally(1, flops, flops)
            return
        tally.requests += 1
        tally.flops += flops
        if flops > tally.largest:
            tally.largest = flops

    def remove(self, kind: str, flops: float) -> None:
        """Counts a request out. `largest` remains as it is until no request of the kind is left."""
        tally = self.kinds[kind]
        if tally.requests == 1:
            del self.kinds[kind]
            return
        tally.requests -= 1
        tally.flops -= flops

    def together(self) -> Tally:
        """The total, whatever the kinds."""
        tallies = self.kinds.values()
        if len(tallies) == 1:
            return next(iter(tallies))
        requests, flops = sum(tally.requests for tally in tallies), sum(tally.flops for tally in tallies)
        return Tally(requests, flops, max((tally.largest for tally in tallies), default=0))


class Rate:
    """The time per request and per FLOP, and the covariance of their logarithms."""

    __slots__ = ("_covariance", "_flop_variance", "_request_variance", "flop_seconds", "largest", "request_seconds")

    def __init__(self, flop_seconds: float, request_seconds: float) -> None:
        self.flop_seconds = flop_seconds
        self.request_seconds = request_seconds
        self.largest = 0.0
        """The FLOPs of the largest request that has run recently (`FORGETTING`)."""
        self._flop_variance = UNKNOWN_FLOP
        self._request_variance = UNKNOWN_REQUEST
        self._covariance = 0.0

    def seconds(self, flops: float, requests: int) -> float:
        """How long that many requests, with that many FLOPs together, should take."""
        return flops * self.flop_seconds + requests * self.request_seconds

    def least_seconds(self, flops: float, requests: int) -> float:
        """A lower bound for `seconds`. A request larger than any that has run counts as the largest that has: how much
        longer it takes is unknown.
        """
        return self.seconds(min(flops, requests * self.largest), requests)

    def learn(self, tally: Tally, share: float, error: float) -> None:
        """Learns from the work of one kind in a batch. `share` is the part of the batch's time that this work should
        have taken; `error` is the logarithm of the batch's time divided by what was expected.
        """
        by_flops, by_requests = tally.flops * self.flop_seconds, tally.requests * self.request_seconds
        flops = by_flops / (by_flops + by_requests)  # how sensitive the time is to each figure
        requests = 1.0 - flops
        flop_gain = flops * self._flop_variance + requests * self._covariance
        request_gain = flops * self._covariance + requests * self._request_variance
        variance = flops * flop_gain + requests * request_gain + NOISE / (share * share)
        surprise = error * error > SURPRISE * SURPRISE * variance
        step = (SURPRISE * sqrt(variance) if surprise and error > 0 else error) / variance
        self.flop_seconds = min(max(self.flop_seconds * exp(step * flop_gain), LEAST_SECONDS), MOST_SECONDS)
        self.request_seconds = min(max(self.request_seconds * exp(step * request_gain), LEAST_SECONDS), MOST_SECONDS)
        self.largest = max(tally.largest, self.largest * FORGETTING)
        if surprise:
            if self._flop_variance < UNKNOWN_FLOP:
                self._flop_variance *= 1 + DOUBT * flops
            if self._request_variance < UNKNOWN_REQUEST:
                self._request_variance *= 1 + DOUBT * requests
            return
        # A figure that the time does not depend on learns nothing and forgets nothing.
        self._flop_variance += CHANGE * flops * flops - flop_gain * flop_gain / variance
        self._request_variance += CHANGE * requests * requests - request_gain * request_gain / variance
        self._covariance -= flop_gain * request_gain / variance


class Pace:
    """The measured rates, for each kind of work and for all together."""

    def __init__(
        self, flop_seconds: float = FIRST_FLOP_SECONDS, request_seconds: float = FIRST_REQUEST_SECONDS
    ) -> None:
        self._all = Rate(flop_seconds, request_seconds)
        self._rates: dict[str, Rate] = {}
        self.batches = 0
        """How many batches have been learnt from."""
        self.formed_batches = 0
        """How many batches have been formed."""
        self.request_share = 1.0
        """The part of a full batch that a request is, as a moving average over the batches formed."""
        self.request_seconds = request_seconds
        """How long a request should take, as a moving average."""

    @property
    def changes(self) -> int:
        """How often anything has been learnt."""
        return self.batches + self.formed_batches

    def seconds(self, amount: Amount) -> float:
        """How long this work should take."""
        seconds = 0.0
        for kind, tally in amount.kinds.items():
            seconds += self._rates.get(kind, self._all).seconds(tally.flops, tally.requests)
        return seconds

    def least_seconds(self, amount: Amount) -> float:
        """The least time that this work takes, as far as is known."""
        seconds = 0.0
        for kind, tally in amount.kinds.items():
            if (rate := self._rates.get(kind)) is not None:
                seconds += rate.least_seconds(tally.flops, tally.requests)
        return seconds

    def least_seconds_of(self, kind: str, flops: float) -> float:
        """The least time that one request takes, as far as is known."""
        rate = self._rates.get(kind)
        return 0.0 if rate is None else rate.least_seconds(flops, 1)

    def seconds_of(self, kind: str, flops: float) -> float:
        """How long one request should take."""
        return self._rates.get(kind, self._all).seconds(flops, 1)

    def learn(self, batch: Amount, seconds: float) -> None:
        """Learns from how long a batch took."""
        whole = batch.together()
        if seconds <= 0 or not whole.requests:
            return
        expected = self.seconds(batch)
        error = log(max(seconds, LEAST_SECONDS) / expected)
        for kind, tally in batch.kinds.items():
            rate = self._rates.pop(kind, None) or self._new_rate()
            self._rates[kind] = rate
            rate.learn(tally, rate.seconds(tally.flops, tally.requests) / expected, error)
        in_all = self._all.seconds(whole.flops, whole.requests)
        self._all.learn(whole, 1.0, log(max(seconds, LEAST_SECONDS) / in_all))
        self.batches += 1
        own = self.seconds(batch) / whole.requests
        self.request_seconds += max(LEARNING, 1 / self.batches) * (own - self.request_seconds)

    def formed(self, share: float) -> None:
        """Learns from a batch that has been formed: the part of a full batch that each of its requests is."""
        self.formed_batches += 1
        self.request_share += max(LEARNING, 1 / self.formed_batches) * (share - self.request_share)

    def _new_rate(self) -> Rate:
        """The rate of a kind of which nothing is known yet."""
        if len(self._rates) >= MAX_KINDS:
            del self._rates[next(iter(self._rates))]
        return Rate(self._all.flop_seconds, self._all.request_seconds)
