"""A call whose server goes away is sent to another one at once, if that should answer; else it waits a while first."""

from __future__ import annotations

import socket
from functools import partial
from math import inf

import grpc
import pytest
from askers import Attend, Transport, array, attend, transport
from calls import PATIENCE_S
from multiplexed import POLICY, Alone, beside, call, message, status
from peers import good, good_unary, peer

from attnserve._settings.retry import Again, RetryPolicy

__all__ = ["attend", "transport"]


class _Multiplexer(Alone):
    """A multiplexer beside another server, which should answer or not."""

    def __init__(self, *, answers: bool) -> None:
        super().__init__(POLICY)
        self._others = beside(lambda: True, answer=lambda: answers)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_broken_stream_has_its_calls_moved(answers: bool, pinned: bool) -> None:
    multiplexer = _Multiplexer(answers=answers)
    moved = call("a")
    moved.pinned = pinned
    multiplexer.add(moved, 0.0)
    stream = multiplexer.opened(0.0)
    message(multiplexer, stream)
    assert multiplexer.broken(stream, status(grpc.StatusCode.UNAVAILABLE), 1.0) == []
    assert multiplexer.wakeup == (1.0 if answers and not pinned else 1.1)


def test_only_the_first_retry_does_not_wait() -> None:
    policy = RetryPolicy(2, first_delay=0.1, random=lambda: 1.0)
    assert [policy.delay(attempts, 0.0, inf, elsewhere=True) for attempts in (1, 2, 3)] == [0.0, 0.2, None]
    gone = status(grpc.StatusCode.UNAVAILABLE)
    assert policy.after(gone, 1, 0.0, inf, resent=False, elsewhere=True) == Again(0.0)
    assert RetryPolicy(0).delay(1, 0.0, inf, elsewhere=True) is None
    assert policy.delay(1, 2.0, 2.0, elsewhere=True) is None


def test_nobody_waits_while_another_server_answers(
    attend: Attend, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a call waited before it is sent again, its time would not suffice."""
    never = 4 * PATIENCE_S
    patient = partial(RetryPolicy, first_delay=never, longest_delay=never)
    monkeypatch.setattr("attnserve._settings.config.RetryPolicy", patient)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"127.0.0.1:{listener.getsockname()[1]}"
    with peer(good, good_unary) as address:
        results = attend([nowhere, address], [array(n) for n in range(8)], transport=transport)  # type: ignore[arg-type]
    assert [result.output[0, 0] for result in results] == list(range(8))
