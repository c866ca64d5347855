"""Calls that wait in the client: until a server has room, or until the time of their next attempt.

In: new calls, those that a server refused or did not answer, and how many it has answered. Out: those that may be sent,
and those that are not to wait, with their errors. How many calls a full server gets is decided in `window.py`, in which
order in `line.py`, and whether one is sent again in `_settings.retry`. No I/O, no clock.

    add(call) ──▶ held ──release()──▶ sent
                    ▲
    again(call) ──▶ later, until due()        refused(call) is again(call), after a refusal
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized
from math import inf
from operator import attrgetter
from typing import Final, Generic, TypeVar

from attnserve._errors import AttnServeError, OverloadedError
from attnserve._servers.replicas import Replica
from attnserve._servers.room import LONGEST
from attnserve._settings.retry import RetryPolicy, room_after
from attnserve._transports.in_flight import Call
from attnserve._transports.line import Line, by_priority
from attnserve._transports.window import Window

T = TypeVar("T")

_BY_SIZE: Final = frozenset(("bytes", "flops"))
"""Bounds for which a smaller call may have room."""


class Waiting(Generic[T]):
    """The calls to one server that are not to be sent yet."""

    def __init__(self, policy: RetryPolicy, replica: Replica, calls: Sized) -> None:
        """`calls` are all that have no outcome, including those that wait here. `replica` is the server; it is told
        until when the server should have no room.
        """
        self._policy = policy
        self._replica = replica
        self._calls = calls
        self._window = Window(policy.retries)
        self._held: Line[T] = Line(by_priority)
        self._later: Line[T] = Line(attrgetter("due"))
        """Calls to be sent again, by when."""
        self._failed: dict[int, tuple[Call[T], OverloadedError]] = {}
        """Calls that are not to wait, because the server is full."""
        self.wakeup = inf
        """When there is something to do. Between two calls of `due`, it only becomes earlier."""

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._held) + len(self._later) + len(self._failed)

    def __contains__(self, call: Call[T]) -> bool:
        """Whether a call waits."""
        return call in self._held or call in self._later or call.id in self._failed

    @property
    def held(self) -> Collection[Call[T]]:
        """Those that wait for room and may be sent as soon as there is some, in any order."""
        return self._held.calls

    @property
    def refusal(self) -> OverloadedError | None:
        """The server's last word that it has no room; None while it may have some."""
        return self._window.refusal

    @property
    def _unanswered(self) -> int:
        """How many calls the server has, or is about to be sent."""
        return len(self._calls) - len(self)

    def add(self, call: Call[T], now: float) -> bool:
        """Takes a new call, which is not among the `calls` yet, and returns whether it may be sent at once. If not, it
        waits until the server has room; or it is among the `failed`, if it cannot be answered in its time or is not to
        wait.
        """
        if not self._policy.retries:  # a call without retries does not wait
            refusal = self._replica.room.refusal(now, call.size)
            if refusal is None or self._policy.begun.take(now):
                return True
        elif self._window.refusal is None or self._is_past(now):
            return True
        else:
            refusal = self._hopeless(call, now)
        if refusal is None:
            self._held.join(call)
        else:
            self._fail(call, refusal)
            self.wakeup = now
        return False

    def _is_past(self, now: float) -> bool:
        """Whether the server had no room, but so long ago that it may have some."""
        if self._held or not self._window.passed(now):
            return False
        self._window.forget()
        return True

    def _hopeless(self, call: Call[T], now: float) -> OverloadedError | None:
        """The error of a new call that cannot be answered in its time, as far as is known."""
        waiting, unanswered = len(self._held), self._unanswered
        if not waiting:
            self._window.speed.begin(now, anew=not unanswered)
            if self._window.room(unanswered) >= 1:
                return None  # it is released at once
        return self._window.hopeless(waiting + unanswered, now, call.deadline)

    def release(self, now: float) -> list[Call[T]]:
        """Takes out the calls for which the server has room now."""
        if not self._held:
            return []
        room = self._window.room(self._unanswered)
        if now >= self._window.probe_at:
            self._window.probed(now)
            room = max(room, 1)
        released: list[Call[T]] = []
        while len(released) + 1 <= room and self._held:
            released.append(self._held.next())
        if self._held:
            self.wakeup = min(self.wakeup, self._window.probe_at)
        return released

    def again(self, call: Call[T], until: float) -> None:
        """Has a call wait for its next attempt, until then."""
        call.stream = 0
        call.refusal = None
        call.avoid = self._replica.address
        call.due = until
        self._later.join(call)
        self.wakeup = min(self.wakeup, until)

    def refused(self, call: Call[T], error: AttnServeError, now: float) -> bool:
        """Takes a call that ended with an error, if it is to wait until the server has room, and returns whether it is.
        `answered`, which must follow, has it fail all the same if the server is given up.
        """
        for_all = room_after(error) is not None and (_is_for_all(error) or self._unanswered > 1)
        wait = self._policy.until_room if for_all else self._policy.after_overload
        pause = wait(error, call.refusals + 1, now, call.deadline)
        if pause is None:
            return False
        assert isinstance(error, OverloadedError)
        self.again(call, now + pause)
        call.refusals += 1
        call.refusal = error
        if for_all:
            self._window.refused(error, self._unanswered, pause, now)
            self._replica.room.until = max(self._replica.room.until, min(self._window.probe_at, now + LONGEST))
        return True

    def answered(self, calls: int, now: float, *, refused: bool, taken: bool) -> None:
        """Notes that calls have been answered, whether others were refused, and whether the connection has `taken` all
        that may be sent. If the server is given up, because it has no calls and has refused too many in a row, all that
        wait for it fail.
        """
        self._window.answered(calls, len(self._held), now, taken=taken)
        if not (refused and self._window.given_up):
            return
        assert self._window.refusal is not None
        for call in [*(call for call in self._later.calls if call.refusal is not None), *self._held.calls]:
            self.leave(call)
            error = call.refusal or self._window.refusal
            self._fail(call, OverloadedError(str(error), code=error.code, details=error.details))
        self.wakeup = min(self.wakeup, now)

    def _fail(self, call: Call[T], error: OverloadedError) -> None:
        self._failed[call.id] = call, error

    def leave(self, call: Call[T]) -> None:
        """Removes a call, if it waits here."""
        self._held.leave(call)
        self._later.leave(call)
        self._failed.pop(call.id, None)

    def may_move(self) -> list[Call[T]]:
        """Those that may be sent to another server at once: not those that this one refused, which wait out the pause
        that it asked for.
        """
        return [*self._held.calls, *(call for call in self._later.calls if call.refusal is None)]

    def failed(self) -> list[tuple[Call[T], OverloadedError]]:
        """Takes out those that fail, with their errors."""
        failed, self._failed = list(self._failed.values()), {}
        return failed

    def due(self, now: float) -> list[Call[T]]:
        """Takes out those whose next attempt is due."""
        due = self._later.up_to(now)
        self.wakeup = self._later.least
        return due

    def hold(self, calls: Iterable[Call[T]]) -> None:
        """Has calls wait until `release` finds room for them."""
        for call in calls:
            self._held.join(call)

    def look_again(self) -> None:
        """Notes that there may be room, although no answer has come."""
        if self._held:
            self.wakeup = 0.0

    def forget_server(self) -> None:
        """Forgets what is known of the server: the next stream may lead to another, or to one that was restarted."""
        self._window.forget()

    def clear(self) -> None:
        """Removes all."""
        self._held.clear()
        self._later.clear()
        self._failed.clear()


def _is_for_all(error: AttnServeError) -> bool:
    """Whether the server may refuse calls of any size for the same reason."""
    return not (isinstance(error, OverloadedError) and error.bound in _BY_SIZE)
