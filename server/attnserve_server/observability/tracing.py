"""Traces of requests and batches, by OpenTelemetry. Off unless an endpoint is configured.

In: W3C trace contexts of callers, and the outcomes of requests and batches. Out: spans, sent over OTLP by a thread of
OpenTelemetry's, and exemplars that lead from the latency histograms to traces.

    caller's span ─▶ attend ─┬─ decode, queue, staging, compute, encode
                             │              └────┬────┘ links
                             └◀── links ── batch ─┬─ staging, compute, fetch          a trace of its own

A caller's decision to record or not is honoured; of the other requests, a share is recorded. A request that is not
recorded has no `Trace`, and costs only a look at its context. The spans of one that is recorded are made when their
times are known.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import grpc

from attnserve_server import __version__
from attnserve_server.settings.config import Config
from attnserve_server.start_errors import StartError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer

    from attnserve_server.observability.metrics import Metrics, Operation
    from attnserve_server.requests.work import BatchResult, Phases
    from attnserve_server.scheduling.entry import Entry

logger = logging.getLogger(__name__)

FLUSH_S: Final = 2.0
"""How long a stopping server waits for its last spans to be taken."""

MAX_STATE: Final = 1024
"""A longer tracestate is left out: the caller chooses its length, and the event loop would parse it."""

_EXPORTERS: Final = frozenset(("otlp", "otlp_proto_grpc"))
"""What OTEL_TRACES_EXPORTER calls the exporter that is used here."""

_FAULTS: Final = frozenset(("DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE"))
"""The codes of ours that make a server's span an error, by OpenTelemetry's conventions for RPCs."""


class TraceParent(NamedTuple):
    """A caller's trace context, as the W3C headers of these names."""

    traceparent: str
    tracestate: str


def in_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceParent | None:
    """The trace context in the metadata of an RPC."""
    found = {key: value for key, value in metadata or () if key in TraceParent._fields and isinstance(value, str)}
    return TraceParent(found["traceparent"], found.get("tracestate", "")) if "traceparent" in found else None


class Ran(NamedTuple):
    """The batch in which a request was computed, and when that began (seconds of `time.perf_counter`)."""

    span: SpanContext
    begin: float


class Trace:
    """A request that is recorded."""

    __slots__ = ("_arrival", "_offset", "_operation", "_span", "_tracing", "ran")

    def __init__(self, tracing: Tracing, operation: Operation, span: Span, arrival: float, offset: int) -> None:
        self._tracing = tracing
        self._operation = operation
        self._span = span
        self._arrival = arrival
        self._offset = offset
        self.ran: Ran | None = None
        """The batch, once it has been computed."""

    @property
    def context(self) -> SpanContext:
        """The identity of the request's span."""
        return self._span.get_span_context()

    def received(self, at: float) -> None:
        """The request's message came at that time: its phases count from then, its span from when the call began."""
        self._arrival = at

    def finish(self, code: str, end: float, phases: Phases | None = None, batch_size: int = 0) -> None:
        """The request was answered, with a gRPC status code; its phases if it was computed. Only the first call counts:
        what was computed has ended before its RPC does.
        """
        if not self._span.is_recording():
            return
        tracing, span, arrival, ran = self._tracing, self._span, self._arrival, self.ran
        span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[code].value[0])
        if code in _FAULTS:
            tracing.fail(span, code)
        if phases is not None and ran is not None:
            span.set_attribute("attnserve.batch.requests", batch_size)
            decoded, computing = arrival + phases.decode, ran.begin + phases.staging
            computed = computing + phases.compute
            for name, begin, until, link in (
                ("decode", arrival, decoded, None),
                ("queue", decoded, ran.begin, None),
                ("staging", ran.begin, computing, ran.span),
                ("compute", computing, computed, ran.span),
                ("encode", max(computed, end - phases.encode), end, None),
            ):
                tracing.phase(span, name, begin, until, self._offset, link)
        span.end(_nanoseconds(end, self._offset))
        tracing.exemplify(self.context, self._operation, end - arrival, phases)


