"""Traces: the real server with an OTLP collector; and what turns tracing off."""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING

import calls
import grpc
import messages
import pytest
from collector import attributes, collector
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from rpcs import new_metrics

from attnserve import Client, NotFoundError
from attnserve_server.observability import tracing
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import ConfigError, StartError

if TYPE_CHECKING:
    from tests.conftest import Server

PARENT = 0xB7AD6B7169203331
PHASES = ("decode", "queue", "staging", "compute", "encode")
STATE = ",".join(f"{key}={'x' * 250}" for key in "abcd")
"""A tracestate that is almost as long as is taken."""


def header(trace: int, sampled: bool = True) -> str:
    """A traceparent."""
    return f"00-{trace:032x}-{PARENT:016x}-{sampled:02x}"


def of_trace(trace: int) -> Callable[[Span], bool]:
    return lambda span: span.trace_id == trace.to_bytes(16, "big")


def named(name: str) -> Callable[[Span], bool]:
    return lambda span: span.name == name


def exemplars(http_address: str, name: str) -> set[str]:
    """The trace ids in the exemplars of a histogram's buckets."""
    request = urllib.request.Request(
        f"http://{http_address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=calls.PATIENCE_S) as answer:
        page = answer.read().decode()
    (family,) = (family for family in parse_openmetrics(page) if family.name == name)
    return {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar}


def assert_whole(spans: list[Span], batches: list[Span]) -> Span:
    """Asserts that these spans are one request's: its own, below its caller's, and its phases in order. Returns it."""
    (request,) = (span for span in spans if span.name not in PHASES)
    assert request.parent_span_id == PARENT.to_bytes(8, "big")
    assert request.kind == Span.SPAN_KIND_SERVER
    phases = {span.name: span for span in spans if span is not request}
    assert tuple(sorted(phases, key=lambda name: phases[name].start_time_unix_nano)) == PHASES
    at = request.start_time_unix_nano
    for name in PHASES:
        phase = phases[name]
        assert phase.parent_span_id == request.span_id
        assert at <= phase.start_time_unix_nano <= phase.end_time_unix_nano <= request.end_time_unix_nano
        at = phase.end_time_unix_nano
    (link,) = phases["compute"].links
    (batch,) = (span for span in batches if span.span_id == link.span_id)
    assert batch.trace_id == link.trace_id
    assert request.span_id in [link.span_id for link in batch.links]
    return request


def test_a_request_is_followed_from_its_caller_to_its_batch(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=tests")
    request = messages.random_attend(1)
    with collector() as collected:
        server = start_server("--tracing-endpoint", collected.endpoint, "--tracing-sample", "0", "--max-wait", "1ms")
        assert server.startup["traces_to"] == collected.endpoint.removeprefix("http://")
        with grpc.insecure_channel(server.address) as channel:
            # Not recorded: no trace context (the sampled share is 0), one that is not sampled, a malformed one.
            for metadata in ((), (("traceparent", header(1, sampled=False)),), (("traceparent", "00-0-0-01"),)):
                calls.unary(channel, "Attend", request.SerializeToString(), metadata=metadata)

            calls.unary(
                channel,
                "Attend",
                request.SerializeToString(),
                metadata=(("traceparent", header(2)), ("tracestate", STATE)),
            )
            stream = calls.Stream(channel)
            parents = {
                3: header(3),
                4: header(4),
                5: header(5, sampled=False),
                6: "what a caller made up",
                7: header(7),
            }
            stream.send(*(calls.call(call_id, request, traceparent=text) for call_id, text in parents.items()))
            for reply in stream.replies(len(parents)):
                calls.assert_answers(reply.attend, request)
            longer = f"{STATE},e=what makes it too long"
            stream.send(calls.call(8, messages.random_attend(1, kv_heads=3), traceparent=header(8), tracestate=longer))
            (reply,) = stream.replies(1)
            assert reply.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            stream.half_close()
            assert stream.rest() == []

            # Batches of a unary request and of one message's requests, which form a single batch.
            batches = collected.spans(named("batch"), 2)
            alone = assert_whole(collected.spans(of_trace(2), 6), batches)
            assert alone.trace_state == STATE
            assert attributes(alone)["attnserve.transport"] == "unary"
            together = [assert_whole(collected.spans(of_trace(trace), 6), batches) for trace in (3, 4, 7)]
            assert {span.name for span in together} == {"attend"}
            assert {attributes(span)["attnserve.transport"] for span in together} == {"stream"}
            batch = max(batches, key=lambda span: len(span.links))
            assert {link.span_id for link in batch.links} == {span.span_id for span in together}
            assert attributes(batch)["attnserve.batch.requests"] == len(parents)
            assert attributes(batch)["attnserve.kernels"]
            assert attributes(batch)["attnserve.batch.padding_ratio"] == 0
            inside = collected.spans(lambda span: span.parent_span_id == batch.span_id, 3)
            assert {span.name for span in inside} == {"staging", "compute", "fetch"}

            (refused,) = collected.spans(of_trace(8))
            assert attributes(refused)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert refused.status.code == Status.STATUS_CODE_UNSET, "the fault is the caller's"
            assert refused.trace_state == ""

            ids = {f"{trace:032x}" for trace in (2, 3, 4, 7, 8)}
            duration, phase = "attnserve_request_duration_seconds", "attnserve_request_phase_duration_seconds"
            assert set() < exemplars(server.http_address, duration) <= ids
            assert set() < exemplars(server.http_address, phase) <= ids

            # A call without a trace context has its stream's.
            stream = calls.Stream(channel, (("traceparent", header(9)),))
            stream.send(calls.call(1, request), calls.call(2, request, traceparent=header(10)))
            stream.replies(2)
            stream.half_close()
            assert stream.rest() == []
            batches = collected.spans(named("batch"), 3)
            for trace in (9, 10):
                assert_whole(collected.spans(of_trace(trace), 6), batches)
        assert server.stop() == 0, server.stderr()
        recorded = collected.spans(lambda span: span.kind == Span.SPAN_KIND_SERVER)
        assert {int.from_bytes(span.trace_id, "big") for span in recorded} == {2, 3, 4, 7, 8, 9, 10}
        assert collected.resources[0]["service.name"] == "attnserve-server"
        assert collected.resources[0]["deployment.environment"] == "tests"


def test_requests_that_come_again_and_again_are_followed_like_the_first(start_server: Callable[..., Server]) -> None:
    """Elsewhere they would be answered at once, which leaves no traces."""
    request, traces = messages.random_attend(1).SerializeToString(), range(2, 7)
    with collector() as collected:
        server = start_server("--tracing-endpoint", collected.endpoint, "--tracing-sample", "0")
        with grpc.insecure_channel(server.address) as channel:
            for trace in traces:
                calls.unary(channel, "Attend", request, metadata=(("traceparent", header(trace)),))
        batches = collected.spans(named("batch"), len(traces))
        for trace in traces:
            assert_whole(collected.spans(of_trace(trace), 1 + len(PHASES)), batches)


def test_calls_that_do_not_pass_the_queue_are_recorded_too(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")  # --tracing-sample decides
    with collector() as collected:
        server = start_server("--tracing-endpoint", collected.endpoint, "--tracing-sample", "1")
        with Client(server.address) as client:
            client.server_info()
            client.layers.list()
            with client.create_cache(1, 4) as cache:
                cache.fork().truncate(0)
                client.caches.list()
            with pytest.raises(NotFoundError):
                cache.refresh()
        assert server.stop() == 0, server.stderr()
        recorded = collected.spans(lambda span: span.kind == Span.SPAN_KIND_SERVER)
    outcomes = {(span.name, attributes(span)["rpc.grpc.status_code"]) for span in recorded}
    answered = {"server_info", "list_layers", "create", "fork", "truncate", "list", "delete"}
    assert outcomes == {("get", grpc.StatusCode.NOT_FOUND.value[0])} | {(name, 0) for name in answered}
    assert {attributes(span)["attnserve.transport"] for span in recorded} == {"unary"}
    assert collected.resources[0]["service.name"] == "mine"


def test_without_a_collector_the_server_serves_and_ends_in_time(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    server = start_server("--tracing-sample", "1")
    assert server.startup["traces_to"] == "127.0.0.1:9"
    with grpc.insecure_channel(server.address) as channel:
        calls.unary(channel, "Attend", messages.random_attend(1).SerializeToString())
        calls.until(lambda: bool(exemplars(server.http_address, "attnserve_request_duration_seconds")), "an example")
    assert server.stop() == 0, server.stderr()
    assert "the last spans were not exported" in server.stderr()


def test_the_server_that_is_shared_traces_nothing(server: Server) -> None:
    assert "traces_to" not in server.startup
    assert exemplars(server.http_address, "attnserve_request_duration_seconds") == set()


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "http://a:1"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"},
            "http://b:2",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "console"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": ""}, "http://a:1"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "console, otlp"}, "http://a:1"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "otlp_proto_grpc"}, "http://a:1"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_PROTOCOL": ""}, "http://a:1"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            "http://a:1",
        ),
    ],
)
def test_opentelemetrys_own_variables_say_where_too(environ: dict[str, str], endpoint: str) -> None:
    assert tracing.endpoint_of(Config(), environ) == endpoint
    configured = "" if "OTEL_SDK_DISABLED" in environ else "https://c:3"
    assert tracing.endpoint_of(Config(tracing_endpoint="https://c:3"), environ) == configured


@pytest.mark.parametrize("infix", ["", "_TRACES"])
def test_a_protocol_that_turns_tracing_off_is_told(infix: str, caplog: pytest.LogCaptureFixture) -> None:

    protocol = {f"OTEL_EXPORTER_OTLP{infix}_PROTOCOL": "http/protobuf"}
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"} | protocol
    for unmeant in (protocol, environ | {"OTEL_SDK_DISABLED": "true"}, environ | {"OTEL_TRACES_EXPORTER": "none"}):
        assert tracing.open_tracing(Config(), unmeant, new_metrics(), "cpu") is None
    assert caplog.messages == []
    assert tracing.open_tracing(Config(), environ, new_metrics(), "cpu") is None
    assert caplog.messages == [
        f"tracing is off: OTEL_EXPORTER_OTLP{infix}_PROTOCOL is http/protobuf, and spans are sent by gRPC only"
    ]


@pytest.mark.parametrize(
    ("endpoint", "environ", "why"),
    [
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER"),
        ("http://c:3", {"OTEL_SDK_DISABLED": "True"}, "OTEL_SDK_DISABLED"),
    ],
)
def test_variables_that_turn_tracing_off_against_expectations_are_told(
    endpoint: str, environ: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert tracing.open_tracing(Config(tracing_endpoint=endpoint), environ, new_metrics(), "cpu") is None
    (message,) = caplog.messages
    assert message.startswith(f"tracing is off: {why} is ")


@pytest.mark.parametrize("endpoint", ["http://collector:secret", "collector:65536", "http://[::1"])
def test_variables_that_say_no_endpoint_turn_tracing_off(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    assert tracing.open_tracing(Config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, new_metrics(), "cpu") is None
    (message,) = caplog.messages
    assert message.startswith("tracing is off")
    assert endpoint not in message


def test_without_opentelemetry_only_what_was_configured_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables in the environment are often the same for many programs."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    hint = re.escape("tracing needs OpenTelemetry: pip install 'attnserve[tracing]' (")
    with pytest.raises(StartError, match=f"^{hint}"):
        tracing.open_tracing(Config(tracing_endpoint="http://c:3"), {}, new_metrics(), "cpu")
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:3"}
    assert tracing.open_tracing(Config(), environ, new_metrics(), "cpu") is None
    (message,) = caplog.messages
    assert re.match(f"tracing is off: {hint}", message)


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4317",
        "http://user:secret@collector:4317",
        "ftp://c:1",
        "http://collector:port",
        "http://c:65536",
        "http://[::1",
    ],
)
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        Config(tracing_endpoint=endpoint)


def test_what_is_shown_of_an_endpoint_holds_no_secret() -> None:
    assert tracing.shown("https://user:secret@collector:4317/?token=x") == "collector:4317"
    assert tracing.shown("collector:4317") == "collector:4317"
    assert tracing.shown("https://collector") == "collector"
