"""A device that is busy for as long as a test wants, so that requests made meanwhile wait.

In: a server started with `PATIENT`. Nothing here depends on the machine's speed, and this process may even stall for
some seconds: the next requests that occupy the device are queued before the last one ends.
"""

from __future__ import annotations

import itertools
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

import calls
import grpc
import messages
import numpy as np
from google.rpc import code_pb2

from attnserve.v1 import attention_pb2 as pb

if TYPE_CHECKING:
    from conftest import Server

PATIENT = ("--priority-aging", "1h", "--max-queue-time", "0")
"""Flags that a server needs to be occupied: priority decides, and no request is refused for waiting long."""

# One or two tenths of a second on a CPU, since no fast kernel computes float64. With its softcap it exceeds the cost of
# a batch, and so runs alone. It is narrow: sending it and reading its reply take little of this process's time.
_REQUEST = messages.random_attend(0, 2048, heads=1, width=32, dtype=np.float64, softcap=1.0, priority=8)
_AHEAD = 32
"""How many are in flight at once: one runs, the rest are seconds of work ahead, so a test may stall meanwhile."""


class Occupied:
    """While the block runs, a server computes requests that go before all others. Those wait until the block ends, and
    then share what batches they can.
    """

    FLOPS = messages.read(_REQUEST).extent.flops
    """Of each request that occupies the device."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._occupy)

    def __enter__(self) -> Self:
        calls.until_nothing_is_in_flight(self._server.http_address)
        self._thread.start()
        self.until_waiting(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._failed is not None and error is None:
            raise self._failed

    def until_waiting(self, count: int) -> None:
        """Waits until `count` other requests are queued."""

        def waiting() -> bool:
            assert self._thread.is_alive(), f"the device is not occupied any more: {self._failed!r}"
            return calls.metric(self._server.http_address, "attnserve_queue_requests") >= count + _AHEAD - 1

        calls.until(waiting, f"{count} requests wait")

    def _occupy(self) -> None:
        """Keeps one request running and others queued, until the block ends or the server takes no more."""
        numbers = itertools.count(1)
        waiting: set[int] = set()

        def send(stream: calls.Stream) -> None:
            waiting.add(number := next(numbers))
            stream.send(calls.call(number, _REQUEST))

        try:
            with grpc.insecure_channel(self._server.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
                stream = calls.Stream(channel)
                for _ in range(_AHEAD):
                    send(stream)
                while not self._over.is_set():
                    (reply,) = stream.replies(1)
                    waiting.discard(reply.id)
                    if not self._goes_on(reply):
                        break
                    send(stream)
                stream.send(cancel=waiting)
                stream.half_close()
                for reply in stream.rest():
                    self._goes_on(reply)
        except BaseException as error:
            self._failed = error

    @staticmethod
    def _goes_on(reply: pb.AttendStreamReply) -> bool:
        """Whether the server takes more."""
        assert reply.error.code in (code_pb2.OK, code_pb2.UNAVAILABLE, code_pb2.CANCELLED), reply.error
        return reply.error.code == code_pb2.OK
