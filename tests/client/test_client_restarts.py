"""The signal handlers of event loops: a client leaves them, and what the system does after them, as they are."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import signal
import sys
from collections.abc import Callable

import pytest
import uvloop

from attnserve import Client
from attnserve._interrupts import DelayedInterrupt

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="elsewhere the C library has another structure",
)
RESTART = 0x10000000


class Action(ctypes.Structure):
    """`struct sigaction` of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def restarts(number: int) -> bool:
    """Whether the system restarts calls that the signal has interrupted (SA_RESTART)."""
    action = Action()
    assert ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action)) == 0
    return bool(action.flags & RESTART)


@pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_event_loops_handler_stays_where_it_is(loops: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        assert restarts(signal.SIGTERM)
        handler = signal.getsignal(signal.SIGTERM)
        Client("127.0.0.1:1").close()
        assert restarts(signal.SIGTERM)
        with DelayedInterrupt():
            assert signal.getsignal(signal.SIGTERM) == handler
            signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(told.wait(), 60)

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(run())
