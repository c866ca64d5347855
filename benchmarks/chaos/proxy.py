"""A bad network: TCP connections to a server that are cut, stalled, half closed, or carry garbage."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal, Self, TypeAlias, get_args

from attnserve_server.settings.units import parse_address

Fault: TypeAlias = Literal["cut", "stall", "half close", "garbage"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
CHUNK: Final = 1 << 16
STALL_S: Final = 0.3
START_S: Final = 30.0


class _Connection:
    """One connection through the proxy. It is used on the proxy's loop only."""

    def __init__(self, caller: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.caller = caller
        self.server = server
        self.flows = asyncio.Event()
        self.flows.set()
        self.ended = asyncio.Event()
        self._half_closed = False

    def can(self, fault: Fault) -> bool:
        """Whether a fault is possible: not if the connection has ended, nor by writing to one that is half closed."""
        return not self.caller.transport.is_closing() and not (self._half_closed and fault == "garbage")

    def do(self, fault: Fault) -> None:
        """Does a fault to the connection."""
        if fault == "cut":
            self.close()
        elif fault == "stall":
            self.flows.clear()
            asyncio.get_running_loop().call_later(STALL_S, self.flows.set)
        elif fault == "half close":
            self.caller.write_eof()
            self._half_closed = True
        else:
            self.caller.write(os.urandom(100))

    def close(self) -> None:
        """Closes both ends at once."""
        self.flows.set()
        for writer in (self.caller, self.server):
            writer.transport.abort()


class Proxy:
    """Serves on a free port of this machine, on a loop in a thread of its own."""

    def __init__(self, address: str) -> None:
        """`address` is the server's."""
        self.address = ""
        self.done: Counter[str] = Counter()
        """How often a connection had each fault."""
        self._target = parse_address(address)
        self._connections: set[_Connection] = set()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def do(self, fault: Fault) -> None:
        """Does a fault to all connections."""
        self._loop.call_soon_threadsafe(self._do, fault)

    def _do(self, fault: Fault) -> None:
        for connection in list(self._connections):
            if connection.can(fault):
                connection.do(fault)
                self.done[fault] += 1

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._ended.wait()
        server.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*(connection.ended.wait() for connection in list(self._connections)))

    async def _accept(self, caller_reader: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        try:
            server_reader, server = await asyncio.open_connection(*self._target)
        except OSError:
            caller.transport.abort()
            return
        connection = _Connection(caller, server)
        self._connections.add(connection)
        await asyncio.gather(
            self._carry(connection, caller_reader, server), self._carry(connection, server_reader, caller)
        )
        connection.close()
        self._connections.discard(connection)
        connection.ended.set()

    async def _carry(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await connection.flows.wait()
                writer.write(data)
                await writer.drain()
        except (OSError, RuntimeError):  # it is closed, or half of it
            pass
        connection.close()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(self, *exception: object) -> None:
        stop: Callable[[], object] = self._ended.set
        self._loop.call_soon_threadsafe(stop)
        self._thread.join()
        self._loop.close()
