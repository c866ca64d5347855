"""Which thread does what: gRPC's settles what somebody waits for, and calls nobody back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
import pytest
from askers import array
from calls import PATIENCE_S
from peers import good, peer, replies

from attnserve import Client
from attnserve._threads import CallFuture

OWN = "attnserve-replies"
"""The thread of a stream."""


@pytest.fixture
def future() -> CallFuture[int, int]:
    return CallFuture(lambda outcome: outcome + 1)


def test_a_future_that_calls_nobody_back_is_settled_silently(future: CallFuture[int, int]) -> None:
    assert future.settle_silently(1)
    assert future.result(0) == 2
    called: list[Any] = []
    future.add_done_callback(called.append)
    assert called == [future]


def test_a_future_that_calls_back_is_not(future: CallFuture[int, int]) -> None:
    called: list[Any] = []
    future.add_done_callback(called.append)
    assert not future.settle_silently(1)
    assert not called
    assert not future.done()
    future.settle(1)
    assert called == [future]


def test_a_client_may_be_closed_by_what_a_future_calls_back() -> None:
    """Closing waits for gRPC's thread, and so must not happen in that."""
    asked, over = threading.Event(), threading.Event()
    threads: list[str] = []

    def patient(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            assert asked.wait(PATIENCE_S)
            yield from replies(message)

    with peer(patient) as address, Client(address) as client:

        def close(_: Future[Any]) -> None:
            threads.append(threading.current_thread().name)
            client.close()
            over.set()

        future = client.submit(array(2), array(2), array(2))
        future.add_done_callback(close)
        asked.set()
        assert over.wait(PATIENCE_S)
        assert future.result(0).output[0, 0] == 2
    assert threads == [OWN]


def test_threads_that_share_a_client_get_their_own_results() -> None:
    with peer(good) as address, Client(address) as client:
        outputs: dict[int, set[float]] = {number: set() for number in range(1, 9)}

        def ask(number: int) -> None:
            for _ in range(50):
                outputs[number].add(float(np.max(client.attend(*[array(number)] * 3).output)))

        threads = [threading.Thread(target=ask, args=(number,)) for number in outputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert outputs == {number: {float(number)} for number in outputs}