class Tracing:
    """The recording of requests and batches. Lives on the event loop."""

    def __init__(self, tracer: Tracer, sample: float, metrics: Metrics, device: str, close: Callable[[], None]) -> None:
        """`sample` is the share of requests without a caller's trace that are recorded; `close` sends what is left."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._no_context: Context = Context()
        self._extract = TraceContextTextMapPropagator().extract
        self._tracer = tracer
        self._sample = sample
        self._metrics = metrics
        self._device = device
        self._close = close

    def begin(self, operation: Operation, parent: TraceParent | None, arrival: float) -> Trace | None:
        """Starts the trace of a request that came at `arrival`; None if it is not to be recorded."""
        context = self._no_context
        if parent is not None:
            carrier: dict[str, str] = parent._asdict()
            if len(parent.tracestate) > MAX_STATE:
                carrier["tracestate"] = ""
            context = self._extract(carrier, self._no_context)
        caller = self._api.get_current_span(context).get_span_context()
        if not (caller.trace_flags.sampled if caller.is_valid else random.random() < self._sample):
            return None
        name = operation.removesuffix("_stream")
        offset = _offset()
        span = self._tracer.start_span(
            name,
            context,
            self._api.SpanKind.SERVER,
            {"rpc.system": "grpc", "attnserve.transport": "unary" if name == operation else "stream"},
            start_time=_nanoseconds(arrival, offset),
        )
        return Trace(self, operation, span, arrival, offset)

    def batch(self, entries: Sequence[Entry], begin: float, outcome: BatchResult | Exception) -> None:
        """Requests were computed together, or failed to be, from `begin` (seconds of `time.perf_counter`) on."""
        traces = [entry.trace for entry in entries if entry.trace is not None]
        if not traces:
            return
        offset = _offset()
        span = self._tracer.start_span(
            "batch",
            self._no_context,
            attributes={
                "attnserve.device": self._device,
                "attnserve.batch.requests": len(entries),
                "attnserve.batch.flops": sum(entry.request.extent.flops for entry in entries),
                "attnserve.batch.query_tokens": sum(entry.request.extent.query_tokens for entry in entries),
            },
            links=[self._api.Link(trace.context) for trace in traces],
            start_time=_nanoseconds(begin, offset),
        )
        if (layer := entries[0].request.layer) is not None:
            span.set_attribute("attnserve.layer", layer)
        end = time.perf_counter()
        if isinstance(outcome, Exception):
            self.fail(span, type(outcome).__name__)
        else:
            span.set_attribute("attnserve.batch.padding_ratio", outcome.padding)
            span.set_attribute("attnserve.kernels", sorted(outcome.kernel_calls))
            at = begin
            for name, seconds in (
                ("staging", outcome.staging),
                ("compute", outcome.compute),
                ("fetch", outcome.fetch),
            ):
                self.phase(span, name, at, at + seconds, offset)
                at += seconds
            end = at
        span.end(_nanoseconds(end, offset))
        ran = Ran(span.get_span_context(), begin)
        for trace in traces:
            trace.ran = ran

    def fail(self, span: Span, what: str) -> None:
        """Marks a span as failed."""
        span.set_status(self._api.StatusCode.ERROR, what)

    def phase(
        self, parent: Span, name: str, begin: float, end: float, offset: int, link: SpanContext | None = None
    ) -> None:
        """Records a part of a span, which may be linked to another."""
        context: Context = self._api.set_span_in_context(parent, self._no_context)
        start = _nanoseconds(begin, offset)
        links = None if link is None else [self._api.Link(link)]
        span = self._tracer.start_span(name, context, links=links, start_time=start)
        span.end(max(start, _nanoseconds(end, offset)))

    def exemplify(self, context: SpanContext, operation: Operation, seconds: float, phases: Phases | None) -> None:
        """Makes the metrics refer to the span of a request that took so long."""
        labels = {
            "trace_id": self._api.format_trace_id(context.trace_id),
            "span_id": self._api.format_span_id(context.span_id),
        }
        self._metrics.exemplify(labels, operation, seconds, phases)

    def close(self) -> None:
        """Sends what is left, within `FLUSH_S`. Blocks."""
        self._close()


def _offset() -> int:
    """What `time.perf_counter`, in nanoseconds, lacks to nanoseconds since 1970, as of now."""
    return time.time_ns() - time.perf_counter_ns()


def _nanoseconds(seconds: float, offset: int) -> int:
    return round(seconds * 1e9) + offset


def endpoint_of(config: Config, environ: Mapping[str, str]) -> str:
    """Where spans are sent: as configured, or else as OpenTelemetry's own environment variables say; "" for nowhere."""
    return "" if _off(config, environ) else config.tracing_endpoint or _endpoint_in(environ)


def _endpoint_in(environ: Mapping[str, str]) -> str:
    """The endpoint that OpenTelemetry's variables name; "" for none."""
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""


def _off(config: Config, environ: Mapping[str, str]) -> list[str]:
    """What in OpenTelemetry's variables turns tracing off, in words."""
    why = ["OTEL_SDK_DISABLED is true"] if _is_disabled(environ) else []
    if config.tracing_endpoint:
        return why
    exporters = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if _EXPORTERS.isdisjoint(exporters.replace(" ", "").split(",")):
        why.append(f"OTEL_TRACES_EXPORTER is {exporters}")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name):
            return why if protocol == "grpc" else [*why, f"{name} is {protocol}, and spans are sent by gRPC only"]
    return why


def _is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true"


def _is_wanted(config: Config, environ: Mapping[str, str]) -> bool:
    """Whether there should be tracing: it is configured, or OpenTelemetry's variables name an endpoint and do not say
    outright that there is to be none.
    """
    none = _is_disabled(environ) or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return bool(config.tracing_endpoint or (_endpoint_in(environ) and not none))


def shown(endpoint: str) -> str:
    """An endpoint without the parts that may be secret. Raises ValueError if it is none."""
    parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


def open_tracing(config: Config, environ: Mapping[str, str], metrics: Metrics, device: str) -> Tracing | None:
    """The tracing; None if it is off. Raises StartError if it is configured and OpenTelemetry is not installed."""
    endpoint = endpoint_of(config, environ)
    if not endpoint:
        if (why := _off(config, environ)) and _is_wanted(config, environ):
            logger.warning("tracing is off: %s", "; ".join(why))
        return None
    try:
        shown(endpoint)
    except ValueError:
        logger.warning("tracing is off: what OpenTelemetry's variables say is no endpoint, such as http://host:4317")
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        missing = f"tracing needs OpenTelemetry: pip install 'attnserve[tracing]' ({error})"
        if config.tracing_endpoint:
            raise StartError(missing) from None
        logger.warning("tracing is off: %s", missing)  # the environment is often the same for many programs
        return None
    exporter = OTLPSpanExporter(endpoint)
    own: dict[str, Any] = {"service.name": "attnserve-server", "service.version": __version__}
    provider = TracerProvider(
        # What is recorded has been decided before a span is made.
        sampler=ALWAYS_ON,
        resource=Resource.create(own).merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        # If there is no collector, it waits for one longer than a stopping server may.
        closing = threading.Thread(target=provider.shutdown, name="attnserve-tracing", daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            logger.warning("the last spans were not exported within %g s", FLUSH_S)
            exporter.shutdown()

    tracer = provider.get_tracer("attnserve_server", __version__)
    return Tracing(tracer, config.tracing_sample, metrics, device, close)
