"""Remembered refusals decide nothing: exactly the same requests are admitted or refused as without remembering."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hypothesis import example, given
from hypothesis import strategies as st
from waiting import work

from attnserve_server.errors import Overloaded
from attnserve_server.scheduling.admission import Admission
from attnserve_server.scheduling.pace import Pace

Action = tuple[str, str, int, int]
"""What happens, to which caller, and a request's bytes and FLOPs (or, from the bytes, which one in flight it is)."""

ACTIONS = st.tuples(
    st.sampled_from(["admit", "admit", "check", "computed", "release", "learn"]),
    st.sampled_from("abc"),
    st.sampled_from([1, 5, 20, 60]),
    st.sampled_from([1, 100, 3000]),
)


class Forgetful(Admission):
    """An admission that checks every request anew."""

    def refusal(self, caller: Hashable, size: int) -> Overloaded | None:
        try:
            self._check_room(caller, size)
        except Overloaded as error:
            return error
        return None


class Life:
    """One admission and the actions applied to it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.waiting: list[tuple[str, int, int]] = []
        self.computed: list[tuple[str, int, int]] = []

    def act(self, action: Action) -> bool:
        """Applies an action; returns whether a request was refused for want of room."""
        what, caller, size, flops = action
        if what == "admit":
            refused = self._refused(lambda: self.admission.admit(caller, size, flops))
            if not refused:
                self.waiting.append((caller, size, flops))
            return refused
        if what == "check":
            return self._refused(lambda: self.admission.check(caller, size))
        if what == "computed" and self.waiting:
            self.computed.append(self.waiting.pop(size % len(self.waiting)))
            self.admission.computed(self.computed[-1][0], self.computed[-1][2])
        elif what == "release" and self.computed:
            other, held, _ = self.computed.pop(size % len(self.computed))
            self.admission.release(other, held)
        elif what == "learn":
            self.admission.pace.learn(work(1, flops), size * 1e-4)
        return False

    def _refused(self, ask: Callable[[], None]) -> bool:
        try:
            ask()
        except Overloaded:
            return True
        return False


AVERAGE = [*[("admit", "a", 1, 1)] * 12, *[("admit", "b", 1, 1)] * 4, ("check", "a", 1, 1)]
"""One of two callers has its share of a queue whose length depends on how slow its requests are on average."""


@example([*AVERAGE, ("admit", "b", 1, 3000), ("check", "a", 1, 1)], 0.001)
@example([("admit", "a", 60, 1), ("check", "b", 60, 1), ("check", "c", 1, 1), ("check", "b", 60, 1)], 0.1)
@given(st.lists(ACTIONS, max_size=200), st.sampled_from([0.0, 0.01, 0.1]))
def test_nothing_is_decided_by_what_was_told(actions: list[Action], max_queue_time: float) -> None:
    lives = [
        Life(kind(40, 100, 10**4, max_queue_time=max_queue_time, batch_requests=8, batch_flops=10**4))
        for kind in (Admission, Forgetful)
    ]
    for life in lives:
        life.admission.pace = Pace(flop_seconds=1e-6, request_seconds=1e-4)
    for action in actions:
        refused, expected = (life.act(action) for life in lives)
        assert refused is expected
        stands, expected_stands = (life.admission._stands for life in lives)
        assert stands is expected_stands, "whether the queue stays"
