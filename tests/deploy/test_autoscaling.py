"""The number of replicas as the load changes: the autoscaler's formula with its manifest, in simulated time.

The formula is from the HorizontalPodAutoscaler's documentation
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/); KEDA relies on it as well. The metrics of
the replicas were measured on a real one: `FULL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from manifests import combine, needs_kubectl
from test_scaling_and_monitoring import quantity

pytestmark = needs_kubectl

STEP_S = 15
"""Interval between the autoscaler's evaluations."""
START_S = 30
"""Time until a new replica is ready."""
TOLERANCE = 0.1
"""A metric this close to its target, relatively, changes nothing."""

QUEUE, DEVICE, LOOP = "attnserve_queue_requests", "attnserve_device_busy_ratio", "attnserve_event_loop_busy_ratio"
FULL = {
    # 8 heads of 64 over 128 tokens: the device is the bottleneck, the queue grows until it rejects requests.
    "128 tokens": {QUEUE: 50.0, DEVICE: 1.0, LOOP: 0.5},
    # Over 16 tokens: requests wait in their connections.
    "16 tokens": {QUEUE: 7.0, DEVICE: 0.4, LOOP: 0.97},
    # One at a time, each taking seconds.
    "huge": {QUEUE: 4.0, DEVICE: 1.0, LOOP: 0.01},
}
"""Metrics of an overloaded replica, by kind of request."""


@dataclass
class Autoscaler:
    """An autoscaler as a manifest defines it, starting at its fewest replicas, and its history so far."""

    spec: dict[str, Any]
    replicas: int = 0
    history: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = self.spec["minReplicas"]

    @property
    def targets(self) -> dict[str, float]:
        """The target average of each metric."""
        return {
            metric["pods"]["metric"]["name"]: quantity(metric["pods"]["target"]["averageValue"])
            for metric in self.spec["metrics"]
        }

    def look(self, ready: int, metrics: dict[str, float]) -> None:
        """Evaluates the averages over the ready replicas once, and may change the number of replicas."""
        wanted = max(self._wants(ready, metrics[name] / target) for name, target in self.targets.items())
        self.wanted.append(min(max(wanted, self.spec["minReplicas"]), self.spec["maxReplicas"]))
        up, down = (self.spec["behavior"][direction] for direction in ("scaleUp", "scaleDown"))
        most, least = max(self._recently(self.wanted, down)), min(self._recently(self.wanted, up))
        self.history.append(self.replicas)
        if least > self.replicas:
            self.replicas = min(least, self._limit(up, +1))
        elif most < self.replicas:
            self.replicas = max(most, self._limit(down, -1))

    def _wants(self, ready: int, ratio: float) -> int:
        if ratio > 1:
            ratio *= ready / self.replicas  # starting replicas will take their share
            if ratio <= 1:
                return self.replicas
            return self.replicas if ratio - 1 <= TOLERANCE else math.ceil(self.replicas * ratio)
        return self.replicas if 1 - ratio <= TOLERANCE else math.ceil(ready * ratio)

    def _recently(self, values: list[int], behavior: dict[str, Any]) -> list[int]:
        return values[-max(behavior["stabilizationWindowSeconds"] // STEP_S, 1) :]

    def _limit(self, behavior: dict[str, Any], sign: int) -> int:
        (policy,) = behavior["policies"]
        before = self.history[-(policy["periodSeconds"] // STEP_S) :][0]
        change = policy["value"] if policy["type"] == "Pods" else math.ceil(before * policy["value"] / 100)
        return int(before + sign * change)


def replicas_under(load: Iterable[float], full: dict[str, float], drop: frozenset[str] = frozenset()) -> list[int]:
    """The number of replicas at each step, under a load in units of one replica's capacity."""
    rendered = combine("autoscaling")
    (manifest,) = rendered.of_kind("HorizontalPodAutoscaler")
    # Callers find new replicas when they reconnect.
    found_s = START_S + rendered.config.max_connection_age
    spec = manifest["spec"]
    kept = [metric for metric in spec["metrics"] if metric["pods"]["metric"]["name"] not in drop]
    scaler = Autoscaler(spec | {"metrics": kept})
    minute = [dict.fromkeys(full, 0.0)] * (60 // STEP_S)
    for now in load:
        ready, found = (
            min([scaler.replicas, *scaler.history[-math.ceil(seconds / STEP_S) :]]) for seconds in (START_S, found_s)
        )
        share = now / found
        # A queue stays empty until the replica is nearly overloaded.
        says = {name: value * (share**8 if name == QUEUE else share) for name, value in full.items()}
        minute = [*minute[1:], {name: min(value, full[name]) * found / ready for name, value in says.items()}]
        scaler.look(ready, {name: sum(past[name] for past in minute) / len(minute) for name in full})
    return [*scaler.history, scaler.replicas]


def minutes(count: float) -> int:
    """Minutes converted to steps."""
    return round(count * 60 / STEP_S)


@pytest.fixture(params=FULL)
def full(request: pytest.FixtureRequest) -> dict[str, float]:
    """The metrics of a full replica, for each kind of request."""
    return FULL[request.param]


def test_a_step_of_load_has_enough_replicas_within_minutes(full: dict[str, float]) -> None:
    found = replicas_under([1.0] * minutes(10) + [5.0] * minutes(10), full)
    before, after = found[minutes(10)], found[minutes(15) :]
    assert before == 2
    assert min(after) >= 6, "a sixth is left for bursts"
    assert max(after) <= 10
    assert len(set(after)) == 1, "it has come to rest"


def test_without_the_event_loop_small_requests_would_fill_two_replicas_for_ever() -> None:
    load = [1.0] * minutes(10) + [5.0] * minutes(30)
    assert max(replicas_under(load, FULL["16 tokens"], frozenset({LOOP}))) == 2


def test_capacity_grows_no_faster_than_it_can_be_measured(full: dict[str, float]) -> None:
    found = replicas_under([1.0] * minutes(10) + [50.0] * minutes(10), full)
    assert found[-1] == 10
    for step in range(minutes(1), len(found)):
        assert found[step] <= 2 * found[step - minutes(1)]


def test_a_lull_costs_no_replica_and_an_evening_one_after_another(full: dict[str, float]) -> None:
    day = [1.0] * minutes(10) + [5.0] * minutes(50)
    lull = [0.5] * minutes(8) + [5.0] * minutes(10)
    found = replicas_under(day + lull, full)
    assert set(found[minutes(50) :]) == {found[minutes(50)]}

    found = replicas_under(day + [0.5] * minutes(90), full)[minutes(60) :]
    assert set(found[: minutes(9)]) == {found[0]}
    assert found[-1] == 2
    for step in range(len(found) - minutes(5)):
        assert found[step] - found[step + minutes(5)] <= 1, "caches go with a replica: their callers need time"


@pytest.mark.parametrize("load", [0.1, 1.5, 3.0, 4.4, 7.0])
def test_under_an_even_load_it_rests(full: dict[str, float], load: float) -> None:
    wave: Callable[[int], float] = lambda step: load * (1 + 0.05 * math.sin(step))  # noqa: E731
    found = replicas_under(map(wave, range(minutes(180))), full)[minutes(90) :]
    assert len(set(found)) == 1, found
    assert load / found[0] <= 0.9
