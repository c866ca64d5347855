"""The rate that a real server learns, and what it refuses because of it; `test_pace.py` tests the learning itself."""

from __future__ import annotations

from collections.abc import Iterator

import calls
import grpc
import messages
import pytest
import slow_kernel
from conftest import Server

SLOW = messages.random_attend(0, 1, batch=16, heads=1, softcap=1.0)
"""Sixteen sequences for the slow kernel, with almost no FLOPs."""
HEAVY = messages.random_attend(0, 2048, heads=4, kv_heads=1, width=64)
"""A few hundredths of a second; at the slow kernel's time per FLOP, most of a minute."""
TOGETHER = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    errors = tmp_path_factory.mktemp("slow") / "stderr"
    server = Server(("--max-queue-time", "0"), errors, program=(slow_kernel.__file__,))
    yield server
    assert server.stop() == 0, server.stderr()


def test_slow_tiny_requests_do_not_have_heavy_ones_refused(server: Server) -> None:
    """Whatever ran before, heavy requests with a minute's deadline are all computed, one after the other."""
    with grpc.insecure_channel(server.address, calls.ANY_LENGTH) as channel:
        stream = calls.Stream(channel)
        for _ in range(2):  # before any heavy request has run, and after some have
            for number in range(12):
                stream.send(calls.call(number + 1, SLOW))
                (reply,) = stream.replies(1)
                assert reply.attend.timings.compute_ns >= 16e9 * slow_kernel.SECONDS, "it is slow"
            heavy = [calls.call(100 + number, HEAVY) for number in range(TOGETHER)]
            for call in heavy:
                call.timeout.FromSeconds(60)
            stream.send(*heavy)
            assert not [reply.error for reply in stream.replies(TOGETHER) if reply.HasField("error")]
        stream.vanish()
