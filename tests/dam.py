"""A connection whose replies stop on the way: a caller on a network that stands still, or who does not read.

In: the address of a server. Out: another address, by which it is reached; what it sends is held back from `shut` to
`open`. What is sent to it always passes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Set
from contextlib import suppress
from typing import Final, Self

CHUNK: Final = 1 << 16


class Dam:
    """Carries connections to a server, each with two threads, until the block ends."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = host, int(port)
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._over = False
        self._lock = threading.Lock()
        self._callers: set[socket.socket] = set()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> Set[socket.socket]:
        """The connections that callers have open."""
        return frozenset(self._callers.copy())

    def shut(self) -> None:
        """From now on no reply arrives."""
        self._flows.clear()

    def open(self) -> None:
        """From now on replies arrive, with those that were held back."""
        self._flows.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:  # a caller may just have connected: what is not there yet is never taken
            self._over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or its thread would still take one more
        self._listener.close()
        self.open()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the block has ended
            while True:
                caller, _ = self._listener.accept()
                server = socket.socket()
                with self._lock:
                    if self._over:
                        caller.close()
                        server.close()
                        return
                    self._ends += [caller, server]
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)  # or the system would hold megabytes
                server.connect(self._server)
                self._callers.add(caller)
                for ends in ((caller, server), (server, caller)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either end has closed
            is_reply = source.getpeername() == self._server
            while data := source.recv(CHUNK):
                if is_reply:
                    self._flows.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        self._callers.discard(source)
