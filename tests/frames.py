"""A caller of gRPC that keeps no rule of a good one: frames of HTTP/2, written by hand."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Self

from calls import PATIENCE_S

DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4
MAX_STREAMS: Final = 3
"""The setting that says how many streams may be open at a time."""
WINDOW_SIZE: Final = 4
"""The setting that says how many bytes a stream may carry until its receiver allows more."""
FRAME: Final = struct.Struct(">HBBBI")
"""The length, in two parts; the type; the flags; the stream."""
EMPTY_MESSAGE: Final = bytes(5)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def headers(path: str, metadata: Mapping[str, bytes]) -> bytes:
    """A request's headers, in plain literals."""
    fields = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path.encode("ascii"),
        ":authority": b"localhost",
        "te": b"trailers",
        "content-type": b"application/grpc",
        **metadata,
    }
    literals = (text for name, value in fields.items() for text in (name.encode("ascii"), value))
    parts = [bytes([len(literal)]) + literal for literal in literals]
    return b"".join(b"\0" + name + value for name, value in zip(parts[::2], parts[1::2], strict=True))


class Connection:
    """A connection; with a window of 0, it takes no message, only headers and what ends a stream."""

    def __init__(self, address: str, window: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE_S)
        settings = b"" if window is None else struct.pack(">HI", WINDOW_SIZE, window)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self._next = 1
        self._received = b""
        self.settings: dict[int, int] = {}
        """What the other end has set."""
        self.seen: Counter[tuple[int, bool]] = Counter()
        """Frames by their type, and by whether they ended a stream."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def begin(
        self,
        path: str,
        count: int = 1,
        message: bytes | None = EMPTY_MESSAGE,
        metadata: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Begins calls; with a message, which has its length before it, they are complete."""
        sent = b""
        for stream in range(self._next, self._next + 2 * count, 2):
            sent += frame(HEADERS, END_HEADERS, stream, headers(path, metadata))
            if message is not None:
                sent += frame(DATA, END_STREAM, stream, message)
        self._next += 2 * count
        self._socket.sendall(sent)

    def until(self, kind: int, ends: bool, count: int) -> bool:
        """Reads until there have been so many frames of a kind; returns False if the connection is closed before."""
        while self.seen[kind, ends] < count:
            if not self._read():
                return False
        return True

    def is_closed_in_time(self) -> bool:
        """Reads until the connection is closed."""
        while self._read():
            pass
        return True

    def _read(self) -> bool:
        """Reads a frame; returns False at the end. Raises TimeoutError."""
        header = self._bytes(FRAME.size)
        if header is None:
            return False
        high, low, kind, flags, _ = FRAME.unpack(header)
        payload = self._bytes(high << 8 | low)
        if payload is None:
            return False
        if kind in (SETTINGS, PING):
            if not flags & ACK:
                if kind == SETTINGS:
                    self.settings.update(struct.iter_unpack(">HI", payload))
                self._socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        else:
            self.seen[kind, bool(flags & END_STREAM) and kind in (DATA, HEADERS)] += 1
        return True

    def _bytes(self, count: int) -> bytes | None:
        try:
            while len(self._received) < count:
                more = self._socket.recv(1 << 16)
                if not more:
                    return None
                self._received += more
        except ConnectionError:
            return None
        found, self._received = self._received[:count], self._received[count:]
        return found
