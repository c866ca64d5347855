"""The spans of requests and of batches: what they say, and when each began and ended."""

from __future__ import annotations

from typing import Any

import messages
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from rpcs import new_metrics

from attnserve_server.observability import tracing
from attnserve_server.requests.work import BatchResult, Phases
from attnserve_server.scheduling.entry import Entry


class Recording:
    """A tracing, with its spans and its metrics in this process."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.metrics = new_metrics()
        self.tracing = tracing.Tracing(provider.get_tracer("tests"), 1.0, self.metrics, "cpu", lambda: None)

    def begin(self, operation: str, at: float) -> tracing.Trace:
        trace = self.tracing.begin(operation, None, at)
        assert trace is not None
        return trace

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def exemplars(self, name: str) -> set[float]:
        """What was measured of requests that are examples, in a histogram."""
        families = parse_openmetrics(generate_latest(self.metrics.registry).decode())
        samples = (sample for family in families if family.name == name for sample in family.samples)
        return {sample.exemplar.value for sample in samples if sample.exemplar}


def entry_of(trace: tracing.Trace | None) -> Entry:
    ignored: Any = None
    return Entry(messages.read(messages.random_attend(1)), ignored, 1.0, 9.0, 0.0, None, trace)


def test_a_batch_that_fails_is_an_error_with_the_name_of_its_kind() -> None:
    recording = Recording()
    trace = recording.begin("apply_stream", 1.0)
    recording.tracing.batch([entry_of(trace)], 2.0, MemoryError("what a caller must not see"))
    trace.finish("INTERNAL", 3.0)
    spans = {span.name: span for span in recording.spans}
    assert spans.keys() == {"batch", "apply"}
    assert (spans["batch"].status.status_code, spans["batch"].status.description) == (StatusCode.ERROR, "MemoryError")
    assert spans["apply"].status.status_code is StatusCode.ERROR
    assert times(spans["apply"], spans["apply"]) == (0.0, 2.0)


def times(span: ReadableSpan, of: ReadableSpan) -> tuple[float, float]:
    """When a span began and ended, in seconds since another began."""
    assert span.start_time is not None
    assert span.end_time is not None
    assert of.start_time is not None
    return (span.start_time - of.start_time) / 1e9, (span.end_time - of.start_time) / 1e9


@pytest.mark.parametrize(
    ("end", "encode", "encoded"), [(6.0, 0.25, (4.75, 5.0)), (6.0, 2.0, (4.0, 5.0)), (4.75, 0.25, (4.0, 4.0))]
)
def test_what_a_request_and_its_batch_did_when(
    end: float, encode: float, encoded: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    """The call began before its message came. What is said to encode may have begun while others still computed, and
    even have ended: then it takes no time.
    """
    recording = Recording()
    trace, other = recording.begin("attend", 1.0), recording.begin("attend_stream", 1.0)
    trace.received(2.0)
    outcome = BatchResult([], 0.5, 1.5, 0.25, padding=0.125, kernel_calls={"b": 1, "a": 2})
    entries = [entry_of(trace), entry_of(None), entry_of(other)]
    recording.tracing.batch(entries[1:2], 3.0, outcome)
    assert recording.spans == [], "of what is not recorded"
    recording.tracing.batch(entries, 3.0, outcome)
    trace.finish("OK", end, Phases(0.75, 0.25, 0.5, 1.5, encode), len(entries))
    trace.finish("CANCELLED", 9.0)
    assert caplog.messages == [], "a span ends once"

    *inside, batch = recording.spans[:4]
    assert {span.name: times(span, batch) for span in inside} == {
        "staging": (0.0, 0.5),
        "compute": (0.5, 2.0),
        "fetch": (2.0, 2.25),
    }
    assert times(batch, batch) == (0.0, 2.25)
    *phases, request = recording.spans[4:]
    assert request.name == "attend"
    assert times(request, request) == (0.0, end - 1.0)
    assert {span.name: times(span, request) for span in phases} == {
        "decode": (1.0, 1.75),
        "queue": (1.75, 2.0),
        "staging": (2.0, 2.5),
        "compute": (2.5, 4.0),
        "encode": encoded,
    }
    linked = {span.name for span in phases if [link.context for link in span.links] == [batch.get_span_context()]}
    assert linked == {"staging", "compute"}
    assert batch.attributes is not None
    assert request.attributes is not None
    assert batch.attributes["attnserve.batch.requests"] == request.attributes["attnserve.batch.requests"] == 3
    assert batch.attributes["attnserve.batch.padding_ratio"] == 0.125
    assert batch.attributes["attnserve.batch.query_tokens"] == sum(
        entry.request.extent.query_tokens for entry in entries
    )
    assert batch.attributes["attnserve.kernels"] == ("a", "b")
    assert "attnserve.layer" not in batch.attributes
    assert recording.exemplars("attnserve_request_duration_seconds") == {end - 2.0}, "as the metrics have it"
    assert recording.exemplars("attnserve_request_phase_duration_seconds") >= {0.75, 1.5}
