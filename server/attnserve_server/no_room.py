"""Why there is no room for a request, as a value: what a full server tells thousands of callers in a second.

In: the bound that is reached, and when there should be room. Out: what is told, put into words and serialised once for
all that get it. `errors.Overloaded` is the error that carries one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from attnserve_server.statuses import error_info, status_of

OPEN_RETRY_DELAY: Final = 1.0
"""Seconds after which a caller may try again to open what it has too many of: when one of them ends is up to it."""


@dataclass(frozen=True, eq=False)
class NoRoom:
    """What is told to a request for which there is no room now."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.RESOURCE_EXHAUSTED

    bound: str
    """What there is none left of: a name for programs, in the ErrorInfo."""
    message: str
    reason: str
    """A constant that a program can compare."""
    retry_delay: float
    """Seconds after which there should be room."""
    rejection: str
    """Its label in the metrics of rejections."""
    more: Mapping[str, str] = field(default_factory=dict)
    """What else the ErrorInfo says."""

    @property
    def metadata(self) -> dict[str, str]:
        """All that the ErrorInfo says."""
        return {"bound": self.bound, **self.more}

    def details(self) -> list[Message]:
        """ErrorInfo, and RetryInfo with the delay."""
        delay = Duration()
        delay.FromNanoseconds(round(self.retry_delay * 1e9))
        return [error_info(self.reason, self.metadata), error_details_pb2.RetryInfo(retry_delay=delay)]

    def encoded_status(self) -> bytes:
        """Its google.rpc.Status, serialised once: encoding it takes time from the requests that are computed."""
        return self._encoded_status

    @cached_property
    def _encoded_status(self) -> bytes:
        encoded: bytes = status_of(self.code, self.message, self.details()).SerializeToString()
        return encoded


@lru_cache(256)
def full(bound: str, limit: float, retry_delay: float) -> NoRoom:
    """All that a bound allows is in use."""
    return NoRoom(
        bound,
        f"the server is full: its bound on {_worded(bound, limit)}; retry in {retry_delay:.3f} s",
        "OVERLOADED",
        retry_delay,
        bound,
    )


@lru_cache(256)
def share_exceeded(bound: str, limit: float, retry_delay: float) -> NoRoom:
    """A caller already has its share of what a bound allows; there may be room for others."""
    return NoRoom(
        bound,
        f"this caller has its share of the server, whose bound on {_worded(bound, limit)};"
        f" retry in {retry_delay:.3f} s",
        "SHARE_EXCEEDED",
        retry_delay,
        "share",
    )


def too_many_streams(limit: int, of_all: bool = False) -> NoRoom:
    """A caller has as many streams as one may have, or all callers as many as they may."""
    return _too_many("streams", "caller_streams", "TOO_MANY_STREAMS", limit, of_all)


def too_many_unsent(limit: int, of_all: bool = False) -> NoRoom:
    """As `too_many_streams`, for unary calls that wait for their messages."""
    return _too_many("calls whose messages have not come", "unsent_messages", "TOO_MANY_UNSENT", limit, of_all)


def too_many_unread(limit: int, of_all: bool = False) -> NoRoom:
    """As `too_many_streams`, for unary calls whose replies wait to be read."""
    return _too_many("calls whose replies have not been read", "unread_replies", "TOO_MANY_UNREAD", limit, of_all)


def _too_many(things: str, bound: str, reason: str, limit: int, of_all: bool) -> NoRoom:
    whose = "all callers together have" if of_all else "the caller has"
    message = f"{whose} as many {things} as {'they' if of_all else 'one'} may have: {limit}"
    return NoRoom(bound, message, reason, OPEN_RETRY_DELAY, bound, {"most": str(limit)})


def _worded(bound: str, limit: float) -> str:
    return f"{bound} is {limit:.9g}{' s' * (bound == 'queue_time')}"
