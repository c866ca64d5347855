"""Many calls on one stream: ids, what is in flight, what the next message holds, what happens when a stream breaks.

No I/O, no clock, no locks: the transports pass in messages, the time and the ends of streams, and get messages to send
and outcomes to deliver. All times are seconds of one monotonic clock.

    add(call) ──▶ ready ──next_message()──▶ sent ──resolve(replies)──▶ outcome
                    ▲                         │ broken(), a reply UNAVAILABLE, or no room
                    └──tick()── waiting ◀─────┘ (retries: see `_settings.retry`)

New calls wait, too, while the server is known to have no room for more: see `waiting.py`. Ready calls are sent by
priority and age, since a connection may take fewer than there are.
A broken stream is replaced by a new one. A reply UNAVAILABLE means that the server is going away: nothing more is sent
on that stream, the replies that it still owes are awaited, and further calls go onto a new stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import grpc
from google.rpc.status_pb2 import Status

from attnserve._errors import (
    AttnServeError,
    ClientClosedError,
    ProtocolError,
    error_from_status,
    is_of_message,
    no_reply,
    no_room,
)
from attnserve._fields import Buffer
from attnserve._requests.reply import Reply, Response
from attnserve._servers.replicas import Replica
from attnserve._settings import retry
from attnserve._transports.framing import cancellation, prefix
from attnserve._transports.in_flight import Call, Outcome
from attnserve._transports.line import Line, by_priority
from attnserve._transports.message_bounds import MessageBounds
from attnserve._transports.waiting import Waiting

if TYPE_CHECKING:
    from attnserve._transports.connection import Others

T = TypeVar("T")

MESSAGE_BYTES: Final = 1 << 20
"""Maximum size of a message, unless a single call is larger: beyond this, joining calls saves nothing more."""

MESSAGE_CALLS: Final = 1024
"""Maximum number of calls in a message, and of cancelled calls; servers state their own limit in `Limits`."""

LOOK_S: Final = 0.1
"""How often calls that are not sent are looked at, to see whether another server would answer them sooner, in seconds.
"""

_UNAVAILABLE: Final[int] = grpc.StatusCode.UNAVAILABLE.value[0]


class Multiplexer(Generic[T]):
    """The calls of one stream, and of its successors when it breaks."""

    def __init__(
        self, policy: retry.RetryPolicy, replica: Replica, others: Others, *, message_bytes: int = MESSAGE_BYTES
    ) -> None:
        """`replica` is told about the server's successes and failures; `others` are the other servers."""
        self._policy = policy
        self._replica = replica
        self._others = others
        self._look = 0.0
        """When to look next whether other servers would answer the unsent calls sooner."""
        self._calls: dict[int, Call[T]] = {}
        self._bounds = MessageBounds(self._calls, message_bytes)
        self._deadlines: Line[T] = Line(attrgetter("deadline"))
        self._ready: Line[T] = Line(by_priority)
        self._waiting: Waiting[T] = Waiting(policy, self._replica, self._calls)
        self._cancelled: list[int] = []
        self._last_id = 0
        self._last_stream = 0
        self._stream = 0
        self._opened = 0.0
        """When the current stream was opened."""
        self._leaving: list[Call[T]] = []

    def __len__(self) -> int:
        """How many calls have no outcome yet."""
        return len(self._calls)

    @property
    def holds(self) -> bool:
        """Whether calls wait here until the server has room."""
        return bool(self._waiting.held)

    @property
    def wakeup(self) -> float:
        """When `tick` is due; infinite if nothing is going to be."""
        look = self._look if self._is_behind and self._others.exist() else inf
        return min(self._deadlines.least, self._waiting.wakeup, look)

    @property
    def _is_behind(self) -> bool:
        """Whether calls are not sent, because the connection takes no more, or the server has no room."""
        return bool(self._ready or self._waiting.held)

    @property
    def wants_stream(self) -> bool:
        """Whether there is something to send and no stream to send it on."""
        return not self._stream and bool(self._ready)

    @property
    def wants_writer(self) -> bool:
        """Whether the writer has something to do: more to send, or a sending side to close."""
        return bool(self._ready or self._cancelled) or not self._stream

    def opened(self, now: float) -> int:
        """Notes that a stream was opened. Returns its number, which identifies it from now on."""
        self._last_stream += 1
        self._opened = now
        self._stream = self._last_stream
        return self._stream

    def unopened(self, stream: int, error: BaseException, now: float) -> list[Outcome[T]]:
        """Notes that a stream could not be opened after all, and why. The calls that were ready for it are sent again,
        as after a stream that broke: nothing else would open another.
        """
        return self.broken(stream, Status(code=_UNAVAILABLE, message=f"no stream could be opened: {error!r}"), now)

    def writes(self, stream: int) -> bool:
        """Whether more may be sent on a stream; if not, its sending side should be closed."""
        return stream == self._stream

    def add(self, call: Call[T], now: float) -> None:
        """Takes a call, which goes into the next message. But if the server has said that it has no room, the call
        waits for some; or fails with the next `tick`, if it cannot be answered in its time or is not to wait.
        """
        self._last_id += 1
        call.id = self._last_id
        if not self._is_behind:
            self._look = now + LOOK_S
        at_once = self._waiting.add(call, now)
        self._calls[call.id] = call
        if call.timeout is not None:
            self._deadlines.join(call)
        if at_once:
            self._ready.join(call)
        else:
            self._release(now)

    def _release(self, now: float) -> None:
        """Makes those calls ready for which the server has room."""
        for call in self._waiting.release(now):
            self._ready.join(call)

    def _forget(self, call: Call[T]) -> None:
        """Removes a call, wherever it is, from what has no outcome yet."""
        del self._calls[call.id]
        self._deadlines.leave(call)
        self._ready.leave(call)
        self._waiting.leave(call)

    def _end(self, call: Call[T], result: Response | AttnServeError) -> Outcome[T]:
        """The outcome of a call, which is not kept any more."""
        self._forget(call)
        return call, result

    def cancel(self, call: Call[T]) -> bool:
        """Forgets a call that nobody waits for. False if it already has its outcome, or has moved to another server:
        its id may then mean another call here.
        """
        if self._calls.get(call.id) is not call:
            return False
        frees = call not in self._waiting
        self._forget(call)
        self._retract(call)
        if frees:
            self._waiting.look_again()
        return True

    def _retract(self, call: Call[T]) -> None:
        """Queues a cancellation for the server, if it has been sent the call."""
        if call.stream:
            self._bounds.given_up(call)
            if call.stream == self._stream:
                self._cancelled.append(call.id)

    def next_message(self, stream: int, now: float) -> list[Buffer] | None:
        """The pieces of the next message for a stream: all calls that are ready, up to the bounds on size and number.
        None if there is nothing to send, or nothing yet.
        """
        if stream != self._stream or not (self._ready or self._cancelled):
            return None
        message: list[Buffer] = []
        calls: list[Call[T]] = []
        size = 0
        if self._cancelled:
            message.append(cancellation(self._cancelled[:MESSAGE_CALLS]))
            del self._cancelled[:MESSAGE_CALLS]
        most, most_bytes = MESSAGE_CALLS, self._bounds.message_bytes
        if self._bounds.one_by_one:
            most = 0 if any(call.stream == stream for call in self._calls.values()) else 1
        while self._ready and len(calls) < most:
            call = self._ready.next()
            if call.deadline > now:  # expired ones are left to `tick`
                if calls and size + call.size > most_bytes:
                    self._ready.join(call)
                    break
                message.append(prefix(call, now))
                message += call.pieces
                size += call.size
                call.stream = stream
                calls.append(call)
        for call in calls:
            call.message_size = size
        return message or None

    def resolve(self, stream: int, replies: Iterable[Reply], now: float) -> list[Outcome[T]]:
        """Takes the replies in a message. Replies to calls that are not in flight on the stream are dropped: their
        callers have gone.
        """
        outcomes: list[Outcome[T]] = []
        answered = 0
        refused = False
        begin = self._opened if stream == self._stream else 0.0
        self._replica.heard = now
        for reply in replies:
            call = self._calls.get(reply.id)
            if call is None or call.stream != stream:
                continue
            result = reply.result
            if isinstance(result, Status):
                if result.code == _UNAVAILABLE:
                    if stream == self._stream:
                        self._leave_stream()
                    self._replica.failed(now)
                    self._try_again(call, result, now, outcomes)
                    continue
                result = error_from_status(result, resent=call.resent)
                self._replica.room.refused(now, result, call.size)
                if self._waiting.refused(call, result, now):
                    refused = True
                    continue
            else:
                answered += 1
            del self._calls[reply.id]  # it is neither ready nor waits
            self._deadlines.leave(call)
            outcomes.append((call, result))
            self._replica.worked(now, begin)
        self._policy.answered(answered, now)
        self._waiting.answered(answered, now, refused=refused, taken=not self._ready)
        self._release(now)
        return outcomes

    def asked_to_leave(self, stream: int, now: float) -> None:
        """The server asks for a stream to be closed; it still answers the calls that it has. If there are others, calls
        that have not been sent go to them.
        """
        if stream == self._stream:
            self._leave_stream()
            self._replica.asks_to_leave(now)
            if self._others.exist():
                self._part_with([*self._ready.calls, *self._waiting.held])

    def leave(self) -> None:
        """Moves unsent calls to other servers; those that were sent are awaited. A call that a server had no room for
        waits out the pause that it was told: `tick` then moves it.
        """
        self._leave_stream()
        self._part_with([*self._ready.calls, *self._waiting.may_move()])

    def take_leaving(self) -> list[Call[T]]:
        """The calls to be moved to other servers, which are no longer kept here."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def _part_with(self, calls: Iterable[Call[T]]) -> None:
        """Hands over unsent calls, except those that only this server can answer."""
        for call in calls:
            if not call.pinned and call.id in self._calls:
                self._forget(call)
                self._leaving.append(call)

    def broken(self, stream: int, status: Status, now: float) -> list[Outcome[T]]:
        """Handles the end of a stream. If the calls were not at fault, they are sent again on the next stream."""
        affected = [call for call in self._calls.values() if call.stream == stream]
        for call in affected:
            call.resent = True
        error = error_from_status(status)
        given_up = self._bounds.ended(stream)
        if (affected or given_up) and is_of_message(error):
            outcomes = self._too_long(affected, error, given_up)
        else:
            outcomes = self._interrupted(stream, affected, status, error, now)
        if stream == self._stream:
            self._leave_stream()
        self._release(now)
        return outcomes

    def _too_long(self, affected: list[Call[T]], error: AttnServeError, given_up: int) -> list[Outcome[T]]:
        """Handles the end of a stream because a message was too long: one with calls that are in flight (`affected`) or
        given up, or one with a reply to such a call.
        """
        guilty = self._bounds.too_long(affected, error, given_up)
        for call in affected:
            if call is not guilty:
                call.stream = 0
                self._ready.join(call)
        return [] if guilty is None else [self._end(guilty, error)]

    def _interrupted(
        self, stream: int, affected: list[Call[T]], status: Status, error: AttnServeError, now: float
    ) -> list[Outcome[T]]:
        """Handles the end of a stream for another reason; `affected` are the calls in flight on it."""
        outcomes: list[Outcome[T]] = []
        is_full = retry.room_after(error) is not None
        if stream == self._stream:  # calls about to be sent have failed, too, or their retries would have no bound
            affected += self._ready.calls
            self._ready.clear()
            if not is_full:
                self._waiting.forget_server()
        for call in affected:
            if retry.breaks_only_the_stream(status.code):
                self._try_again(call, status, now, outcomes)
            elif not self._waiting.refused(call, error, now):
                outcomes.append(self._end(call, error_from_status(status)))
        if is_full:
            self._replica.room.refused(now, error, None)
            self._waiting.answered(0, now, refused=True, taken=True)
        elif affected or stream == self._stream:
            (self._replica.failed if status.code else self._replica.asks_to_leave)(now)
        return outcomes

    def distrusted(self, stream: int, message: str) -> list[Outcome[T]]:
        """Gives up a stream whose peer breaks the protocol, and the calls on it: a retry would get no better answer."""
        if stream == self._stream:
            self._leave_stream()
        affected = [call for call in self._calls.values() if call.stream == stream]
        return [self._end(call, ProtocolError(message)) for call in affected]

    def tick(self, now: float) -> list[Outcome[T]]:
        """Does what is due. Calls that are not to wait for a full server move to another, once, or fail; calls past
        their deadline fail. Calls whose next attempt is due move to other servers or, if none can answer them, become
        ready here. Of the calls that are not sent, as many move as other servers would answer sooner.
        """
        others = self._others.exist()
        failed = self._waiting.failed()
        if others:  # each call may try one other server before it fails
            first_time = [call for call, _ in failed if call.avoid in (None, self._replica.address)]
            for call in first_time:
                call.avoid = self._replica.address
            self._part_with(first_time)
        outcomes = [self._end(call, error) for call, error in failed if call.id in self._calls]
        for call in self._deadlines.up_to(now):
            refusal = None if call.stream else self._waiting.refusal
            if call.stream and call.timeout is not None:
                self._replica.was_silent(now, call.deadline - call.timeout)
            self._retract(call)
            late = no_reply(call.given, self._replica.address) if refusal is None else no_room(refusal, call.given)
            outcomes.append(self._end(call, late))
        due = self._waiting.due(now)
        if others:
            self._part_with(due)
            due = [call for call in due if call.pinned]
        self._waiting.hold(due)
        self._release(now)
        if others and self._is_behind and now >= self._look:
            self._look = now + LOOK_S
            self._part_with(self._first_unsent(self._others.excess()))
        return outcomes

    def _first_unsent(self, count: int) -> list[Call[T]]:
        """The first `count` of the unsent calls that other servers can answer, in the order of sending."""
        unsent = [call for call in (*self._ready.calls, *self._waiting.held) if not call.pinned] if count > 0 else []
        return nsmallest(count, unsent, key=lambda call: (by_priority(call), call.id))

    def close(self) -> list[Outcome[T]]:
        """Gives up all calls."""
        outcomes: list[Outcome[T]] = [(call, ClientClosedError()) for call in self._calls.values()]
        self._calls.clear()
        self._deadlines.clear()
        self._ready.clear()
        self._waiting.clear()
        self._leave_stream()
        return outcomes

    def _leave_stream(self) -> None:
        self._stream = 0
        self._cancelled.clear()

    def _try_again(self, call: Call[T], status: Status, now: float, outcomes: list[Outcome[T]]) -> None:
        elsewhere = not call.pinned and self._others.answer()
        delay = self._policy.delay(call.attempts + 1, now, call.deadline, elsewhere=elsewhere)
        if delay is None:
            outcomes.append(self._end(call, retry.given_up(status, call.attempts + 1)))
            return
        call.attempts += 1
        self._waiting.again(call, now + delay)
