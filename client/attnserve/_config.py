"""How a client is set up: one value, checked when it is made, that both clients share.

In: the constructor arguments of a client. Out: `Settings`, with the channel options that follow from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import grpc

from attnserve._credentials import TLS, Token, is_local
from attnserve._errors import InvalidRequestError

Transport: TypeAlias = Literal["stream", "unary"]

DEFAULT_ADDRESS: Final = "127.0.0.1:8001"

SERVICE: Final = "/attnserve.v1.AttentionService/"

_CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Otherwise all clients of a process with the same options would share one connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A name that resolves to several servers (a headless Service) has its streams spread over them.
    # A server that says that it takes no more calls gets none; one that says nothing does.
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": "acceptance"},
            }
        ),
    ),
    # gRPC's own retries buffer messages, and give up on those above 256 KiB. Ours need no buffer.
    ("grpc.enable_retries", 0),
    # The retries of a call take under a second unless told otherwise; reconnecting must keep up with them.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A connection that has gone silent is noticed within 30 s, and its calls are sent again, well before they time out.
    # The service bears a ping every 10 s. Another server may not; gRPC then pings half as often.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The same where bytes do come, and make no sense: the answer to a ping is not among them.
    ("grpc.http2.ping_timeout_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was told, checked. ValueError names the argument that is wrong."""

    address: str
    """``host:port``, ``unix:/path``, ``dns:///name:port``, or ``ipv4:`` and several of the first."""
    transport: Transport
    """How calls travel: many on a stream, or each by itself."""
    timeout: float | None
    """How long a call waits unless it says otherwise, in seconds; None for no limit."""
    retries: int
    """How often a call is sent again when the server or its stream goes away."""
    streams: int
    """How many streams the calls are spread over."""
    options: Sequence[tuple[str, Any]]
    """gRPC channel options, which win over the SDK's own."""
    tls: TLS | None = None
    """How the server proves who it is, and the client too where the server asks; None for a connection in the clear."""
    token: Token | None = None
    """The bearer token of every call."""

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise ValueError(f"address: expected host:port, unix:/path or dns:///name:port, found {self.address!r}")
        if self.transport not in get_args(Transport):
            raise ValueError(f"transport: expected 'stream' or 'unary', found {self.transport!r}")
        checked_timeout(self.timeout)
        if self.retries < 0:
            raise ValueError(f"retries: expected 0 or more, found {self.retries!r}")
        if self.streams < 1:
            raise ValueError(f"streams: expected 1 or more, found {self.streams!r}")
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise ValueError(f"tls: expected attnserve.TLS(...) or None, found {type(self.tls).__name__}")
        if self.token is not None and self.tls is None and not self.token.plaintext and not is_local(self.address):
            raise ValueError(
                f"token: {self.address} would get it unencrypted; expected tls=TLS(...), or Token(..., plaintext=True)"
            )

    @property
    def channel_options(self) -> list[tuple[str, Any]]:
        """The options of the channel: the SDK's own, overridden by the caller's."""
        own = dict(_CHANNEL_OPTIONS)
        if self.tls is not None and self.tls.server_name is not None:
            own["grpc.ssl_target_name_override"] = self.tls.server_name
        return list({**own, **dict(self.options)}.items())

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials of the channel; None for one in the clear. ValueError if a file cannot be read."""
        return None if self.tls is None else self.tls.channel_credentials()


MAX_TIMEOUT: Final = 1e9
"""Seconds, some thirty years."""


def checked_timeout(timeout: Any) -> float | None:
    """The timeout, if it is None or a number of seconds, 0 or more; else raises InvalidRequestError.

    What is longer than gRPC can say is no timeout.
    """
    if timeout is None:
        return None
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise InvalidRequestError(f"timeout: expected seconds, 0 or more, or None, found {timeout!r}", field="timeout")
    return seconds if seconds <= MAX_TIMEOUT else None
