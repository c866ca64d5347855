"""The event loop of a server: uvloop's, with what a server wants to know of its loop.

In: nothing. Out: a loop for `asyncio.Runner`. All requests are decoded and encoded on it, and small ones computed: once
it is busy all of the time, further requests wait in their connections, where no queue sees them. As long as connections
cannot be accepted, because there are no file descriptors left, it says so in a line a second.

gRPC's thread tells the loop of each event by a byte in a socket. The callback that gRPC adds for that socket handles
all events there are, but reads only one byte. When some 280 bytes have not been read, gRPC's thread waits: then all
connections together, whoever they belong to, get on by one event for each turn of the loop. While the loop turns
quickly, that is as it should be: what the server is not ready for stays with those who sent it, and who sends little
does not wait behind it. But where turns are long, everybody waits for many of them, for seconds. So before the callback
is called, further bytes are read: one for each `SECONDS_OF_AN_EVENT` since it was last called, if there are so many.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Final, TypeVarTuple

import uvloop

if TYPE_CHECKING:
    from _typeshed import HasFileno

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE)
DESCRIPTORS_EVERY_S: Final = 1.0
"""How often it is looked whether there are file descriptors left. Nobody else says so: libuv closes the connections
that it cannot accept, and gRPC leaves them waiting.
"""

SECONDS_OF_AN_EVENT: Final = 0.001
"""The longest time that an event of gRPC's takes, whatever the loop does between any two."""
MOST_BYTES: Final = 4096
"""More than there is room for in gRPC's socket: each takes as much as a whole packet."""

Ts = TypeVarTuple("Ts")

logger = logging.getLogger(__name__)


class EventLoop(uvloop.Loop):
    """uvloop's loop, with a clock."""

    def __init__(self) -> None:
        super().__init__()
        self._measured = _measured(self)
        self._closed_after = 0.0
        self.call_soon(self._look_for_descriptors)

    @property
    def busy_seconds(self) -> float:
        """The time since the loop was made in which it did not wait for events. To be read by the loop's thread."""
        return self._closed_after or self._measured.busy_seconds

    def close(self) -> None:
        """Closes the loop, which then is busy no longer."""
        busy = self.busy_seconds
        super().close()
        self._closed_after = busy

    def add_reader(self, fd: int | HasFileno, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        """Calls a callback when there is something to read. If `fd` is a socket, it is gRPC's: see above."""
        if isinstance(fd, socket.socket):
            super().add_reader(fd, _Events(fd).call, callback, *args)
        else:
            super().add_reader(fd, callback, *args)

    def _look_for_descriptors(self) -> None:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in _EXHAUSTED:
                logger.error("no connection can be accepted: %s", error.strerror)
        self.call_later(DESCRIPTORS_EVERY_S, self._look_for_descriptors)


class _Events:
    """The socket by which gRPC tells of events."""

    def __init__(self, bytes_of_events: socket.socket) -> None:
        self._bytes = bytes_of_events
        self._called = perf_counter()

    def call(self, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        """Calls a callback that reads one byte, after having read the further bytes. An event is there before its byte
        is. So the callback also handles the events that those bytes told of.
        """
        now = perf_counter()
        more = int((now - self._called) / SECONDS_OF_AN_EVENT)
        self._called = now
        if more:
            written = len(self._bytes.recv(min(more + 1, MOST_BYTES), socket.MSG_PEEK))
            if written > 1:
                self._bytes.recv(written - 1)
        callback(*args)


def _measured(loop: uvloop.Loop) -> _Waits | _ThreadTime:
    """What measures how busy a loop is. If libuv does not, that is no reason for a server not to start."""
    try:
        return _Waits(loop)
    except Exception as error:  # whatever else another version of uvloop has, or has no longer
        logger.warning("how busy the loop is counts as its thread's processor time, for want of libuv's: %s", error)
        return _ThreadTime()


class _Waits:
    """How long a loop has waited for events, as libuv measures it if it is asked to; uvloop does not ask."""

    _UV_METRICS_IDLE_TIME: Final = 1

    def __init__(self, loop: uvloop.Loop) -> None:
        """Measures from now on; to be made before the loop first runs. Raises whatever error comes if it cannot."""
        libuv = ctypes.PyDLL(uvloop.loop.__file__)
        self._idle_time = libuv.uv_metrics_idle_time
        self._idle_time.argtypes, self._idle_time.restype = (ctypes.c_void_p,), ctypes.c_uint64
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
        self._loop = pointer(uvloop.loop.libuv_get_loop_t_ptr(loop), None)  # type: ignore[attr-defined]
        if libuv.uv_loop_configure(ctypes.c_void_p(self._loop), self._UV_METRICS_IDLE_TIME):
            raise OSError("libuv does not measure how long it waits")
        self._made = perf_counter()

    @property
    def busy_seconds(self) -> float:
        """For how long the loop has not waited in all; to be asked only while it is open."""
        return perf_counter() - self._made - float(self._idle_time(self._loop)) * 1e-9


class _ThreadTime:
    """The processor time of a loop's thread. It is somewhat less than the time in which the loop did not wait for
    events: in part of that, the thread waits for a processor.
    """

    def __init__(self) -> None:
        self._made = thread_time()

    @property
    def busy_seconds(self) -> float:
        """For how long its thread had a processor."""
        return thread_time() - self._made
