"""Whether the system begins calls again that a signal has interrupted (SA_RESTART): a client leaves that as it was."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
import uvloop
from interrupting import Interrupt

from attnserve import Client
from attnserve import _interrupts as interrupts
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
    action = Action()
    assert ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action)) == 0
    return bool(action.flags & RESTART)


@pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_event_loops_handler_stays_where_it_is(
    loops: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any machine: whether calls are restarted is not even looked up."""

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

    monkeypatch.setattr(interrupts, "_are_restarted", lambda number: False)
    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(run())


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """A handler of two signals, which raises. Calls are restarted after the first of them."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        raise Interrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGUSR1)}
    signal.siginterrupt(signal.SIGTERM, False)
    yield came
    for number, its in before.items():
        signal.signal(number, its)


def test_calls_are_restarted_after_the_signals_after_which_they_were(handler: list[int]) -> None:
    for _ in range(2):
        with DelayedInterrupt():
            assert restarts(signal.SIGTERM)
            assert not restarts(signal.SIGUSR1)
        assert restarts(signal.SIGTERM)
        assert not restarts(signal.SIGUSR1)
    for _ in range(2):
        with pytest.raises(Interrupt), DelayedInterrupt():
            signal.raise_signal(signal.SIGTERM)
    assert handler == [signal.SIGTERM, signal.SIGTERM]
    assert restarts(signal.SIGTERM)


def test_they_are_although_a_handler_raises_as_it_comes_back(
    handler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_handler = interrupts._signal.signal

    def set_and_raise(number: int, its: object) -> object:
        before = set_handler(number, its)
        if its is own:
            signal.raise_signal(number)
        return before

    own = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(interrupts._signal, "signal", set_and_raise)
    with pytest.raises(Interrupt), DelayedInterrupt():
        pass
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is own
    assert restarts(signal.SIGTERM)
