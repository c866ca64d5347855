"""Spans of the SDK, and what the server does with the trace context of each call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from calls import PATIENCE_S
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from peers import good, good_unary, peer

from attnserve import AsyncClient, Client, ClientClosedError, InvalidRequestError, UnavailableError
from attnserve._tracing import Tracing, tracing_of
from attnserve._transports.tasks import CallFuture
from attnserve.v1 import attention_pb2 as pb

ATTEND = "attnserve.v1.AttentionService/Attend"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A peer that answers every call, and the traceparents that it was given."""
    seen: list[str] = []

    def stream(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for message in messages:
            seen.extend(call.traceparent for call in pb.AttendStreamRequest.FromString(message).calls)
            yield from good(iter([message]), context)

    def unary(message: bytes, context: Any) -> bytes:
        seen.append(dict(context.invocation_metadata()).get("traceparent", ""))
        return good_unary(message, context)

    with peer(stream, unary) as address:
        yield address, seen


def header(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def array() -> Any:
    return np.ones((2, 3), np.float32)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_call_is_a_span_below_the_callers_and_its_context_travels(
    transport: Any, exporter: InMemorySpanExporter, provider: TracerProvider, listener: tuple[str, list[str]]
) -> None:
    address, seen = listener
    tracer = provider.get_tracer("tests")
    with tracer.start_as_current_span("mine") as mine, Client(address, transport=transport, tracing=provider) as client:
        client.attend(array(), array(), array())
        client.submit(array(), array(), array()).result()
    with tracer.start_as_current_span("other") as other:
        async with AsyncClient(address, transport=transport, tracing=provider) as in_tasks:
            await in_tasks.attend(array(), array(), array())
    spans = [span for span in exporter.get_finished_spans() if span.name == ATTEND]
    assert [span.parent and span.parent.span_id for span in spans] == [
        each.get_span_context().span_id for each in (mine, mine, other)
    ]
    assert seen == [header(span) for span in spans]
    host, _, port = address.rpartition(":")
    for span in spans:
        assert span.kind is trace.SpanKind.CLIENT
        assert span.attributes is not None
        assert span.attributes["rpc.method"] == "Attend"
        assert (span.attributes["server.address"], span.attributes["server.port"]) == (host, int(port))
        assert span.attributes["rpc.grpc.status_code"] == 0


def test_a_call_that_is_not_recorded_says_so(listener: tuple[str, list[str]]) -> None:
    address, seen = listener
    with Client(address, tracing=TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)) as client:
        client.attend(array(), array(), array())
    assert not int(seen[0].rpartition("-")[2], 16) & trace.TraceFlags.SAMPLED


def test_without_tracing_nothing_travels(listener: tuple[str, list[str]]) -> None:
    address, seen = listener
    for transport in ("stream", "unary"):
        with Client(address, transport=transport) as client:  # type: ignore[arg-type]
            client.attend(array(), array(), array())
    # Without OpenTelemetry's SDK there is a provider that makes no spans.
    with Client(address, tracing=trace.NoOpTracerProvider()) as client:
        client.attend(array(), array(), array())
    assert seen == ["", "", ""]


def test_errors_and_cancellations_are_told(
    server: Any, exporter: InMemorySpanExporter, provider: TracerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(server.address, tracing=provider) as client, pytest.raises(InvalidRequestError):
        client.attend(array(), array(), np.ones((1, 3), np.float32))
    with Client("127.0.0.1:9", tracing=provider, retries=0) as client, pytest.raises(UnavailableError):
        client.attend(array(), array(), array())

    def silent(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        return (message for message in messages if not message)

    with peer(silent) as address, Client(address, tracing=provider) as client:
        future = client.submit(array(), array(), array())
        assert future.cancel()
        assert future.cancel(), "as often as one likes"
        assert not caplog.records, "a span ends once"
    refused, unreachable, cancelled = exporter.get_finished_spans()
    for span, code, error_type in (
        (refused, 3, "InvalidRequestError"),
        (unreachable, 14, "UnavailableError"),
        (cancelled, None, "CancelledError"),
    ):
        assert span.attributes is not None
        assert span.attributes.get("rpc.grpc.status_code") == code
        assert span.attributes["error.type"] == error_type
        assert span.status.status_code is trace.StatusCode.ERROR
    assert cancelled.status.description == "cancelled"
    assert refused.status.description is not None
    assert refused.status.description.startswith("value.shape: ")


def test_each_step_of_an_operation_on_a_cache_is_below_the_caller(
    server: Any, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    tracer = provider.get_tracer("tests")
    with Client(server.address, tracing=provider) as client, tracer.start_as_current_span("mine") as mine:
        cache = client.create_cache(1, 3)
        futures = [client.submit(array()[None], array()[None], array()[None], caches=cache) for _ in range(3)]
        for future in futures:  # each later one begins where the one before it ends
            future.result()
        cache.truncate(1)
        cache.delete()
    names = [span.name.rpartition("/")[2] for span in exporter.get_finished_spans() if span.name != "mine"]
    assert names == ["Create", "Attend", "Attend", "Attend", "Truncate", "Delete"]
    parents = {span.parent and span.parent.span_id for span in exporter.get_finished_spans() if span.name != "mine"}
    assert parents == {mine.get_span_context().span_id}


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_call_that_cannot_be_made_is_a_span_that_ends(
    transport: Any, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    client, in_tasks = (kind(transport=transport, tracing=provider) for kind in (Client, AsyncClient))
    client.close()
    await in_tasks.close()
    for ask in (client.is_ready, lambda: client.attend(array(), array(), array())):
        with pytest.raises(ClientClosedError):
            ask()
    for begin in (in_tasks.is_ready, lambda: in_tasks.attend(array(), array(), array())):
        with pytest.raises(ClientClosedError):
            await begin()
    spans = exporter.get_finished_spans()
    assert [span.attributes and span.attributes["error.type"] for span in spans] == ["ClientClosedError"] * 4


def test_a_span_of_a_call_that_is_given_up_as_its_result_is_made_ends_once(
    exporter: InMemorySpanExporter, provider: TracerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """A finalizer may do that: it can run at any allocation."""

    async def run() -> None:
        def finish(outcome: int) -> int:
            assert future.cancel()
            return outcome

        future: CallFuture[int, int] = CallFuture(finish)
        future.span = Tracing(provider, "here").begin("/service/Method", None)
        future.settle(1)
        assert future.cancelled()

    asyncio.run(run())
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CancelledError"
    assert not caplog.records


def test_the_first_outcome_of_a_call_counts(
    exporter: InMemorySpanExporter, provider: TracerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that is cancelled while its result is on the way has two."""
    call = Tracing(provider, "here").begin("/service/Method", None)
    call.end(None)
    call.end(UnavailableError("gone"))
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["rpc.grpc.status_code"] == 0
    assert not caplog.records


def test_a_span_of_a_call_that_is_given_up_when_its_loop_is_closed_ends(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    async def run() -> CallFuture[int, int]:
        future: CallFuture[int, int] = CallFuture(lambda outcome: outcome)
        future.span = Tracing(provider, "here").begin("/service/Method", None)
        return future

    assert asyncio.run(run()).cancel()
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CancelledError"


class Failing(SpanProcessor):
    """A span processor, which OpenTelemetry calls as a span ends."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("a processor of the caller")


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_span_that_cannot_be_ended_takes_no_result_away(
    transport: Any, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(Failing())
    query = np.zeros((2, 3), np.float32)
    with peer(good, good_unary) as address:
        async with (
            AsyncClient(address, tracing=provider, transport=transport, timeout=None) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            assert (await client.attend(query, query, query)).output.shape == (2, 3)
        with Client(address, tracing=provider, transport=transport, timeout=None) as threads:
            assert threads.submit(query, query, query).result(PATIENCE_S).output.shape == (2, 3)
    assert caplog.text.count("the span of a call could not be ended") == 2


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("tracing", ["yes", 1, None])
def test_what_is_no_tracing_is_refused(kind: Any, tracing: Any) -> None:
    with pytest.raises(ValueError, match=rf"^tracing: expected True, False or a tracer provider, found {tracing!r}$"):
        kind("127.0.0.1:9", tracing=tracing)


def test_opentelemetry_is_imported_only_where_it_is_asked_for() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import attnserve\n"
        "attnserve.Client('127.0.0.1:9').close()\n"
        "try: attnserve.Client('127.0.0.1:9', tracing=True)\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("tracing needs OpenTelemetry: pip install 'attnserve[tracing]'")


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("host:1", {"server.address": "host", "server.port": 1}),
        ("dns:///a.example:8001", {"server.address": "a.example", "server.port": 8001}),
        ("ipv4:10.0.0.1:8001", {"server.address": "10.0.0.1", "server.port": 8001}),
        ("ipv6:[::1]:8001", {"server.address": "::1", "server.port": 8001}),
        ("unix:/run/attnserve:1", {"server.address": "unix:/run/attnserve:1"}),
        ("ipv4:10.0.0.1:8001,10.0.0.2:8001", {"server.address": "ipv4:10.0.0.1:8001,10.0.0.2:8001"}),
        ("vsock:2:8001", {"server.address": "vsock:2:8001"}),
    ],
)
def test_a_span_says_which_server_is_asked(address: str, server: dict[str, Any]) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = tracing_of(provider, address)
    assert tracing is not None
    tracing.begin(f"/{ATTEND}", None).end(None)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert {name: value for name, value in span.attributes.items() if name.startswith("server.")} == server
