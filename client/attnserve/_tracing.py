"""Traces of calls, through OpenTelemetry, if a client is told to make them. The rest of the SDK does not import it.

In: the method, and the caller's trace context. Out: a span per call, and the W3C context that travels with the call, so
that the server's spans are below it: as metadata of a unary call, and as fields of a call on a stream, since the calls
on a stream belong to many traces.
"""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnserve._errors import AttnServeError
from attnserve._numbers import shown
from attnserve._settings.targets import host_and_port
from attnserve._version import __version__
from attnserve.v1 import attention_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

logger = logging.getLogger("attnserve")


class CallSpan:
    """The span of one call, through all its attempts."""

    def __init__(self, span: Span, carrier: dict[str, str], error_status: Any) -> None:
        self._span = span
        self._open = [True]  # only one `pop` succeeds, even if another thread, or a finalizer, calls `end` meanwhile
        self._carrier = carrier
        self._error_status = error_status

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The trace context as the metadata of an RPC."""
        return tuple(self._carrier.items())

    @cached_property
    def fields(self) -> bytes:
        """The trace context as serialised fields of a stream's call."""
        return pb.AttendStreamCall(**self._carrier).SerializeToString()  # type: ignore[arg-type]

    def end(self, error: BaseException | None) -> None:
        """Ends the span with the call's outcome; only the first counts. Errors are logged, so that the outcome still
        reaches the caller.
        """
        try:
            self._open.pop()
        except IndexError:
            return
        try:
            self._end(error)
        except Exception:  # OpenTelemetry does not catch errors of the caller's span processors
            logger.exception("the span of a call could not be ended")

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__qualname__)
            if isinstance(error, AttnServeError):
                self._span.set_attribute("rpc.grpc.status_code", error.code.value[0])
            self._span.set_status(self._error_status, "cancelled" if isinstance(error, CancelledError) else str(error))
        else:
            self._span.set_attribute("rpc.grpc.status_code", 0)
        self._span.end()


class Tracing:
    """Makes the spans of one client."""

    def __init__(self, provider: TracerProvider | None, address: str) -> None:
        """`provider` is None for OpenTelemetry's global one. ImportError if OpenTelemetry is not installed."""
        try:
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ImportError(f"tracing needs OpenTelemetry: pip install 'attnserve[tracing]' ({error})") from error
        self._api = trace
        self._tracer = trace.get_tracer("attnserve", __version__, provider)
        self._inject = TraceContextTextMapPropagator().inject
        self._server = _server(address)
        self.current = context.get_current
        """Returns the caller's current trace context."""

    def begin(self, path: str, parent: Context | None) -> CallSpan:
        """Begins the span of a call, below that in `parent`, or below the caller's current span if that is None."""
        service, _, method = path[1:].partition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            **self._server,
        }
        span = self._tracer.start_span(f"{service}/{method}", parent, self._api.SpanKind.CLIENT, attributes)
        carrier: dict[str, str] = {}
        self._inject(carrier, self._api.set_span_in_context(span, parent))
        return CallSpan(span, carrier, self._api.StatusCode.ERROR)


def _server(address: str) -> dict[str, str | int]:
    """The attributes that say which server is asked."""
    place = host_and_port(address)
    return {"server.address": address} if place is None else {"server.address": place[0], "server.port": place[1]}


def tracing_of(tracing: bool | TracerProvider, address: str) -> Tracing | None:
    """The tracing that a client's argument `tracing` asks for. ValueError if it is neither a bool nor a provider."""
    if tracing is False:
        return None
    if tracing is not True and not hasattr(tracing, "get_tracer"):
        raise ValueError(f"tracing: expected True, False or a tracer provider, found {shown(tracing)}")
    return Tracing(None if tracing is True else tracing, address)
