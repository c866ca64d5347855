"""Metrics that cost nothing until they are scraped: they are read from where the numbers are kept anyway.

In: what can be read. Out: collectors for the registry of `metrics`; what is said there about labels holds here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from attnserve_server.observability.health import State as HealthState
from attnserve_server.observability.usage import ANONYMOUS, OTHER

if TYPE_CHECKING:
    from attnserve_server.caches.store import CacheStore
    from attnserve_server.observability.health import Health
    from attnserve_server.observability.usage import UsageByCaller


Reading: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """What waits, what is in flight, and the bounds of that."""

    queue_requests: Reading
    queue_bytes: Reading
    in_flight_requests: Reading
    in_flight_bytes: Reading
    in_flight_flops: Reading
    in_flight_seconds: Reading
    limits: Mapping[str, Reading]
    """The bounds of requests, bytes, flops and seconds in flight. Infinity is no bound."""

    def collect(self) -> Iterable[Metric]:
        for name, help, reading in (
            ("attnserve_queue_requests", "Requests that wait to be run.", self.queue_requests),
            ("attnserve_queue_bytes", "Bytes of the requests that wait.", self.queue_bytes),
            ("attnserve_in_flight_requests", "Requests admitted and not yet answered.", self.in_flight_requests),
            (
                "attnserve_in_flight_bytes",
                "Bytes of requests and replies admitted and not yet answered.",
                self.in_flight_bytes,
            ),
            (
                "attnserve_in_flight_flops",
                "Floating-point operations admitted and not yet computed.",
                self.in_flight_flops,
            ),
            (
                "attnserve_in_flight_seconds",
                "How long what is admitted and not yet computed should take, at the measured rate.",
                self.in_flight_seconds,
            ),
        ):
            yield GaugeMetricFamily(name, help, reading())
        limits = GaugeMetricFamily(
            "attnserve_in_flight_limit",
            "The most that is admitted, in the unit of attnserve_in_flight_ with the bound's name; of seconds, what 16 "
            "requests or two batches take or, unless requests are being refused, max_queue_time if that is more; if "
            "more than that is in flight, as much as is.",
            labels=["bound"],
        )
        for bound, limit in self.limits.items():
            if (most := limit()) < inf:
                limits.add_metric([bound], most)
        yield limits


class State:
    """The state of the server: 1 for the present one, 0 for the others."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "attnserve_state",
            "1 for the state that the server is in; it takes requests in state serving.",
            labels=["state"],
        )
        for state in get_args(HealthState):
            family.add_metric([state], state == self._health.state)
        yield family


class Certificate:
    """When the server's certificate expires."""

    def __init__(self, expiry: Reading) -> None:
        self._expiry = expiry

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "attnserve_tls_certificate_expiry_timestamp_seconds",
            "When the server's certificate expires, in seconds since 1970; NaN if it cannot tell. Only with TLS.",
            value=self._expiry(),
        )


class Reloads:
    """Whether files that have changed could not be used: `callers` and `tls`."""

    def __init__(self, failed: Mapping[str, Callable[[], bool]]) -> None:
        self._failed = failed

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "attnserve_reload_failed",
            "1 if these files have changed and could not be used, so that what was read before stays in force: callers "
            "is the callers file, tls the certificate, its key and the callers' authorities together. Only those that "
            "the server has.",
            labels=["file"],
        )
        for file, failed in self._failed.items():
            family.add_metric([file], failed())
        yield family


class Device:
    """How busy the device is, and its memory, if it has one of its own: the seconds in which it had a batch, those of
    the batch that it has now (0 if it has none), and the memory's bytes by state (allocated, reserved, free).
    """

    def __init__(self, busy_seconds: Reading, batch_seconds: Reading, memory: Callable[[], Mapping[str, int]]) -> None:
        self._busy_seconds, self._batch_seconds, self._memory = busy_seconds, batch_seconds, memory

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "attnserve_device_busy_seconds",
            "Time in which the device had a batch, until now where it has one: its rate is the device's use, 0 to 1.",
            value=self._busy_seconds(),
        )
        yield GaugeMetricFamily(
            "attnserve_device_batch_seconds",
            "How long the device has had the batch that it has now; 0 if it has none.",
            value=self._batch_seconds(),
        )
        # One reading gives all states.
        if sizes := self._memory():
            memory = GaugeMetricFamily(
                "attnserve_device_memory_bytes",
                "The device's memory: in tensors (allocated), all that torch holds (reserved), and what is free. Only "
                "where the device has memory of its own.",
                labels=["state"],
            )
            for state, size in sizes.items():
                memory.add_metric([state], size)
            yield memory


