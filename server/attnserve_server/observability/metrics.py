"""Every metric of the server: declared here or, where it is only read when scraped, in `scraped`.

In: what happens to requests and batches, reported on the event loop's thread. Out: a registry for the HTTP server, to
be scraped on the same thread. Label values are those written here, and the names of kernels, of loaded layers and of
identified callers, a bounded number; nothing that a caller can invent becomes one. The metrics of a request alone in
its batch, and of its messages, cost 1 to 1.5 us, where Prometheus' own would cost 6.5: see `histogram` and `counter`,
whose labels are resolved once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector

from attnserve_server.observability import scraped
from attnserve_server.observability.counter import Counter
from attnserve_server.observability.histogram import Histogram, Rows
from attnserve_server.observability.usage import UsageByCaller

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from attnserve_server.caches.store import CacheStore
    from attnserve_server.requests.work import Phases

Operation: TypeAlias = Literal[
    "attend", "attend_stream", "apply", "apply_stream",
    "append", "fork", "get", "truncate", "create", "list", "delete",
    "list_layers", "get_layer", "load_layers", "unload_layers", "server_info",
]  # fmt: skip
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
"""What a caller can ask for: attention or a layer, by itself or as one call of a stream; operations on caches, and on
layers; and what the server is.
"""

CODES: Final = (
    "OK",
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "UNAVAILABLE",
    "INTERNAL",
)
"""How a request can end: the codes of all errors, and OK."""

PHASES: Final = ("decode", "queue", "staging", "compute", "encode")
REJECTIONS: Final = (
    "requests",
    "bytes",
    "flops",
    "queue_time",
    "share",
    "deadline",
    "draining",
    "failed",
    "cache_bytes",
    "caches",
    "caller_streams",
    "unsent_messages",
    "unread_replies",
    "unread",
)
CANCELLATIONS: Final = ("cancelled", "deadline")

# Three buckets a decade, from 10 us (the decoding of a small request) to 10 s: a quantile that is estimated from them
# is wrong by a factor of 2.5 at most.
_SECONDS: Final = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
_REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FLOPS: Final = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12)
_RATIO: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, version: str, torch_version: str, device: str, native_kernel: str) -> None:
        self.registry = registry = CollectorRegistry()
        # Looking up a label costs three times the counting: every child is resolved here, and shows from the start.

        # Requests
        requests = Counter(
            "attnserve_requests_total",
            "Requests answered, by operation and gRPC status code. A stream that is refused, or ends with an error, is "
            "one of attend_stream.",
            registry,
            "operation",
            "code",
        )
        self._requests = {(o, code): requests.total(o, code).add for o in OPERATIONS for code in CODES}
        durations = Histogram(
            "attnserve_request_duration_seconds",
            "From the arrival of a request to its reply being ready to send.",
            _SECONDS,
            registry,
            "operation",
            OPERATIONS,
        )
        self._durations = {operation: durations.series(operation) for operation in OPERATIONS}
        phases = Histogram(
            "attnserve_request_phase_duration_seconds",
            "The phases of a request that went through the queue; staging and compute are those of its whole batch.",
            _SECONDS,
            registry,
            "phase",
            PHASES,
        )
        self._phases = {phase: phases.series(phase) for phase in PHASES}
        self._observe_phases = Rows([*self._phases.values()]).observe
        rejected = Counter(
            "attnserve_rejected_requests_total",
            "Requests, streams and new caches refused at the door: by the bound that they would have passed, because "
            "their caller had its share of one, because their deadline was out of reach, or because the server was "
            "draining or its device had failed; and streams and unary calls ended because their replies were unread.",
            registry,
            "reason",
        )
        self._rejected = {reason: rejected.total(reason).add for reason in REJECTIONS}
        cancelled = Counter(
            "attnserve_cancelled_requests_total",
            "Requests that left the queue without running, because nobody waited for them any longer.",
            registry,
            "reason",
        )
        self._cancelled = {reason: cancelled.total(reason).add for reason in CANCELLATIONS}
        received = Counter("attnserve_received_bytes_total", "Bytes of messages received.", registry)
        self.received: Callable[[int], None] = received.total().add
        """Takes the bytes of a message received."""
        sent = Counter("attnserve_sent_bytes_total", "Bytes of messages sent.", registry)
        self.sent: Callable[[int], None] = sent.total().add
        """Takes the bytes of a message sent."""
        streams = Gauge("attnserve_streams", "Streams open.", registry=registry)
        self.stream_opened: Callable[[], None] = streams.inc
        self.stream_closed: Callable[[], None] = streams.dec

        # Batches
        self._batch_sizes = Histogram("attnserve_batch_requests", "Requests in a batch.", _REQUESTS, registry).series()
        self._batch_flops = Histogram(
            "attnserve_batch_flops", "Floating-point operations of a batch.", _FLOPS, registry
        ).series()
        self._padding = Histogram(
            "attnserve_batch_padding_ratio",
            "The share of padding among a batch's rows, from 0 to 1: some layers fill up inputs, and contexts, to "
            "multiples of 16 rows; attention without a layer has none.",
            _RATIO,
            registry,
        ).series()
        self._tokens = Counter(
            "attnserve_query_tokens_total", "Query rows computed, over all sequences.", registry
        ).total()
        self._flops = Counter("attnserve_flops_total", "Floating-point operations computed.", registry).total()
        self._kernel_calls = _ByLabel("attnserve_kernel_calls_total", "Calls of attention kernels.", registry, "kernel")

        # Layers, by the names that the operator gave them
        self._layer_requests, self._layer_tokens, self._layer_flops = (
            _ByLabel(f"attnserve_layer_{name}_total", help, registry, "layer")
            for name, help in (
                ("requests", "Requests computed by a layer."),
                ("tokens", "Rows of input computed by a layer."),
                ("flops", "Floating-point operations computed by a layer."),
            )
        )
        self._layer_bytes = Gauge(
            "attnserve_layer_bytes", "Bytes of a layer's parameters.", ("layer",), registry=registry
        )

        # Callers, by the names that the operator gave them
        self.usage = UsageByCaller()
        self._callers = scraped.Callers(self.usage)
        self.watch(self._callers)

        # The process
        Info(
            "attnserve_build",
            "What is running; native_kernel is the instructions that it computes by, empty where there is none.",
            registry=registry,
        ).info({"version": version, "torch": torch_version, "device": device, "native_kernel": native_kernel})
        ProcessCollector(registry=registry)

    def finished(self, operation: Operation, code: str, duration_s: float, requests: int) -> None:
        """A request was answered, with this gRPC status code, so many seconds after it came; or several that came
        together.
        """
        self._requests[operation, code](requests)
        self._durations[operation].observe(duration_s, requests)

    def stream_failed(self, code: str) -> None:
        """A stream was refused, or ended with an error, with this gRPC status code. It may have lasted for days, and is
        no part of the durations.
        """
        self._requests["attend_stream", code](1)

    def phases(self, seconds: tuple[float, float, float, float, float], requests: int = 1) -> None:
        """A request was computed, and its phases took so many seconds; or several, the phases of each taking that."""
        self._observe_phases(seconds, requests)

    def exemplify(self, labels: dict[str, str], operation: Operation, duration_s: float, phases: Phases | None) -> None:
        """Makes a request's times the exemplars of their buckets, with the labels of its trace. Counts nothing."""
        self._durations[operation].exemplify(duration_s, labels)
        if phases is not None:
            for phase, series in self._phases.items():
                series.exemplify(getattr(phases, phase), labels)

    def batch(
        self, requests: int, flops: float, query_tokens: int, padding_ratio: float, kernel_calls: Mapping[str, int]
    ) -> None:
        """A batch was computed. `padding_ratio` is the share of padding among its rows, from 0 to 1."""
        self._batch_sizes.observe(requests)
        self._batch_flops.observe(flops)
        self._padding.observe(padding_ratio)
        self._flops.add(flops)
        self._tokens.add(query_tokens)
        self.kernels(kernel_calls)

    def kernels(self, calls: Mapping[str, int]) -> None:
        """Kernels were called: how often, by name."""
        for kernel, count in calls.items():
            self._kernel_calls[kernel](count)

    def layer_batch(self, layer: str, requests: int, tokens: int, flops: float) -> None:
        """A layer computed a batch."""
        self._layer_requests[layer](requests)
        self._layer_tokens[layer](tokens)
        self._layer_flops[layer](flops)

    def layers(self, sizes: Mapping[str, int]) -> None:
        """These layers are loaded now, of so many bytes each."""
        self._layer_bytes.clear()
        for layer, size in sizes.items():
            self._layer_bytes.labels(layer).set(size)

    def rejected(self, reason: str) -> None:
        """A request was not admitted, for one of `REJECTIONS`."""
        self._rejected[reason]()

    def cancelled(self, reason: str) -> None:
        """A request left the queue without running, for one of `CANCELLATIONS`."""
        self._cancelled[reason]()

    def watch(self, *collectors: Collector) -> None:
        """Exports what these collectors of `scraped` read. What there is about callers has methods of its own."""
        for collector in collectors:
            self.registry.register(collector)

    def watch_callers(self, in_flight_bytes: Callable[[], Mapping[Hashable, int]]) -> None:
        """Says where it is read what every caller has in flight: by its name, or by anything else if it has none."""
        self._callers.in_flight_bytes = in_flight_bytes

    def watch_caches(self, store: CacheStore, expire: Callable[[], object]) -> None:
        """Exports all that there is about caches. It is read from their store when it is scraped, so that appends and
        forks cost nothing more.

        `expire` is called first, to evict caches whose lease has ended by then.
        """

        def bytes_of_owners() -> Mapping[Hashable, int]:
            expire()
            return store.bytes_of_owners()

        self.watch(scraped.Caches(store, expire))
        self._callers.cache_bytes = bytes_of_owners


class _ByLabel(dict[str, Callable[[float], None]]):
    """A counter with one label: the `add` of each of its values, looked up when the value first comes."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry, label: str) -> None:
        super().__init__()
        self._counter = Counter(name, documentation, registry, label)

    def __missing__(self, label: str) -> Callable[[float], None]:
        self[label] = count = self._counter.total(label).add
        return count
