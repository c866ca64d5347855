"""The server's settings, in one frozen dataclass.

In: values (`command_line` reads them from flags and the environment). Out: a validated `Config` that knows where each
value came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.requests import durations
from attnserve_server.settings import kinds, units
from attnserve_server.start_errors import ConfigError

LEAST_PAGE_BYTES: Final = 4096
"""The least size of a page of caches, and so of their pool."""
MOST_CONNECTION_AGE: Final = 30 * 24 * 3600
"""Seconds. gRPC counts milliseconds in a signed 32-bit number."""

Source: TypeAlias = Literal["flag", "environment", "default", "code"]
"""Where a value came from; `code` means that the `Config` was built directly."""


class Effective(NamedTuple):
    """A setting, its value as text (None if that is not for callers), and where it came from."""

    name: str
    value: str | None
    source: Source


def _setting(kind: kinds.Kind, default: object, help: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of the server. Sizes are in bytes, durations in seconds. Raises ConfigError for invalid values."""

    listen: str = _setting(
        kinds.TCP_OR_UNIX,
        "127.0.0.1:8001",
        "Where gRPC is served: host:port or unix:/path. Port 0 is a free one. If a name has several addresses, all "
        "that this machine has are served, and the port must be free on each. Beyond this machine only with "
        "`tls_certificate`, `callers` or `insecure`.",
    )
    http_listen: str = _setting(
        kinds.TCP,
        "127.0.0.1:8002",
        "Where /metrics, /healthz and /readyz are served: host:port, another than `listen`. Port 0 is a free one. "
        "Beyond this machine only with `http_tls`, `callers` or `insecure`.",
    )
    tls_certificate: str = _setting(
        kinds.TEXT,
        "",
        "The server's certificate chain, a PEM file: with it, gRPC is served over TLS. Read again when it changes. "
        "Needs `tls_key`.",
    )
    tls_key: str = _setting(kinds.TEXT, "", "The private key of that certificate, a PEM file. Needs `tls_certificate`.")
    tls_client_ca: str = _setting(
        kinds.TEXT,
        "",
        "The authorities that must have issued callers' certificates (mutual TLS), a PEM file. Needs "
        "`tls_certificate`. Default: callers need none.",
    )
    callers: str = _setting(
        kinds.TEXT,
        "",
        "The file that says who may do what (docs/security.md): hashes of tokens, names of certificates, roles; read "
        "again when it changes. Default: anybody who can reach the server may use it.",
    )
    insecure: bool = _setting(
        kinds.TRUTH,
        False,
        "Whether gRPC may be served beyond this machine with neither `tls_certificate` nor `callers`, and the metrics "
        "with neither `http_tls` nor `callers`: to anybody.",
    )
    http_tls: bool = _setting(
        kinds.TRUTH,
        False,
        "Whether the HTTP port is served over TLS too, with the same certificate and without mutual TLS. Needs "
        "`tls_certificate`.",
    )
    device: str = _setting(
        kinds.DEVICE,
        "auto",
        "What to compute on: auto, cpu, cuda or cuda:N. auto is CUDA where there is one (of compute capability 8.0 or "
        "later), else the CPU.",
    )
    threads: int = _setting(
        kinds.count(0, 1024),
        0,
        "Computing threads, on a CPU. 0 is one for each processor that the process may use, by its affinity and its "
        "control groups' quota.",
    )
    max_message_bytes: int = _setting(
        # gRPC takes this bound as a signed 32-bit number.
        kinds.size(1024, 2**31 - 1),
        256 * 2**20,
        "The longest message received, and the longest reply: at most `max_bytes`, and replies that are larger than "
        "their requests at most half of that. One message of a stream may carry several requests.",
    )
    # The SDK puts at most 1024 calls into a message.
    max_message_calls: int = _setting(kinds.count(1024), 4096, "The most calls in one message of a stream.")
    max_requests: int = _setting(
        kinds.count(), 4096, "The most requests admitted and not yet answered. Any more are refused at once."
    )
    max_bytes: int = _setting(
        kinds.size(),
        2 * 2**30,
        "The most bytes of requests that have arrived, and of their replies, which count twice where they are larger "
        "than the requests: at least `max_message_bytes`; for less than the default of that, set both. Memory in "
        "flight is some three times as much where single requests are a tenth of it or more.",
    )
    # 2e13 is 20 s of a large CPU at 1e12 a second and 50 ms of a data-centre GPU. It is also the largest request: less
    # would refuse some that fit into a message (65536 tokens, 8 heads of 64, half precision: 192 MiB and 9e12). Short
    # sequences reach max_bytes long before (256 requests of 1024 tokens, 8 heads of 64, are 2 GiB and 5e11), so this
    # bounds long ones.
    max_flops: int = _setting(
        kinds.flops(),
        2 * 10**13,
        "The most floating-point operations admitted and not yet computed, and the most of one request. Without a "
        "`max_queue_time`, this divided by the device's speed is the longest wait. Here and in batches, requests that "
        "take longer than their operations (tiny ones, narrow heads, slow kernels) count for the time that they take.",
    )
    max_request_flops: int = _setting(
        kinds.flops(0),
        0,
        "The most floating-point operations of one request: at most `max_flops`. Those of slow kernels count for more: "
        "8 times for softcaps, returned scores, learned scores, and ALiBi beside a mask or a bias, 80 times for "
        "additive scores; those of narrow heads, less than 32 wide, may count for more, too. 0: 5e11 for each thread "
        "on a CPU, some 10 s, and as many as `max_flops` on CUDA.",
    )
    max_rank: int = _setting(kinds.count(2, 4), 4, "The most axes of a tensor; nothing has more than 4.")
    max_elements: int = _setting(kinds.count(), 2**31 - 1, "The most elements of a tensor.")
    max_sequences: int = _setting(
        kinds.count(1, 2**31 - 1),
        2**14,
        "The most sequences of a request: each may have a length, an offset or a cache of its own, and reading one "
        "takes microseconds, during which nobody else is served.",
    )
    max_caller_streams: int = _setting(
        kinds.count(),
        1024,
        "The most streams that one caller may have open. Callers without a name are counted by connection, and all "
        "those on a unix socket together.",
    )
    # Long enough for a network that fails over, or a process that is moved.
    max_unread_time: float = _setting(
        kinds.DURATION,
        30.0,
        "How long gRPC may take to send a reply, plus a second for each MiB of it or, if that is longer, for each 8 "
        "MiB of all that is being sent on its connection. Then its caller does not read: its stream ends, or the "
        "connection is closed, and what is held for it is let go. A unary call's message may take as long to arrive as "
        "the largest reply may take to be sent. 0: for ever.",
    )
    # Long enough for a caller's bursts, and short enough for callers that wait for replies.
    max_queue_time: float = _setting(
        kinds.DURATION,
        1.0,
        "How long the queue may take to compute, at the measured rate; what comes beyond is refused at once. While "
        "requests are being refused, 16 requests or two batches are the bound, whichever take longer. An equal part of "
        "16 is each caller's even beyond that. 0 is no bound.",
    )
    max_batch_flops: int = _setting(
        kinds.flops(0),
        0,
        "The most floating-point operations of one batch: at most `max_flops`. A single request may have more, and "
        "then runs alone. 0: 4e9, and 1e12 on CUDA for requests of a layer, whose weights are read once for all of "
        "them. On CUDA, all requests of a batch have 16 MiB at most.",
    )
    max_batch_requests: int = _setting(kinds.count(), 64, "The most requests in one batch.")
    max_wait: float = _setting(
        kinds.DURATION,
        0.0,
        "How long an idle device waits for more requests before it runs a batch, rounded up to whole milliseconds. 0 "
        "is nearly always best: batches form while the device is busy.",
    )
    inline_flops: int = _setting(
        kinds.flops(0),
        10**7,
        "On a CPU, batches of up to this many floating-point operations run on the event loop itself: handing them to "
        "a thread would cost more than they do. Messages of such requests are answered as they are read, unless this "
        "is 0.",
    )
    native_kernel: str = _setting(
        kinds.words("auto", "off", "avx512", "avx2"),
        "auto",
        "The instructions that the native kernel uses on a CPU, if it was built: avx512, avx2, auto, which is the best "
        "that the processor has, or off, where only torch's kernels compute.",
    )
    priority_aging: float = _setting(
        kinds.DURATION,
        0.1,
        "One level of priority is worth this much of the device's time: a request that has waited for so much more "
        "work goes before one of the next level.",
    )
    stuck_after: float = _setting(
        kinds.DURATION,
        60.0,
        "How long a batch may take, beyond 10 s for each 1e9 of its operations, before the device counts as stuck and "
        "the server ends, to be restarted. 0: for ever.",
    )
    drain_delay: float = _setting(
        kinds.DURATION,
        0.0,
        "How long, when told to stop, the server still accepts requests but reports that it is not ready, so that "
        "load balancers notice.",
    )
    drain_grace: float = _setting(
        kinds.DURATION, 30.0, "How long, after that, requests in flight may take to finish before they are cut off."
    )
    max_connection_age: float = _setting(
        kinds.duration(MOST_CONNECTION_AGE),
        0.0,
        "After how long a connection's caller is asked to reconnect, so that it finds new servers; its calls go on. "
        "0: never; a few minutes are right for several replicas.",
    )
    advertise_address: str = _setting(
        kinds.ADVERTISED,
        "",
        "Where callers reach this very server, past all load balancers, as host:port. It is given with each cache, "
        "which is on no other server.",
    )
    cache_bytes: int = _setting(
        kinds.size(0),
        0,
        "The size of the pool of resident key/value caches, allocated at the start: one page (`cache_page_bytes`) at "
        f"least, {units.format_size(LEAST_PAGE_BYTES)} if that is 0. 0: 512 MiB on a CPU, or a quarter of "
        "the memory or half of what is left of it, if less, and half the free memory on CUDA.",
    )
    cache_page_bytes: int = _setting(
        kinds.size(LEAST_PAGE_BYTES, 2**30, CACHE_LINE, or_zero=True),
        0,
        "The size of that pool's pages: the least that a layer of a cache takes. Larger pages make long caches faster. "
        "0: 512 KiB on a CPU, 2 MiB on CUDA, and the whole pool if that is less.",
    )
    cache_ttl: float = _setting(
        kinds.duration(durations.MAX_SECONDS),
        0.0,
        "How long a cache lives after its last use, if its caller does not say. 0: until it is deleted, which a "
        "caller that has died will not do.",
    )
    max_caches: int = _setting(kinds.count(), 10_000, "The most open caches.")
    max_cache_layers: int = _setting(
        kinds.count(), 256, "The most layers of a cache: each takes some 125 bytes outside the pool, even when empty."
    )
    max_layers: int = _setting(kinds.count(), 1024, "The most loaded layers.")
    layers: str = _setting(
        kinds.TEXT,
        "",
        "A file of layer definitions (docs/layers.md), whose layers are loaded before the server is ready.",
    )
    model_directory: str = _setting(
        kinds.TEXT,
        "",
        "The directory of definitions and weights: nothing outside it is loaded, but for the file of `layers`. "
        "Default: that file's; without either, no layers can be loaded.",
    )
    layer_administration: bool = _setting(
        kinds.TRUTH,
        None,
        "Whether callers can load and unload layers while the server runs. Default: true if callers are identified "
        "(by `callers` or `tls_client_ca`) or all are on this machine (by `listen`), else false.",
    )
    reflection: bool = _setting(kinds.TRUTH, True, "Whether gRPC reflection describes the service to tools.")
    tracing_endpoint: str = _setting(
        kinds.ENDPOINT,
        "",
        "Where spans are sent, over OTLP with gRPC: http://host:port or https://host:port. Default: where "
        "OpenTelemetry's own variables say (OTEL_EXPORTER_OTLP_ENDPOINT), else tracing is off.",
    )
    tracing_sample: float = _setting(
        kinds.RATIO,
        0.01,
        "The share of requests that are traced, from 0 to 1. A request with a trace of its caller's is traced if that "
        "one is recorded.",
    )
    log_level: str = _setting(
        kinds.words("debug", "info", "warning", "error"),
        "info",
        "The lowest severity of log lines that are written: debug, info, warning or error.",
    )
    log_format: str = _setting(
        kinds.words("text", "json"),
        "text",
        "The format of log lines, and of what is said at the start: for people (text) or for machines (json).",
    )
    _given: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for item in settings():
            kind, value = kind_of(item), getattr(self, item.name)
            if value is None and item.default is None:  # what it depends on comes before it, and is valid
                object.__setattr__(self, item.name, self._default(item))
            elif not kind.valid(value):
                raise ConfigError(item.name, kind.expected, value)
        for low, high in (
            ("max_message_bytes", "max_bytes"),
            ("max_batch_flops", "max_flops"),
            ("max_request_flops", "max_flops"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(low, f"at most {high} ({self.show(high)})", self.show(low))
        if self.cache_bytes and self.cache_bytes < max(self.cache_page_bytes, LEAST_PAGE_BYTES):
            size = units.format_size(LEAST_PAGE_BYTES)
            least = f"cache_page_bytes ({self.show('cache_page_bytes')})" if self.cache_page_bytes else size
            raise ConfigError("cache_bytes", f"0, or at least {least}", self.show("cache_bytes"))
        for name, needed in (
            ("tls_certificate", "tls_key"),
            ("tls_key", "tls_certificate"),
            ("tls_client_ca", "tls_certificate"),
            ("http_tls", "tls_certificate"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                raise ConfigError(needed, f"a file, because {name} is given", "")
        # Otherwise the port would be said to be in use, and nobody found to use it.
        if self.listen == self.http_listen and units.parse_address(self.listen).port:
            raise ConfigError("http_listen", f"another port than that of listen ({self.listen})", self.http_listen)
        if not (self.is_local or self.tls_certificate or self.callers or self.insecure):
            raise ConfigError(
                "listen",
                "loopback or a unix socket, because none of tls_certificate, callers and insecure is given",
                self.listen,
            )
        if not (self.is_http_local or self.http_tls or self.callers or self.insecure):
            raise ConfigError(
                "http_listen",
                "loopback, because none of http_tls, callers and insecure is given",
                self.http_listen,
            )

    @property
    def is_local(self) -> bool:
        """Whether gRPC is served only to this machine."""
        return self.listen.startswith("unix:") or units.parse_address(self.listen).is_loopback

    @property
    def identifies_callers(self) -> bool:
        """Whether callers are known by tokens or certificates."""
        return bool(self.callers or self.tls_client_ca)

    @property
    def is_http_local(self) -> bool:
        """Whether metrics and health are served over HTTP only to this machine."""
        return units.parse_address(self.http_listen).is_loopback

    def sources(self) -> dict[str, Source]:
        """Where each setting's value came from."""
        return {item.name: self._source(item) for item in settings()}

    def _source(self, item: Field[Any]) -> Source:
        return self._given.get(item.name, "default" if getattr(self, item.name) == self._default(item) else "code")

    def _default(self, item: Field[Any]) -> object:
        """A setting's default. That of `layer_administration` depends on others: strangers are to change no layers."""
        return self.identifies_callers or self.is_local if item.default is None else item.default

    def show(self, name: str) -> str:
        """A setting's value as text: `256MiB`, `100ms`."""
        return next(kind_of(item).show(getattr(self, name)) for item in settings() if item.name == name)

    def effective(self) -> Iterator[Effective]:
        """Every setting, in the form that any caller may see."""
        for item in settings():
            value = None if kind_of(item).private and getattr(self, item.name) else self.show(item.name)
            yield Effective(item.name, value, self._source(item))


def settings() -> Iterator[Field[Any]]:
    """The fields of `Config` that are settings, in their order."""
    return (item for item in fields(Config) if "kind" in item.metadata)


def shown_default(item: Field[Any]) -> str:
    """A setting's default as text: nothing if it depends on others, which is in what is said of the setting."""
    return "" if item.default is None else kind_of(item).show(item.default)


def kind_of(item: Field[Any]) -> kinds.Kind:
    """Which values a setting can have, and how they are written."""
    kind: kinds.Kind = item.metadata["kind"]
    return kind