class Loop:
    """How busy the event loop is: the seconds in which it did not wait for events."""

    def __init__(self, busy_seconds: Reading) -> None:
        self._busy_seconds = busy_seconds

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "attnserve_event_loop_busy_seconds",
            "Time in which the event loop, which decodes and encodes requests and computes small ones, did not wait: "
            "its rate is its use, 0 to 1, and where that is 1 more comes than can be received.",
            value=self._busy_seconds(),
        )


class Log:
    """How many lines of the log were not written."""

    def __init__(self, left_out: Reading) -> None:
        self._left_out = left_out

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "attnserve_log_lines_dropped",
            "Log lines that were not written, because standard error was not read in time or could not be written to.",
            value=self._left_out(),
        )


class Callers:
    """What each caller has used, and what it has in flight."""

    def __init__(self, usage: UsageByCaller) -> None:
        self._usage = usage
        self.in_flight_bytes: Callable[[], Mapping[Hashable, int]] = dict
        """Reads what every caller has in flight: by its name, or by anything else if it has none."""
        self.cache_bytes: Callable[[], Mapping[Hashable, int]] = dict
        """Reads how much the caches of every caller hold, likewise."""

    def collect(self) -> Iterable[Metric]:
        families = [
            CounterMetricFamily(f"attnserve_caller_{name}", help, labels=["caller"])
            for name, help in (
                ("requests", "Requests answered for a caller, with their results."),
                ("query_tokens", "Query rows computed for a caller, over all sequences."),
                ("flops", "Floating-point operations computed for a caller."),
                (
                    "rejected_requests",
                    "Requests of a caller refused for lack of room, or because their deadline was out of reach.",
                ),
            )
        ]
        for caller, usage in self._usage.items():
            for family, count in zip(
                families, (usage.requests, usage.query_tokens, usage.flops, usage.rejected), strict=True
            ):
                family.add_metric([caller], count)
        in_flight = self._sizes(
            "in_flight_bytes",
            "Bytes of a caller's requests and replies admitted and not yet answered, or not yet read.",
            self.in_flight_bytes(),
        )
        cached = self._sizes(
            "cache_bytes", "Bytes of a caller's caches; what they share counts for each.", self.cache_bytes()
        )
        return [*families, in_flight, cached]

    def _sizes(self, name: str, help: str, sizes_of_callers: Mapping[Hashable, int]) -> Metric:
        family = GaugeMetricFamily(f"attnserve_caller_{name}", help, labels=["caller"])
        of_callers = dict(sizes_of_callers)
        known = [name for name, _ in self._usage.items()]
        names = [name for name in known if name not in (ANONYMOUS, OTHER)]
        sizes = {name: of_callers.pop(name, 0) for name in names}
        # Either all callers have names or none has.
        sizes[OTHER if names else ANONYMOUS] = sum(of_callers.values())
        for name in known:
            family.add_metric([name], sizes.get(name, 0))
        return family


class Caches:
    """The contents of a store of caches and what has happened in it, in its own numbers."""

    def __init__(self, store: CacheStore, clock: Reading) -> None:
        self._store, self._clock = store, clock

    def collect(self) -> Iterable[Metric]:
        store, counts = self._store, self._store.counts
        # Otherwise a pool would look full though the next append can have its pages.
        store.expire(self._clock())
        pool = GaugeMetricFamily(
            "attnserve_cache_pool_bytes",
            "The pool of the caches: free, reserved for appends in flight, or used; what is shared counts once.",
            labels=["state"],
        )
        reserved = store.reserved_pages * store.page_bytes
        pool.add_metric(["free"], store.free_pages * store.page_bytes - reserved)
        pool.add_metric(["reserved"], reserved)
        pool.add_metric(["used"], store.used_bytes)
        evictions = CounterMetricFamily(
            "attnserve_cache_evictions",
            "Caches evicted, their lease having ended: when they were looked for (lease), when an append needed their "
            "pages, or when another cache needed their place (caches).",
            labels=["reason"],
        )
        for reason, count in counts.evictions.items():
            evictions.add_metric([reason], count)
        for name, help, value in (
            ("attnserve_caches", "Caches open.", len(store)),
            ("attnserve_cache_tokens", "Tokens of all layers of all caches; shared ones count for each.", store.tokens),
            (
                "attnserve_cache_shared_bytes_saved",
                "The bytes more that caches would use, if they shared nothing.",
                store.shared_bytes_saved,
            ),
        ):
            yield GaugeMetricFamily(name, help, value)
        for name, help, value in (
            ("creations", "Caches created empty.", counts.created),
            ("forks", "Caches made of others.", counts.forks),
            ("appends", "Appends to a layer of a cache that stayed.", counts.appends),
            ("appended_tokens", "Tokens of those appends.", counts.appended_tokens),
            ("truncations", "Caches cut off.", counts.truncations),
            ("deletions", "Caches deleted by callers.", counts.deletions),
        ):
            yield CounterMetricFamily(f"attnserve_cache_{name}", help, value)
        yield pool
        yield evictions
