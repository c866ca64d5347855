"""Metrics that cost nothing until they are scraped: they are read from where the numbers are kept anyway.

In: what can be read. Out: collectors for the registry of `metrics`; what is said there about labels holds here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from attnserve_server.observability.health import State as HealthState
from attnserve_server.observability.usage import ANONYMOUS, OTHER

if TYPE_CHECKING:
    from attnserve_server.caches.store import CacheStore
    from attnserve_server.observability.health import Health
    from attnserve_server.observability.usage import UsageByCaller

Read: TypeAlias = Callable[[], float]
Family: TypeAlias = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A metric that is one number or, if it has a label, one for each of its values."""

    family: Family
    name: str
    help: str
    read: Callable[[], float | Mapping[str, float]]
    label: str = ""

    def collect(self) -> Iterable[Metric]:
        found = self.read()
        if isinstance(found, Mapping):
            yield _labelled(self.family, self.name, self.help, self.label, found.items())
        else:
            yield self.family(self.name, self.help, found)


_counter: Final = partial(Reading, CounterMetricFamily)
_gauge: Final = partial(Reading, GaugeMetricFamily)


def _labelled(family: Family, name: str, help: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    metric = family(name, help, labels=[label])
    for value, number in values:
        metric.add_metric([value], number)
    return metric


def load(
    *,
    queue_requests: Read,
    queue_bytes: Read,
    in_flight_requests: Read,
    in_flight_bytes: Read,
    in_flight_flops: Read,
    in_flight_seconds: Read,
    limits: Mapping[str, Read],
) -> list[Reading]:
    """What waits, what is in flight, and the limits of that, by what they limit; infinity is no limit."""
    return [
        _gauge("attnserve_queue_requests", "Requests that wait to be run.", queue_requests),
        _gauge("attnserve_queue_bytes", "Bytes of the requests that wait.", queue_bytes),
        _gauge(
            "attnserve_in_flight_requests",
            "Requests admitted whose replies have not been sent yet.",
            in_flight_requests,
        ),
        _gauge(
            "attnserve_in_flight_bytes",
            "Bytes of requests admitted and not yet answered, with their replies, and of replies not yet sent, twice.",
            in_flight_bytes,
        ),
        _gauge(
            "attnserve_in_flight_flops", "Floating-point operations admitted and not yet computed.", in_flight_flops
        ),
        _gauge(
            "attnserve_in_flight_seconds",
            "How long what is admitted and not yet computed should take, at the measured rate.",
            in_flight_seconds,
        ),
        _gauge(
            "attnserve_in_flight_limit",
            "The most that is admitted, in the unit of attnserve_in_flight_ with the bound's name; of seconds, what 16 "
            "requests or two batches take or, unless requests are being refused, max_queue_time if that is more; if "
            "more than that is in flight, as much as is.",
            lambda: {bound: most for bound, limit in limits.items() if (most := limit()) < inf},
            "bound",
        ),
    ]


def state(health: Health) -> Reading:
    return _gauge(
        "attnserve_state",
        "1 for the state that the server is in; it takes requests in state serving.",
        lambda: {state: state == health.state for state in get_args(HealthState)},
        "state",
    )


def certificate(expiry: Read) -> Reading:
    return _gauge(
        "attnserve_tls_certificate_expiry_timestamp_seconds",
        "When the server's certificate expires, in seconds since 1970; NaN if it cannot tell. Only with TLS.",
        expiry,
    )


def reloads(failed: Mapping[str, Callable[[], bool]]) -> Reading:
    return _gauge(
        "attnserve_reload_failed",
        "1 if these files have changed and could not be used, so that what was read before stays in force: callers is "
        "the callers file, tls the certificate, its key and the callers' authorities together. Only those that the "
        "server has.",
        lambda: {file: has_failed() for file, has_failed in failed.items()},
        "file",
    )


def loop(busy_seconds: Read) -> Reading:
    return _counter(
        "attnserve_event_loop_busy_seconds",
        "Time in which the event loop, which decodes and encodes requests and computes small ones, did not wait: its "
        "rate is its use, 0 to 1, and where that is 1 more comes than can be received.",
        busy_seconds,
    )


def log(left_out: Read) -> Reading:
    return _counter(
        "attnserve_log_lines_dropped",
        "Log lines that were not written, because standard error was not read in time or could not be written to.",
        left_out,
    )


class Device:
    """How busy the device is: the seconds in which it had a batch, and for how many it has had its present batch (0 if
    it has none). And, if it has a memory of its own, the bytes of that by state (allocated, reserved, free).
    """

    def __init__(self, busy_seconds: Read, batch_seconds: Read, memory: Callable[[], Mapping[str, int]]) -> None:
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
            yield _labelled(
                GaugeMetricFamily,
                "attnserve_device_memory_bytes",
                "The device's memory: in tensors (allocated), all that torch holds (reserved), and what is free. Only "
                "where the device has memory of its own.",
                "state",
                sizes.items(),
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
                    "device_seconds",
                    "Seconds that the device took for a caller: its part of attnserve_device_busy_seconds_total, but "
                    "for requests that failed. A batch of several callers is divided by what its requests cost.",
                ),
                (
                    "rejected_requests",
                    "Requests of a caller refused for lack of room, or because their deadline was out of reach.",
                ),
            )
        ]
        for caller, usage in self._usage.items():
            counts = usage.requests, usage.query_tokens, usage.flops, usage.device_seconds, usage.rejected
            for family, count in zip(families, counts, strict=True):
                family.add_metric([caller], count)
        in_flight = self._sizes(
            "in_flight_bytes",
            "Bytes of a caller's requests and replies: its part of attnserve_in_flight_bytes.",
            self.in_flight_bytes(),
        )
        cached = self._sizes(
            "cache_bytes", "Bytes of a caller's caches; what they share counts for each.", self.cache_bytes()
        )
        return [*families, in_flight, cached]

    def _sizes(self, name: str, help: str, sizes_of_callers: Mapping[Hashable, int]) -> Metric:
        of_callers = dict(sizes_of_callers)
        known = [name for name, _ in self._usage.items()]
        names = [name for name in known if name not in (ANONYMOUS, OTHER)]
        sizes = {name: of_callers.pop(name, 0) for name in names}
        # Either all callers have names or none has.
        sizes[OTHER if names else ANONYMOUS] = sum(of_callers.values())
        shown = ((name, sizes.get(name, 0)) for name in known)
        return _labelled(GaugeMetricFamily, f"attnserve_caller_{name}", help, "caller", shown)


class Caches:
    """The contents of a store of caches and what has happened in it, in its own numbers."""

    def __init__(self, store: CacheStore, expire: Callable[[], object]) -> None:
        self._store, self._expire = store, expire

    def collect(self) -> Iterable[Metric]:
        store, counts = self._store, self._store.counts
        # Otherwise a pool would look full though the next append can have its pages.
        self._expire()
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
        reserved = store.reserved_pages * store.page_bytes
        yield _labelled(
            GaugeMetricFamily,
            "attnserve_cache_pool_bytes",
            "The pool of the caches: free, reserved for appends in flight, or used; what is shared counts once.",
            "state",
            (("free", store.free_bytes), ("reserved", reserved), ("used", store.used_bytes)),
        )
        yield _labelled(
            CounterMetricFamily,
            "attnserve_cache_evictions",
            "Caches evicted, their lease having ended: soon after that (lease), when an append needed their "
            "pages, or when another cache needed their place (caches).",
            "reason",
            counts.evictions.items(),
        )
