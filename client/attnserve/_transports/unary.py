"""A unary call through all its attempts, except for its I/O: where the next attempt goes and how long it may take, and
what follows a failed one.

In: an encoded call or a plain RPC, and a function that gives the connection for an attempt. Out: what to send where, or
the error with which the call ends. Both clients use it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final, Generic, Self, TypeVar

import grpc

from attnserve._errors import AttnServeError, DeadlineExceededError, no_reply, status_from_rpc_error
from attnserve._fields import Buffer
from attnserve._memory import joined
from attnserve._requests.call import EncodedCall
from attnserve._rpc import Rpc
from attnserve._settings.retry import NO_RETRIES, Again, RetryPolicy
from attnserve._transports.connection import BaseConnection, Route, to_anyhow

C = TypeVar("C", bound=BaseConnection[Any])
F = TypeVar("F")


class UnaryCall(Generic[F, C]):
    """One call of a method, with the `future` for its outcome. Each attempt chooses its server anew."""

    def __init__(
        self,
        future: F,
        path: str,
        pieces: Sequence[Buffer],
        timeout: float | None,
        policy: RetryPolicy,
        route: Route[C],
        *,
        again: Again | None = None,
        size: int | None = None,
        given: float | None = None,
        pinned: bool,
    ) -> None:
        """`route` gives the connection for an attempt, always to one server if `pinned`. With `again`, this is a single
        attempt: the caller decides on retries, and `again` says what followed the attempt before. `size` is the length
        in bytes of an operation's request; None for a plain RPC, which is sent even to a full server. `given` is the
        timeout that errors name, if `timeout` is only what is left of it.
        """
        self.future: Final = future
        self.path: Final = path
        self._pieces: Final = pieces
        self._given: Final = timeout if given is None else given
        self._deadline: Final = inf if timeout is None else time.monotonic() + timeout
        self._policy: Final = policy if again is None else replace(policy, retries=0)
        self.pause: Final = 0.0 if again is None else again.pause
        """After how many seconds to make the first attempt."""
        self._route: Final = route
        self._size: Final = size
        self._pinned: Final = pinned
        self._attempts = 0
        self._resent = False
        """Whether an earlier attempt may have run: no server has said that it did not."""
        self._refusal: AttnServeError | None = None if again is None else again.refusal
        """The error that refused the last attempt, if a server had no room."""
        self._avoid: str | None = None
        """The address of the server at which the last attempt failed."""
        self._began = 0.0
        """When the last attempt began."""

    @classmethod
    def of(cls, future: F, call: EncodedCall[Any], policy: RetryPolicy, route: Route[C], *, pinned: bool) -> Self:
        """A call of an operation."""
        path, pieces = call.operation.path, call.pieces
        return cls(future, path, pieces, call.timeout, policy, route, size=call.size, given=call.given, pinned=pinned)

    @classmethod
    def of_rpc(
        cls,
        future: F,
        rpc: Rpc[Any, Any],
        timeout: float | None,
        policy: RetryPolicy,
        route: Route[C],
        again: Again | None,
        given: float | None,
        *,
        pinned: bool,
    ) -> Self:
        """A call of a plain RPC."""
        policy = policy if rpc.repeatable else NO_RETRIES
        route = to_anyhow(route) if rpc.anyhow else route
        return cls(future, rpc.path, rpc.pieces, timeout, policy, route, again=again, given=given, pinned=pinned)

    @property
    def message(self) -> bytes:
        """The request, joined anew for each attempt, since most calls need only one."""
        return joined(self._pieces)

    def connect(self) -> tuple[C, float | None]:
        """The connection for the next attempt, and how many seconds that may take. Raises an AttnServeError if there is
        no server, if no time is left, or if the server had no room and there are too many retries.
        """
        connection = self._route(self.left(), self._avoid)
        self._began = time.monotonic()
        if (
            self._refusal is not None
            and self._may_be_refused(connection)
            and not self._policy.retried.take(self._began)
        ):
            raise self._refusal
        left = self.left()
        if left is not None and left <= 0:
            raise no_reply(self._given, connection.replica.address)
        return connection, left

    def _may_be_refused(self, connection: C) -> bool:
        """Whether the server of the next attempt is the one that refused the last, or has refused others."""
        replica = connection.replica
        return self._avoid in (None, replica.address) or replica.room.until > self._began

    def failed(self, connection: C, error: grpc.RpcError) -> float:
        """How many seconds to wait after an attempt that has failed. Raises an AttnServeError if it was the last."""
        now = time.monotonic()
        self._attempts += 1
        status = status_from_rpc_error(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            connection.replica.failed(now)
        elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not status.details:  # gRPC's, not the server's
            connection.replica.was_silent(now, self._began)
        elsewhere = not self._pinned and connection.others.answer()
        verdict = self._policy.after(
            status, self._attempts, now, self._deadline, resent=self._resent, elsewhere=elsewhere
        )
        refusal = verdict.refusal if isinstance(verdict, Again) else verdict
        connection.replica.room.refused(now, refusal, self._size)
        if isinstance(verdict, DeadlineExceededError) and not status.details and self._given is not None:
            verdict = no_reply(self._given, connection.replica.address)  # gRPC's own error says neither of these
            verdict.resent = self._resent
        self._resent = self._resent or not status.details
        if isinstance(verdict, AttnServeError):
            raise verdict from None  # it says all that gRPC's own error does
        self._refusal = verdict.refusal
        self._avoid = connection.replica.address
        return verdict.pause

    def held_back(self, connection: C) -> float | None:
        """How many seconds to wait instead of sending the first attempt; None if it may be sent. It may not if the
        server has said that it has no room, and the budget for calls that are sent all the same is used up: it then
        counts as failed. Raises an OverloadedError if there is to be no other attempt.
        """
        if self._size is None or self._attempts:
            return None
        now = time.monotonic()
        refusal = connection.replica.room.refusal(now, self._size)
        if refusal is None or self._policy.begun.take(now):
            return None
        self._attempts += 1
        pause = self._policy.after_overload(refusal, self._attempts, now, self._deadline)
        if pause is None:
            raise refusal
        self._refusal, self._avoid = refusal, connection.replica.address
        return pause

    def answered(self, connection: C) -> None:
        """Notes that an attempt has been answered. On a connection that is not `for_work`, this changes nothing: a
        server answers there even while it takes no calls, so it says nothing of where, or how often, to send those.
        """
        if not connection.for_work:
            return
        now = time.monotonic()
        connection.replica.worked(now, self._began)
        self._policy.answered(1, now)

    def left(self) -> float | None:
        """The seconds until the deadline; None if there is none."""
        return None if self._deadline == inf else self._deadline - time.monotonic()
