"""What a signal's handler raises in narrow places of the SDK: it ends the call that the main thread is in, no other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from calls import PATIENCE_S, until
from peers import peer, replies

from attnserve import Client, DeadlineExceededError

ARRAY = np.ones((1, 2, 3), np.float32)


class AlarmError(Exception):
    """What the handler raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[], None]]:
    """Has the signal arrive."""

    def handler(*arguments: Any) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_as_the_deadlines_thread_is_woken(alarm: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is woken for the next deadline, although that of the call that was interrupted would have come first."""
    released = threading.Event()

    def answers_the_first(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from replies(next(messages))
        released.wait(PATIENCE_S)

    with peer(answers_the_first) as address, Client(address, timeout=None) as client:
        client.attend(ARRAY, ARRAY, ARRAY)
        timer = client._calls.servers.connection().stream()._timer
        until(lambda: bool(timer._waiters), "the thread waits, without a limit")  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(timer, "notify", alarm)
            with pytest.raises(AlarmError):
                client.attend(ARRAY, ARRAY, ARRAY, timeout=0.01)
        late = client.submit(ARRAY, ARRAY, ARRAY, timeout=0.02)
        assert isinstance(late.exception(PATIENCE_S), DeadlineExceededError)
        released.set()
