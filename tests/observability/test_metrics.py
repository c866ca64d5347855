"""The metrics, read back with Prometheus' own parsers."""

from __future__ import annotations

import math
from collections.abc import Hashable

import pytest
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from stores import PAGE_BYTES, append, expire_all, store_of

from attnserve._commands.reading import Reading
from attnserve_server.caches.shape import CacheShape
from attnserve_server.errors import RequestError
from attnserve_server.observability import metrics as declared
from attnserve_server.observability import scraped
from attnserve_server.observability.health import Health
from attnserve_server.observability.metrics import Metrics
from attnserve_server.observability.usage import MAX_CALLERS


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("1.2.3", "2.13.0", "cpu", "AVX2")


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One sample of the text that Prometheus would read."""
    for family in parse_text(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"no {name} with {labels}")


def test_requests_are_counted_by_operation_and_code(metrics: Metrics) -> None:
    metrics.finished("attend", "OK", 0.5, 1)
    metrics.finished("attend_stream", "OK", 2e-5, 1)
    metrics.finished("attend_stream", "INVALID_ARGUMENT", 1e-6, 1)
    name = "attnserve_requests_total"
    assert value(metrics, name, operation="attend", code="OK") == 1
    assert value(metrics, name, operation="attend_stream", code="OK") == 1
    assert value(metrics, name, operation="attend_stream", code="INVALID_ARGUMENT") == 1
    assert value(metrics, name, operation="attend", code="INVALID_ARGUMENT") == 0
    bucket, operation = "attnserve_request_duration_seconds_bucket", "attend_stream"
    assert value(metrics, bucket, operation=operation, le="1e-05") == 1
    assert value(metrics, bucket, operation=operation, le="2e-05") == 2
    assert value(metrics, bucket, operation=operation, le="+Inf") == 2
    assert value(metrics, "attnserve_request_duration_seconds_count", operation="attend") == 1
    assert value(metrics, "attnserve_request_duration_seconds_sum", operation="attend") == 0.5


@pytest.mark.parametrize("seconds", [1.01e-5, 1e-4, 1.01e-3, 2.9e-3, 0.031, 0.11, 0.5, 1.01, 9.9])
def test_a_quantile_is_within_the_steps_of_1_2_and_5_of_what_it_was(metrics: Metrics, seconds: float) -> None:
    for _ in range(100):
        metrics.finished("attend", "OK", seconds, 1)
    reading = Reading.parse(generate_latest(metrics.registry).decode())
    for q in (0.01, 0.5, 0.99):
        estimate = reading.quantile(q, "attnserve_request_duration_seconds", operation="attend")
        assert seconds / 2.5 <= estimate <= seconds * 2.5


def test_a_code_that_nobody_declared_makes_no_series(metrics: Metrics) -> None:
    with pytest.raises(KeyError):
        metrics.finished("attend", "a caller's invention", 0.1, 1)
    with pytest.raises(KeyError):
        metrics.stream_failed("a caller's invention")
    assert "invention" not in generate_latest(metrics.registry).decode()


def test_every_error_has_its_code() -> None:
    ahead, codes = RequestError.__subclasses__(), {"OK"}
    while ahead:
        error = ahead.pop()
        ahead += error.__subclasses__()
        codes.add(error.code.name)
    assert codes == set(declared.CODES)


def test_phases(metrics: Metrics) -> None:
    metrics.phases((1.0, 2.0, 3.0, 4.0, 5.0))
    metrics.phases((1.0, 2.0, 3.0, 4.0, 5.0))
    for seconds, phase in enumerate(("decode", "queue", "staging", "compute", "encode"), 1):
        assert value(metrics, "attnserve_request_phase_duration_seconds_sum", phase=phase) == 2 * seconds
        assert value(metrics, "attnserve_request_phase_duration_seconds_count", phase=phase) == 2


def test_batches(metrics: Metrics) -> None:
    metrics.batch(3, 2e6, 48, 0.25, {"flash": 2, "math": 1})
    metrics.batch(1, 1e3, 16, 0.0, {"flash": 1})
    assert value(metrics, "attnserve_batch_requests_bucket", le="1.0") == 1
    assert value(metrics, "attnserve_batch_requests_sum") == 4
    assert value(metrics, "attnserve_batch_flops_bucket", le="10000.0") == 1
    assert value(metrics, "attnserve_batch_padding_ratio_bucket", le="0.0") == 1
    assert value(metrics, "attnserve_batch_padding_ratio_sum") == 0.25
    assert value(metrics, "attnserve_flops_total") == 2_001_000
    assert value(metrics, "attnserve_query_tokens_total") == 64
    assert value(metrics, "attnserve_kernel_calls_total", kernel="flash") == 3
    assert value(metrics, "attnserve_kernel_calls_total", kernel="math") == 1


def test_what_layers_computed_is_counted_by_their_names(metrics: Metrics) -> None:
    metrics.layer_batch("one", 2, 30, 500.0)
    metrics.layer_batch("other", 1, 7, 50.0)
    metrics.layer_batch("one", 3, 4, 5.0)
    for layer, counts in (("one", [5, 34, 505]), ("other", [1, 7, 50])):
        names = [f"attnserve_layer_{name}_total" for name in ("requests", "tokens", "flops")]
        assert [value(metrics, name, layer=layer) for name in names] == counts


def test_what_did_not_run_is_counted_by_reason(metrics: Metrics) -> None:
    for reason in declared.REJECTIONS:
        metrics.rejected(reason)
        assert value(metrics, "attnserve_rejected_requests_total", reason=reason) == 1
    for reason in declared.CANCELLATIONS:
        metrics.cancelled(reason)
        assert value(metrics, "attnserve_cancelled_requests_total", reason=reason) == 1
    with pytest.raises(KeyError):
        metrics.rejected("a caller's invention")


def test_bytes_and_streams(metrics: Metrics) -> None:
    metrics.received(3000)
    metrics.received(30)
    metrics.sent(1000)
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    assert value(metrics, "attnserve_received_bytes_total") == 3030
    assert value(metrics, "attnserve_sent_bytes_total") == 1000
    assert value(metrics, "attnserve_streams") == 1


def test_gauges_are_read_when_scraped(metrics: Metrics) -> None:
    waiting: list[int] = []
    most = [1.0]
    load = scraped.load(
        queue_requests=lambda: len(waiting),
        queue_bytes=lambda: sum(waiting),
        in_flight_requests=lambda: 2 * len(waiting),
        in_flight_bytes=lambda: 2 * sum(waiting),
        in_flight_flops=lambda: 1e9 * len(waiting),
        in_flight_seconds=lambda: 0.5 * len(waiting),
        limits={"requests": lambda: 10, "bytes": lambda: 4096, "flops": lambda: 1e12, "seconds": lambda: most[-1]},
    )
    metrics.watch(*load)
    names = (
        "queue_requests",
        "queue_bytes",
        "in_flight_requests",
        "in_flight_bytes",
        "in_flight_flops",
        "in_flight_seconds",
    )
    assert [value(metrics, f"attnserve_{name}") for name in names] == [0, 0, 0, 0, 0, 0]
    waiting += [100, 200]
    assert [value(metrics, f"attnserve_{name}") for name in names] == [2, 300, 4, 600, 2e9, 1.0]
    bounds = ("requests", "bytes", "flops", "seconds")
    assert [value(metrics, "attnserve_in_flight_limit", bound=bound) for bound in bounds] == [10, 4096, 1e12, 1]
    most += [0.25]
    assert value(metrics, "attnserve_in_flight_limit", bound="seconds") == 0.25
    most += [math.inf]
    assert 'bound="seconds"' not in generate_latest(metrics.registry).decode(), "there is no bound"


def test_the_use_of_the_device(metrics: Metrics) -> None:
    batches = [0.25, 0.5]
    metrics.watch(scraped.Device(lambda: sum(batches), lambda: batches[-1], dict))
    assert value(metrics, "attnserve_device_busy_seconds_total") == 0.75
    assert value(metrics, "attnserve_device_batch_seconds") == 0.5
    batches.append(0.0)
    assert value(metrics, "attnserve_device_batch_seconds") == 0
    assert "device_memory" not in generate_latest(metrics.registry).decode()


def test_device_memory_is_there_where_the_device_has_one(metrics: Metrics) -> None:
    sizes = {"allocated": 10, "reserved": 20, "free": 70}
    metrics.watch(scraped.Device(lambda: 0.0, lambda: 0.0, lambda: sizes))
    for state, size in sizes.items():
        assert value(metrics, "attnserve_device_memory_bytes", state=state) == size


def test_one_state_is_told_at_a_time(metrics: Metrics) -> None:
    health = Health()
    metrics.watch(scraped.state(health))
    states = ("starting", "serving", "draining", "failed")
    for present in states:
        health.set(present)
        assert [value(metrics, "attnserve_state", state=state) for state in states] == [s == present for s in states]


def test_what_callers_had_is_counted_by_their_names(metrics: Metrics) -> None:
    def read(caller: str) -> list[float]:
        names = ("requests", "query_tokens", "flops", "device_seconds", "rejected_requests")
        return [value(metrics, f"attnserve_caller_{name}_total", caller=caller) for name in names]

    assert read("anonymous") == [0, 0, 0, 0, 0]
    metrics.usage.of(None).computed(16, 1000, 0.5)
    search = metrics.usage.of("search")
    search.computed(1, 100, 0.25)
    search.computed(2, 200, 0.5)
    metrics.usage.of("search").rejected += 1
    assert read("anonymous") == [1, 16, 1000, 0.5, 0]
    assert read("search") == [2, 3, 300, 0.75, 1]


def test_what_callers_have_in_flight_is_read_by_their_names(metrics: Metrics) -> None:
    def read() -> dict[str, float]:
        (family,) = (
            family
            for family in parse_text(generate_latest(metrics.registry).decode())
            if family.name == "attnserve_caller_in_flight_bytes"
        )
        return {sample.labels["caller"]: sample.value for sample in family.samples}

    assert read() == {"anonymous": 0}
    held: dict[Hashable, int] = {"ipv4:192.0.2.1:1": 100, "ipv4:192.0.2.1:2": 20}
    metrics.watch_callers(lambda: held)
    assert read() == {"anonymous": 120}
    held.clear()
    for number in range(MAX_CALLERS + 5):
        metrics.usage.of(f"caller-{number}")
        held[f"caller-{number}"] = 1 + number
    del held["caller-3"]
    found = read()
    assert len(found) == MAX_CALLERS + 2
    assert (found["anonymous"], found["caller-2"], found["caller-3"]) == (0, 3, 0)
    assert found["other"] == sum(range(MAX_CALLERS + 1, MAX_CALLERS + 6))


def test_what_the_caches_of_callers_hold_is_read_by_their_names(metrics: Metrics) -> None:
    """When their leases have ended, nothing."""
    store = store_of(100, 10, page_bytes=4096)
    now = 0.0
    metrics.watch_caches(store, lambda: expire_all(store, now))
    shape = CacheShape(1, 16, 16, 1, "float32")
    for owner, pages in (("search", 3), ("search", 1), ("idle", 0), (None, 2)):
        cache = store.create(shape, 10.0, now, owner)
        if pages:
            append(store, cache, pages * 32)
        metrics.usage.of(owner)
    assert value(metrics, "attnserve_caller_cache_bytes", caller="search") == 4 * 4096
    assert value(metrics, "attnserve_caller_cache_bytes", caller="idle") == 0
    now = 11.0
    assert value(metrics, "attnserve_caller_cache_bytes", caller="search") == 0


def test_callers_beyond_a_bound_are_one(metrics: Metrics) -> None:
    for number in range(3 * MAX_CALLERS):
        metrics.usage.of(f"caller-{number}").computed(1, 10, 0.0)
    metrics.usage.of("caller-0").computed(1, 10, 0.0)
    callers = dict(metrics.usage.items())
    assert len(callers) == MAX_CALLERS + 2
    assert callers["other"].requests == 2 * MAX_CALLERS
    assert callers["caller-0"].requests == 2
    assert value(metrics, "attnserve_caller_flops_total", caller="other") == 20 * MAX_CALLERS


def test_build_and_process(metrics: Metrics) -> None:
    labels = {"version": "1.2.3", "torch": "2.13.0", "device": "cpu", "native_kernel": "AVX2"}
    assert value(metrics, "attnserve_build_info", **labels) == 1
    assert value(metrics, "process_resident_memory_bytes") > 1e6


def test_two_servers_share_nothing(metrics: Metrics) -> None:
    other = Metrics("1.2.3", "2.13.0", "cpu", "")
    metrics.received(1)
    assert value(other, "attnserve_received_bytes_total") == 0


def test_names_follow_the_conventions(metrics: Metrics) -> None:
    metrics.watch_caches(store_of(256, 10, page_bytes=1 << 12), lambda: None)
    families = list(parse_text(generate_latest(metrics.registry).decode()))
    assert len(families) > 20
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert family.name.startswith(("attnserve_", "process_"))
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name


def test_openmetrics_reads_the_same(metrics: Metrics) -> None:
    metrics.phases((1e-5, 2e-5, 3e-5, 4e-5, 5e-5))
    metrics.batch(1, 1e6, 16, 0.0, {"flash": 1})
    metrics.watch_caches(store_of(256, 10, page_bytes=1 << 12), lambda: None)
    encode, content_type = choose_encoder("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(encode(metrics.registry).decode())}
    assert families["attnserve_batch_requests"].type == "histogram"
    assert {f"{name}_total" for name, family in families.items() if family.type == "counter"} >= {
        "attnserve_requests_total",
        "attnserve_kernel_calls_total",
        "attnserve_cache_appends_total",
    }


def test_caches_are_read_from_their_store(metrics: Metrics) -> None:
    store = store_of(10, max_caches=2)
    now = 0.0
    metrics.watch_caches(store, lambda: expire_all(store, now))

    def read(name: str, **labels: str) -> float:
        return value(metrics, f"attnserve_{name}", **labels)

    def pool() -> list[float]:
        return [read("cache_pool_bytes", state=state) / PAGE_BYTES for state in ("free", "reserved", "used")]

    assert pool() == [10, 0, 0]
    cache = store.create(CacheShape(1, 8, 8, 1, "float32"), ttl=5.0, now=0.0)
    reservation = store.reserve([(cache, 0, 9)], 0.0)
    assert pool() == [7, 3, 0]
    store.place(reservation, 0.0)
    assert read("cache_appends_total") == 0, "it may yet be undone"
    store.cancel(reservation)
    fork = store.fork_one(cache, 100.0, 1.0)
    assert pool() == [7, 0, 3]
    assert [read(name) for name in ("caches", "cache_tokens", "cache_forks_total")] == [2, 18, 1]
    assert read("cache_shared_bytes_saved") == 3 * PAGE_BYTES
    assert [read(f"cache_{name}_total") for name in ("creations", "appends", "appended_tokens")] == [1, 1, 9]
    store.truncate_one(fork, 4)
    assert read("cache_truncations_total") == 1
    assert read("cache_shared_bytes_saved") == PAGE_BYTES
    now = 50.0
    store.create(CacheShape(1, 8, 8, 1, "float32"), ttl=None, now=now)
    reasons = ("lease", "pages", "caches")
    assert [read("cache_evictions_total", reason=reason) for reason in reasons] == [0, 0, 1]
    assert pool() == [9, 0, 1]
    store.delete(fork)
    assert read("cache_deletions_total") == 1
    assert pool() == [10, 0, 0]


def test_what_happens_to_caches_is_counted_by_kind(metrics: Metrics) -> None:
    store = store_of(100)
    metrics.watch_caches(store, lambda: None)
    caches = [store.create(CacheShape(1, 8, 8, 1, "float32"), ttl=None, now=0.0) for _ in range(6)]
    forks = [store.fork_one(caches[0], None, 0.0) for _ in range(5)]
    for cache in caches[:4]:
        reservation = store.reserve([(cache, 0, 9)], 0.0)
        store.place(reservation, 0.0)
        store.cancel(reservation)
    for cache in caches[:3]:
        store.truncate_one(cache, 4)
    for cache in forks[:2]:
        store.delete(cache)
    names = ("creations", "forks", "appends", "appended_tokens", "truncations", "deletions")
    assert [value(metrics, f"attnserve_cache_{name}_total") for name in names] == [6, 5, 4, 36, 3, 2]


def test_caches_whose_lease_has_ended_do_not_fill_the_pool(metrics: Metrics) -> None:
    store = store_of(10, max_caches=2)
    now = 0.0
    metrics.watch_caches(store, lambda: expire_all(store, now))
    cache = store.create(CacheShape(1, 8, 8, 1, "float32"), ttl=5.0, now=now)
    reservation = store.reserve([(cache, 0, 4)], now)
    store.place(reservation, now)
    now = 6.0
    assert value(metrics, "attnserve_cache_pool_bytes", state="used") == 256, "what is in use does not end"
    store.cancel(reservation)
    assert value(metrics, "attnserve_cache_pool_bytes", state="used") == 0
    assert value(metrics, "attnserve_caches") == 0
    assert value(metrics, "attnserve_cache_evictions_total", reason="lease") == 1
