"""A collector of traces that speaks OTLP, for tests: what is exported to it can be looked at, span by span."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 60.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The spans that have been exported so far, and the attributes of the resources that they come from."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.resources: list[dict[str, str]] = []
        self._spans: list[Span] = []
        self._arrived = threading.Condition()

    def Export(  # noqa: N802 (gRPC's name)
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        """Takes spans."""
        with self._arrived:
            for resource in request.resource_spans:
                self.resources.append({each.key: each.value.string_value for each in resource.resource.attributes})
                for scope in resource.scope_spans:
                    self._spans += scope.spans
            self._arrived.notify_all()
        return pb.ExportTraceServiceResponse()

    def spans(self, wanted: Callable[[Span], bool], count: int = 1) -> list[Span]:
        """The spans wanted, once there are so many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: sum(map(wanted, self._spans)) >= count, PATIENCE_S), (
                f"of {count} spans, these came: {sorted(span.name for span in self._spans)}"
            )
            return list(filter(wanted, self._spans))


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port."""
    servicer = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()


def attributes(span: Span) -> dict[str, Any]:
    """The attributes of a span: strings, whole numbers and lists of strings."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
