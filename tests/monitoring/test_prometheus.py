"""An operator queries Prometheus about a server under load; the answers are compared with what its callers saw.

Nothing depends on speed: answers cover the time between two scrapes, whatever happened then, and the bounds come from
what the callers observed.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import calls
import certificates
import pytest
import traffic
from conftest import Server
from prometheus_server import MONITORING, RULES, Prometheus, Sample, promtool
from traffic import BURST, TRUNCATE_EVERY, Reply, Traffic

from attnserve import TLS, Client, OverloadedError
from attnserve_server.access.tokens import digest, format_hash, new_token
from attnserve_server.observability.metrics import OPERATIONS

RECORDS = {rule["record"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"] if rule.get("record")}
SCRAPES = 8
"""The answers cover at least this many scrapes."""


@dataclass
class Observed:
    """What happened as the callers saw it (all replies and bursts), and as Prometheus saw it from scrape to scrape."""

    server: Server
    prometheus: Prometheus
    replies: list[Reply]
    bursts: list[tuple[float, float]]
    begin: float
    end: float
    lag: float
    """How much later than its timestamp a scrape's values may be, in seconds."""
    waiting: tuple[int, int]
    refused: int
    pool_used: int

    @property
    def seconds(self) -> float:
        """The time between the first scrape and the last."""
        return self.end - self.begin

    def series(self, expression: str) -> list[Sample]:
        """What an expression gives over the observed time, which replaces its ranges."""
        return self.prometheus.query(re.sub(r"\[5m\]", f"[{round(self.seconds * 1000) + 1}ms]", expression), self.end)

    def ask(self, expression: str) -> float:
        """The same for an expression that gives a single series."""
        (sample,) = self.series(expression)
        return sample.value

    def total(self, value: Callable[[Reply], float]) -> tuple[float, float]:
        """The lower and upper bound of a sum over the replies of that time.

        A scrape counts calls that were answered but whose replies may still be on the way: at most one burst.
        """
        replies = sorted(self.replies, key=lambda reply: reply.at)
        surely = [reply for reply in replies if self.begin + self.lag <= reply.at <= self.end][BURST:]
        perhaps = [reply for reply in replies if self.begin <= reply.at <= self.end + self.lag]
        perhaps += [reply for reply in replies if reply.at > self.end + self.lag][:BURST]
        return sum(map(value, surely)), sum(map(value, perhaps))

    def quantile(self, q: float, operation: str, value: Callable[[Reply], float], *, above: bool) -> float:
        """The bound below or above a quantile of the operation's replies, of the histogram bucket that it lies in. That
        is at most 2.5 times as wide as its values are large.
        """
        values = sorted(
            value(reply)
            for reply in self.replies
            if reply.operation == operation and self.begin <= reply.at <= self.end + self.lag
        )
        slack = BURST if above else -BURST
        place = min(max(math.ceil(q * len(values)) - 1 + slack, 0), len(values) - 1)
        buckets = self.prometheus.query(f'attnserve_request_duration_seconds_bucket{{operation="{operation}"}}')
        bounds = [0.0, *sorted(float(bucket.labels["le"]) for bucket in buckets)]
        upper = bisect.bisect_left(bounds, values[place])
        width = bounds[upper] / max(bounds[upper - 1], bounds[1])
        assert width < 2.6 or math.isinf(width), "the bucket tells little"
        return bounds[upper - (not above)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A server after traffic of every kind, and the Prometheus that scraped it."""
    directory = tmp_path_factory.mktemp("monitoring")
    flags = (
        *("--layers", traffic.write_layer(directory)),
        *("--cache-bytes", "4MiB", "--cache-page-bytes", "16KiB"),
        *("--priority-aging", "60s", "--max-queue-time", "60s"),
    )
    server = Server(flags, directory / "stderr")
    try:
        with Prometheus(directory, server.http_address) as prometheus, Client(server.address, retries=0) as client:
            yield _observe(server, prometheus, client)
    finally:
        assert server.stop() == 0, server.stderr()


def _observe(server: Server, prometheus: Prometheus, client: Client) -> Observed:
    callers = Traffic(client)
    prometheus.wait_for("attnserve_state")
    start = time.time()
    enough = f"count_over_time(attnserve_streams[1h]) > {SCRAPES}"
    bursts = callers.flow(lambda: time.time() < start + 4 or not prometheus.query(enough))
    stop = time.time()
    # From the first scrape under load to the last, to the millisecond; failed scrapes have no values.
    (up,), (durations,) = prometheus.query("up[1h]"), prometheus.query("scrape_duration_seconds[1h]")
    answered = {at for at, value in up.values if value}
    scrapes = [(at, duration) for at, duration in durations.values if start <= at <= stop and at in answered]
    waiting = callers.crowd(lambda: bool(prometheus.query("attnserve_queue_requests >= 20")))
    with client.create_cache(num_kv_heads=4, head_dim=32, ttl=None) as cache:
        traffic.fill(cache, 3072)
        refused = 0
        for _ in range(3):
            with pytest.raises(OverloadedError):
                traffic.fill(cache, 2048)
            refused += 1
        pool = client.caches.pool()
        used = pool.bytes - pool.free_bytes
        prometheus.wait_for(f'attnserve_cache_pool_bytes{{state="used"}} == {used}')
        prometheus.wait_for(f"sum(attnserve_rejected_requests_total) >= {refused}")
        prometheus.wait_for("attnserve:cache_pool_used:ratio > 0.5")
    return Observed(
        server,
        prometheus,
        callers.replies,
        bursts,
        scrapes[0][0],
        scrapes[-1][0],
        max(duration for _, duration in scrapes),
        waiting,
        refused,
        used,
    )


def assert_within(value: float, bounds: tuple[float, float]) -> None:
    """Asserts that a value is within the callers' bounds, up to float rounding."""
    least, most = bounds
    assert least * (1 - 1e-6) <= value <= most * (1 + 1e-6), f"{value} is not within {least} and {most}"


def _is_of(operation: str, reply: Reply) -> bool:
    return reply.operation == operation


def test_the_callers_kept_it_busy(observed: Observed) -> None:
    least, _ = observed.total(lambda reply: 1)
    assert least > 5 * BURST, "or else the answers below mean little"
    assert len(observed.prometheus.query("attnserve_streams[1h]")[0].values) >= SCRAPES


def test_throughput_in_requests(observed: Observed) -> None:
    rates = observed.series(RECORDS["attnserve:requests:rate5m"])
    for operation in ("attend_stream", "apply_stream"):
        (rate,) = (s.value for s in rates if (s.labels["operation"], s.labels["code"]) == (operation, "OK"))
        assert_within(rate * observed.seconds, observed.total(partial(_is_of, operation)))
    assert sum(sample.value for sample in rates if sample.labels["code"] != "OK") == 0


def test_throughput_in_tokens(observed: Observed) -> None:
    rate = observed.ask(RECORDS["attnserve:query_tokens:rate5m"])
    assert_within(rate * observed.seconds, observed.total(lambda reply: reply.tokens))
    by_caller = observed.ask("sum(rate(attnserve_caller_query_tokens_total{caller='anonymous'}[5m]))")
    assert by_caller == pytest.approx(rate)


@pytest.mark.parametrize(("name", "q"), [("p50_5m", 0.5), ("p99_5m", 0.99)])
def test_latency_by_operation(observed: Observed, name: str, q: float) -> None:
    """It is at least what the server reported in its replies, and at most what the callers waited."""
    latencies = {
        sample.labels["operation"]: sample.value
        for sample in observed.series(RECORDS[f"attnserve:request_duration_seconds:{name}"])
    }
    assert set(latencies) == set(OPERATIONS)
    for operation in ("attend_stream", "apply_stream"):
        least = observed.quantile(q, operation, lambda reply: reply.in_server, above=False)
        most = observed.quantile(q, operation, lambda reply: reply.at - reply.sent_at, above=True)
        assert_within(latencies[operation], (least, most))
    assert math.isnan(latencies["fork"]), "nobody forked"


def test_requests_in_a_batch(observed: Observed) -> None:
    requests = observed.total(lambda reply: 1)
    batches = observed.total(lambda reply: 1 / reply.batch_size)
    mean = observed.ask(RECORDS["attnserve:batch_requests:mean5m"])
    # Each is a batch by itself, which no reply recorded here reports.
    truncations = len(observed.bursts) / TRUNCATE_EVERY + 1
    assert_within(mean, (requests[0] / (batches[1] + truncations), (requests[1] + truncations) / batches[0]))


def test_use_of_the_device(observed: Observed) -> None:
    use = observed.ask(RECORDS["attnserve:device_busy:ratio_rate5m"])
    least, _ = observed.total(lambda reply: reply.device)
    begin, end, lag = observed.begin, observed.end, observed.lag
    # The device was idle while no call was in flight.
    most = sum(max(0.0, min(at, end + lag) - max(since, begin)) for since, at in observed.bursts)
    assert_within(use * observed.seconds, (least, most))
    assert use < 1


def test_depth_of_the_queue(observed: Observed) -> None:
    waited, in_flight = observed.waiting
    prometheus = observed.prometheus
    assert waited <= prometheus.value("max_over_time(attnserve_queue_requests[1h])") <= in_flight
    assert waited <= prometheus.value("max_over_time(attnserve_in_flight_requests[1h])") <= in_flight
    assert prometheus.value("attnserve_queue_requests") == 0, "it is empty again"
    ratio = prometheus.by("bound", "max_over_time(attnserve:in_flight:ratio[1h])")
    assert set(ratio) == {"requests", "bytes", "flops", "seconds"}
    assert 0 < ratio["requests"] <= in_flight / prometheus.value('attnserve_in_flight_limit{bound="requests"}')


def test_refusals(observed: Observed) -> None:
    prometheus = observed.prometheus
    refused = prometheus.by("reason", "attnserve_rejected_requests_total")
    assert refused.pop("cache_bytes") == observed.refused
    assert not any(refused.values())
    assert prometheus.value('attnserve_requests_total{operation="append", code="RESOURCE_EXHAUSTED"}') == (
        observed.refused
    )
    assert prometheus.value("sum(attnserve_caller_rejected_requests_total)") == observed.refused
    assert 0 < prometheus.value(RECORDS["attnserve:rejected:ratio_rate5m"]) < 1


def test_pool_of_caches(observed: Observed) -> None:
    prometheus = observed.prometheus
    states = prometheus.by("state", "max_over_time(attnserve_cache_pool_bytes[1h])")
    assert states["used"] == observed.pool_used
    assert prometheus.value("sum without (state) (attnserve_cache_pool_bytes)") == 4 << 20
    used = prometheus.value("max_over_time(attnserve:cache_pool_used:ratio[1h])")
    assert used == pytest.approx(observed.pool_used / (4 << 20))


def test_states(observed: Observed) -> None:
    states = observed.prometheus.by("state", "attnserve_state")
    assert states == {"starting": 0, "serving": 1, "draining": 0, "failed": 0}


def test_every_rule_is_evaluated(observed: Observed) -> None:
    observed.prometheus.wait_for("attnserve:errors:ratio_rate3d")
    rules = [rule for group in observed.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules if rule["type"] == "recording"} == set(RECORDS)
    assert all(rule["health"] == "ok" for rule in rules), rules
    for name in RECORDS:
        assert any(math.isfinite(sample.value) for sample in observed.prometheus.wait_for(name)), name
    # The little trouble there was (appends to a full pool) is no emergency.
    firing = {sample.labels["alertname"] for sample in observed.prometheus.query('ALERTS{alertstate="firing"}')}
    assert not firing


def test_every_query_of_the_dashboard_gives_data(observed: Observed) -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
    # Only on Kubernetes is there a namespace.
    variables = {"job": "attnserve", "namespace": ".*", "instance": ".*", "__rate_interval": "1h"}
    panels = [panel for row in dashboard["panels"] for panel in (row, *row.get("panels", ()))]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 30
    for query in queries:
        for selector in re.findall("{([^}]*)}", query):
            assert all(f'{name}=~"${name}"' in selector for name in ("job", "namespace", "instance")), query
        substituted = re.sub(r"\$(\w+)", lambda found: variables[found[1]], query)
        samples = observed.prometheus.wait_for(substituted)
        assert any(math.isfinite(sample.value) for sample in samples), (query, samples)
    for variable in dashboard["templating"]["list"]:
        if found := re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", "")):
            selector = re.sub(r"\$(\w+)", lambda found: variables[found[1]], found[1])
            assert variable["name"] == "namespace" or all(
                found[2] in sample.labels for sample in observed.prometheus.wait_for(selector)
            )


def test_the_metrics_follow_the_conventions(observed: Observed) -> None:
    _, page = calls.get(observed.server.http_address, "/metrics")
    promtool("check", "metrics", page=page)


def test_prometheus_shows_its_token_over_tls(tmp_path: Path, start_server: Callable[..., Server]) -> None:
    """And sees callers by name."""
    authority = certificates.Authority(tmp_path)
    files = authority.issue_for_server()
    tokens = {name: new_token() for name in ("ranker", "prometheus")}
    roles = {"ranker": "use", "prometheus": "metrics"}
    callers, credentials = tmp_path / "callers.toml", tmp_path / "token"
    callers.write_text(
        "".join(
            f'[[tokens]]\nname = "{name}"\nroles = ["{roles[name]}"]\nhash = "{format_hash(digest(token))}"\n'
            for name, token in tokens.items()
        )
    )
    credentials.write_text(tokens["prometheus"])
    server = start_server(
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--http-tls", "true"),
        *("--callers", str(callers)),
    )
    job = {
        "scheme": "https",
        "tls_config": {"ca_file": str(authority.ca)},
        "authorization": {"credentials_file": str(credentials)},
    }
    query, key, value = traffic.arrays(2, 5, 8)
    with (
        Prometheus(tmp_path, server.http_address, **job) as prometheus,
        Client(server.address, tls=TLS(authority.ca), token=tokens["ranker"]) as client,
    ):
        for _ in range(3):
            client.attend(query, key, value)
        prometheus.wait_for('attnserve_caller_requests_total{caller="ranker"} == 3')
        assert prometheus.value('attnserve_caller_query_tokens_total{caller="ranker"}') == 15
        assert prometheus.value('attnserve_caller_requests_total{caller="anonymous"}') == 0
