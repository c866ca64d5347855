"""The settings of a client: one value, checked when it is made, shared by both kinds of client.

In: the constructor arguments of a client. Out: `Settings`, with the channel options that follow from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Final, Literal, TypeAlias, get_args

from attnserve._errors import InvalidRequestError, PermissionDeniedError
from attnserve._numbers import real, shown, whole
from attnserve._settings.credentials import TLS, Token, is_local
from attnserve._settings.retry import RetryPolicy
from attnserve._settings.targets import Address, Target, is_looked_up, target_of

Transport: TypeAlias = Literal["stream", "unary"]

Timeout: TypeAlias = float | EllipsisType | None
"""How long a call may take, in seconds; None for no limit, ``...`` for as long as the client says."""

DEFAULT_ADDRESS: Final = "127.0.0.1:8001"

SERVICE: Final = "/attnserve.v1.AttentionService/"

ANYHOW: Final = ("grpc.inhibit_health_checking", 1)
"""The channel option by which a call reaches a server even while that starts or drains. Without it, gRPC first asks the
server whether it takes calls.
"""

_NO_PROXY: Final = {"grpc.enable_http_proxy": 0, "grpc.address_http_proxy_enabled_addresses": ""}
"""The channel options by which no proxy is used: neither that of environment variables such as ``http_proxy``, nor the
one for some addresses alone (``GRPC_ADDRESS_HTTP_PROXY``).
"""

_CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Otherwise all clients of a process with the same options would share one connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment is for the world outside. It would get what is sent to this machine, tokens included.
    *_NO_PROXY.items(),
    # If a name resolves to several servers (a headless Service), streams are spread over them.
    # A server whose health check says that it takes no more calls gets none; one without a health check gets calls.
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
    # All retries may be over within 0.35 s. A pause between two attempts to connect is shorter, with gRPC's jitter.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # which is also how long connecting may take
    ("grpc.max_reconnect_backoff_ms", 250),
    # A connection that has gone silent is noticed within 30 s, and its calls are sent again, well before they time out.
    # The service tolerates a ping every 10 s. Another server may not; gRPC then pings half as often.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The same if bytes still arrive but are garbage, without the answer to a ping among them.
    ("grpc.http2.ping_timeout_ms", 10_000),
)

_ONLY: Final = ("grpc.min_reconnect_backoff_ms", 5_000)
"""How long connecting to the only server may take: one that is busy answers late, and there is no other to ask."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked arguments of a client. ValueError names the argument that is wrong."""

    address: Address
    """``host:port``, ``unix:/path``, ``dns:///name:port``, several addresses, or a function that returns them."""
    transport: Transport
    """How calls travel: many on a stream, or as unary calls."""
    timeout: float | None
    """How long calls wait for their answers unless they say otherwise, in seconds; None for no limit."""
    retries: int
    """How often a call is sent again when the server or its stream goes away."""
    streams: int
    """How many streams the calls are spread over."""
    options: Sequence[tuple[str, Any]]
    """gRPC channel options, which override the SDK's own."""
    tls: TLS | None
    """How the server proves its identity, and the client too if the server asks; None for an unencrypted connection."""
    token: Token | None
    """The bearer token of every call."""
    refresh: float
    """The interval between look-ups of the servers, in seconds."""
    target: Target = field(init=False)
    """What the address names."""
    policy: RetryPolicy = field(init=False)
    """When a call is sent again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", target_of(self.address))
        if not isinstance(self.transport, str) or self.transport not in get_args(Transport):
            raise ValueError(f"transport: expected 'stream' or 'unary', found {shown(self.transport)}")
        object.__setattr__(self, "timeout", _timeout(self.timeout))
        options = tuple(self.options) if isinstance(self.options, Iterable) else (self.options,)
        if not all(isinstance(each, tuple | list) and len(each) == 2 and isinstance(each[0], str) for each in options):
            raise ValueError(f"options: expected pairs of a name and a value, found {shown(self.options)}")
        object.__setattr__(self, "options", options)
        _check_count("retries", self.retries, 0)
        object.__setattr__(self, "policy", RetryPolicy(self.retries))
        _check_count("streams", self.streams, 1)
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise ValueError(f"tls: expected attnserve.TLS(...) or None, found {type(self.tls).__name__}")
        if not 0 < _seconds(self.refresh) < math.inf:
            raise ValueError(f"refresh: expected seconds, more than 0, found {shown(self.refresh)}")
        for address in self.target.fixed or ([self.address] if isinstance(self.address, str) else []):
            self.check_secrecy(address)

    def check_secrecy(self, address: str) -> None:
        """ValueError if the token would be sent to an address unencrypted."""
        if self.token is None or self.tls is not None or self.token.plaintext:
            return
        options = dict(self.options)
        may_use_proxy = any(options.get(name, none) != none for name, none in _NO_PROXY.items())
        if not is_local(address) or (may_use_proxy and not address.startswith("unix")):
            raise ValueError(
                f"token: {address} would get it unencrypted; expected tls=TLS(...), or Token(..., plaintext=True)"
            )

    def check_learned(self, address: str) -> None:
        """PermissionDeniedError if the token would be sent unencrypted to an address that was looked up, or that a
        server has told.
        """
        try:
            self.check_secrecy(address)
        except ValueError as error:
            raise PermissionDeniedError(str(error)) from None

    def channel_options(self, address: str) -> list[tuple[str, Any]]:
        """The options of a channel to an address: the SDK's own, overridden by the caller's."""
        own = dict(_CHANNEL_OPTIONS)
        if len(self.target.fixed) == 1:
            own.update((_ONLY,))
        if self.tls is not None:
            # A server that was looked up must prove that it has the looked-up name, not that address.
            name = self.tls.server_name or (self.target.authority if is_looked_up(address) else None)
            if name is not None:
                own["grpc.ssl_target_name_override"] = name
        return list({**own, **dict(self.options)}.items())


def _check_count(name: str, value: Any, least: int) -> None:
    """ValueError if the argument of that name is not an integer of any type, at least `least`."""
    try:
        enough = whole(value) >= least
    except TypeError:
        enough = False
    if not enough:
        raise ValueError(f"{name}: expected an integer of {least} or more, found {shown(value)}")


MAX_TIMEOUT: Final = 1e9
"""Seconds, some thirty years."""

GRACE_SECONDS: Final = 2.0
"""How many seconds after its deadline a call may still end by itself: the deadline must be noticed, or a result made of
a late reply. After that, whoever waits for the call gives up: what should have ended it no longer runs.
"""
TELLING_SECONDS: Final = 30.0
"""The timeout of requests that nobody waits for, such as to give up a cache."""

LAST_WORDS_SECONDS: Final = 1.0
"""How long closing a client waits for the requests that nobody waits for."""


def checked_timeout(timeout: Any, default: float | None) -> float | None:
    """The timeout of a call whose client has the timeout `default`. InvalidRequestError if it is none."""
    if timeout is ...:
        return default
    try:
        return _timeout(timeout)
    except ValueError as error:
        raise InvalidRequestError(str(error), field="timeout") from None


def _timeout(timeout: Any) -> float | None:
    """The timeout, if it is None or a number of seconds, 0 or more; else raises ValueError. One that is longer than
    gRPC can express becomes None.
    """
    if timeout is None:
        return None
    seconds = _seconds(timeout)
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"timeout: expected a finite number of seconds, 0 or more, or None, found {shown(timeout)}")
    return seconds if seconds <= MAX_TIMEOUT else None


def _seconds(value: Any) -> float:
    """A number of seconds of any type; NaN for what is none."""
    try:
        return real(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
