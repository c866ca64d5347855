"""Refusals are remembered, so that callers who ask again are refused cheaply. That decides nothing: exactly the same
requests are admitted or refused as without remembering.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final

import pytest
from admitted import ME, OTHER, at, flood, queue_of, refused
from engines import OpenAdmission
from hypothesis import example, given
from hypothesis import strategies as st
from waiting import work

from attnserve_server.errors import Overloaded
from attnserve_server.no_room import NoRoom
from attnserve_server.scheduling.admission import MOST_TOLD, Admission
from attnserve_server.scheduling.pace import Pace

Action = tuple[str, str, int, int, str]
"""What happens, to which caller, and a request's bytes (or, from them, which one in flight it is), FLOPs and kind."""

ACTIONS = st.tuples(
    st.sampled_from(["admit", "admit", "check", "computed", "answered", "release", "learn", "form"]),
    st.sampled_from("abc"),
    st.sampled_from([1, 5, 20, 60]),
    st.sampled_from([1, 100, 3000]),
    st.sampled_from(["", "another"]),
)


class Forgetful(OpenAdmission):
    """An admission that checks every request anew."""

    def refusal(self, caller: Hashable, size: int) -> NoRoom | None:
        self._told.clear()
        return super().refusal(caller, size)


class Life:
    """One admission and the actions applied to it."""

    def __init__(self, admission: OpenAdmission) -> None:
        self.admission = admission
        self.waiting: list[tuple[str, int, int, str]] = []
        self.computed: list[tuple[str, int]] = []

    def act(self, action: Action) -> bool:
        """Applies an action; returns whether a request was refused for want of room."""
        what, caller, size, flops, kind = action
        if what == "admit":
            refused = self._refused(lambda: self.admission.admit(caller, size, flops, kind=kind))
            if not refused:
                self.waiting.append((caller, size, flops, kind))
            return refused
        if what == "check":
            return self._refused(lambda: self.admission.check(caller, size))
        if what == "computed" and self.waiting:
            other, held, cost, its_kind = self.waiting.pop(size % len(self.waiting))
            self.admission.computed(other, held, cost, its_kind)
            self.computed.append((other, held))
        elif what == "answered" and self.computed:
            other, held = self.computed.pop(size % len(self.computed))
            self.admission.shrink(other, held - held // 2)
            self.computed.append((other, held // 2))
        elif what == "release" and self.computed:
            self.admission.release(*self.computed.pop(size % len(self.computed)))
        elif what == "learn":
            self.admission.pace.learn(work(1, flops, kind), size * 1e-4)
        elif what == "form":
            self.admission.pace.formed(1 / size)
        return False

    def _refused(self, ask: Callable[[], None]) -> bool:
        try:
            ask()
        except Overloaded:
            return True
        return False


CHECK: Final = ("check", "a", 1, 1, "")
AVERAGE: Final = [*[("admit", "a", 1, 1, "")] * 12, *[("admit", "b", 1, 1, "")] * 4, CHECK]
"""One of two callers has its share of a queue whose length depends on how slow its requests are on average."""
SLOW: Final = [*[("learn", "a", 60, 1, "slow")] * 9, *[("learn", "a", 1, 1, "")] * 60]
"""Requests of another kind are slow, but most are not."""


@example([*AVERAGE, ("admit", "b", 1, 3000, ""), CHECK], 0.001)
@example([*SLOW, *AVERAGE, ("admit", "b", 1, 1, ""), CHECK, ("admit", "b", 1, 1, "slow"), CHECK], 0.001)
@example(
    [("admit", "a", 60, 1, ""), ("check", "b", 60, 1, ""), ("check", "c", 1, 1, ""), ("check", "b", 60, 1, "")], 0.1
)
@given(st.lists(ACTIONS, max_size=200), st.sampled_from([0.0, 0.01, 0.1]))
def test_nothing_is_decided_by_what_was_told(actions: list[Action], max_queue_time: float) -> None:
    lives = [Life(kind(40, 100, 10**4, max_queue_time=max_queue_time)) for kind in (OpenAdmission, Forgetful)]
    for life in lives:
        life.admission.pace = Pace(flop_seconds=1e-6, request_seconds=1e-4)
    for action in actions:
        refused, expected = (life.act(action) for life in lives)
        assert refused is expected
        stands, expected_stands = (life.admission._queue_stands for life in lives)
        assert stands is expected_stands, "whether the queue stays"


def overdone() -> OpenAdmission:
    """An admission in which one caller waits that has used up its share of the queue time."""
    admission = queue_of(0, 0.1, 1.0)
    flood(admission, ME, 1, 10**9)
    return admission


def test_who_is_alone_is_not_told_to_leave_some_to_others() -> None:
    assert refused(overdone(), 1, 10**9).reason == "OVERLOADED"


def test_who_is_refused_again_is_told_the_same_without_being_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = overdone()
    told = [refused(admission, 2, 10**9)]
    with monkeypatch.context() as patch:
        patch.setattr(Admission, "_lacks", None)
        told.append(refused(admission, 3, 10**9))
        told.append(refused(admission, 0, 10**9))  # less than any before: what is short is time
    first, again, smaller = told
    assert first is not again is not smaller, "one that is raised twice would keep alive what it met the first time"
    assert {each.encoded_status() for each in told} == {first.encoded_status()}
    assert {(type(each), each.rejection, each.retry_delay, str(each)) for each in told} == {
        (type(first), first.rejection, first.retry_delay, str(first))
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda admission: admission.computed(ME, 1, 10**9),
        lambda admission: admission.shrink(ME, 1),
        lambda admission: admission.release(ME, 1),
        lambda admission: admission.recount(ME, (1, 10**9), (2, 2 * 10**9), 0),
        lambda admission: admission.again(ME, 1, 10**9, ""),
        lambda admission: admission.admit(OTHER, 1, 10**9),
        lambda admission: at(10**9, 0.01)(admission),
        lambda admission: admission.pace.formed(0.01),
    ],
    ids=["computed", "shrink", "release", "recount", "again", "admit of another", "learn", "formed"],
)
def test_whatever_may_give_room_or_change_shares_makes_it_looked_at_again(
    change: Callable[[OpenAdmission], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = overdone()
    refused(admission, 1, 10**9)
    looks = []
    change(admission)
    look = Admission._lacks
    monkeypatch.setattr(Admission, "_lacks", lambda self, *given: (looks.append(given), look(self, *given))[1])
    with suppress(Overloaded):
        admission.check(ME, 1)
    assert looks == [(ME, 1)]


def test_what_is_refused_for_its_size_says_nothing_of_what_is_smaller() -> None:
    admission = OpenAdmission(max_requests=9, max_bytes=100, max_flops=10**9)
    admission.admit(OTHER, 60, 1)
    assert refused(admission, 41, 1).bound == "bytes"
    admission.check(ME, 40)


def test_of_so_many_callers_and_no_more_is_remembered_what_they_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = OpenAdmission(max_requests=1, max_bytes=100, max_flops=10**9)
    admission.admit(OTHER, 1, 1)
    for caller in range(3 * MOST_TOLD):
        assert refused(admission, 1, 1, str(caller)).bound == "requests"
        assert len(admission._told) <= MOST_TOLD
    monkeypatch.setattr(Admission, "_lacks", None)
    for caller in range(2 * MOST_TOLD, 3 * MOST_TOLD):
        assert refused(admission, 1, 1, str(caller)).bound == "requests"


def test_what_was_told_keeps_nothing_of_the_request_alive() -> None:
    admission = overdone()

    class Message(bytearray):
        """One that can be watched."""

    message = Message(10)
    gone = weakref.ref(message)

    def receive(message: Message) -> None:
        for _ in range(2):
            with pytest.raises(Overloaded):
                admission.check(ME, len(message))

    receive(message)
    del message
    gc.collect()
    assert gone() is None
