"""What a server does, computed from two readings of its metrics: plain values, for the view and for programs.

Rates are per second, between the readings; current values are those of the later reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from attnserve._commands.reading import Reading

_ERRORS = ("INTERNAL", "UNAVAILABLE")
_REQUESTS = "attnserve_requests_total"
_DURATION = "attnserve_request_duration_seconds"
_PHASES = "attnserve_request_phase_duration_seconds"

Rates: TypeAlias = dict[str, float]
"""Values other than 0, by name, the largest first."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Requests of one kind. Latencies are in seconds, NaN without requests."""

    requests: float
    failed: float
    """Those that the service failed: INTERNAL, UNAVAILABLE."""
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches per second, and what is in one. NaN if there was none."""

    batches: float
    mean_requests: float
    p99_requests: float
    padding: float
    """The share of padding among a batch's rows, from 0 to 1: the mean over batches."""
    kernel_calls: Rates


@dataclass(frozen=True, slots=True)
class Load:
    """What is queued and what is in flight, and its bounds, by name."""

    queue_requests: float
    queue_bytes: float
    in_flight: Rates
    limits: Rates

    @property
    def fullest(self) -> tuple[str, float]:
        """The bound that is closest to being reached, and the share of it that is used."""
        parts = {bound: self.in_flight.get(bound, 0.0) / limit for bound, limit in self.limits.items()}
        return max(parts.items(), key=lambda item: item[1], default=("", math.nan))


@dataclass(frozen=True, slots=True)
class Device:
    """The device, and the server's process."""

    name: str
    use: float
    """The share of the time in which it had a batch, from 0 to 1."""
    batch_seconds: float
    """How long it has been running its current batch; 0 if it has none."""
    memory: Rates
    """Bytes of the device's own memory, by state; empty on a CPU."""
    loop: float
    """The share of the time in which the event loop was busy, from 0 to 1."""
    processors: float
    """How many processors the process uses."""
    resident_bytes: float


@dataclass(frozen=True, slots=True)
class Caches:
    """Resident caches. Appends, forks and evictions are per second."""

    open: float
    tokens: float
    pool: Rates
    """Bytes by state: free, reserved, used."""
    appended_tokens: float
    forks: float
    evictions: Rates

    @property
    def pool_bytes(self) -> float:
        """The size of the pool."""
        return sum(self.pool.values())


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a server."""

    seconds: float
    """The time between the readings."""
    version: str
    torch: str
    state: str
    started_at: float
    """When the process was started, in seconds since the epoch."""
    requests: float
    query_tokens: float
    flops: float
    received_bytes: float
    sent_bytes: float
    streams: float
    operations: dict[str, Operation]
    """The operations that were ever requested, by name."""
    codes: Rates
    rejected: Rates
    cancelled: Rates
    phases: Rates
    """The mean seconds of each phase of a request."""
    load: Load
    batches: Batches
    device: Device
    caches: Caches
    layers: Rates
    """FLOP/s by layer."""
    callers: Rates
    """FLOP/s by caller."""


def figures(before: Reading, after: Reading) -> Figures:
    """What a server did between two readings. If it was restarted in between, its counts start from 0."""
    if after.total(_REQUESTS) < before.total(_REQUESTS):
        before = Reading({}, before.at)
    since = after.since(before)

    def rate(name: str, **labels: str) -> float:
        return since.total(name, **labels) / since.at

    def rates(name: str, label: str) -> Rates:
        return {key: value / since.at for key, value in since.by(name, label).items()}

    build = after.labels("attnserve_build_info")
    operations = {
        name: Operation(
            rate(_REQUESTS, operation=name),
            sum(rate(_REQUESTS, operation=name, code=code) for code in _ERRORS),
            since.quantile(0.5, _DURATION, operation=name),
            since.quantile(0.99, _DURATION, operation=name),
        )
        for name in after.by(_REQUESTS, "operation")
    }
    batch = "attnserve_batch_requests"
    return Figures(
        seconds=since.at,
        version=build.get("version", ""),
        torch=build.get("torch", ""),
        state=next(iter(after.by("attnserve_state", "state")), ""),
        started_at=after.total("process_start_time_seconds"),
        requests=rate(_REQUESTS),
        query_tokens=rate("attnserve_query_tokens_total"),
        flops=rate("attnserve_flops_total"),
        received_bytes=rate("attnserve_received_bytes_total"),
        sent_bytes=rate("attnserve_sent_bytes_total"),
        streams=after.total("attnserve_streams"),
        operations=operations,
        codes=rates(_REQUESTS, "code"),
        rejected=rates("attnserve_rejected_requests_total", "reason"),
        cancelled=rates("attnserve_cancelled_requests_total", "reason"),
        phases={phase: since.mean(_PHASES, phase=phase) for phase in after.by(f"{_PHASES}_count", "phase")},
        load=Load(
            after.total("attnserve_queue_requests"),
            after.total("attnserve_queue_bytes"),
            {
                bound: after.total(f"attnserve_in_flight_{bound}")
                for bound in after.by("attnserve_in_flight_limit", "bound")
            },
            after.by("attnserve_in_flight_limit", "bound"),
        ),
        batches=Batches(
            rate(f"{batch}_count"),
            since.mean(batch),
            since.quantile(0.99, batch),
            since.mean("attnserve_batch_padding_ratio"),
            rates("attnserve_kernel_calls_total", "kernel"),
        ),
        device=Device(
            build.get("device", ""),
            rate("attnserve_device_busy_seconds_total"),
            after.total("attnserve_device_batch_seconds"),
            after.by("attnserve_device_memory_bytes", "state"),
            rate("attnserve_event_loop_busy_seconds_total"),
            rate("process_cpu_seconds_total"),
            after.total("process_resident_memory_bytes"),
        ),
        caches=Caches(
            after.total("attnserve_caches"),
            after.total("attnserve_cache_tokens"),
            after.by("attnserve_cache_pool_bytes", "state"),
            rate("attnserve_cache_appended_tokens_total"),
            rate("attnserve_cache_forks_total"),
            rates("attnserve_cache_evictions_total", "reason"),
        ),
        layers=rates("attnserve_layer_flops_total", "layer"),
        callers=rates("attnserve_caller_flops_total", "caller"),
    )


def without_nan(value: Any) -> Any:
    """The same values with None for NaN and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in cast("Iterable[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
