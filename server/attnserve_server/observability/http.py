"""The HTTP port: `/metrics` for Prometheus, `/healthz` (liveness) and `/readyz` (readiness) for probes.

In: a registry and the server's health. Out: answers to GET and HEAD of these three paths; where callers are known by
tokens, the metrics only to those who may read them. It runs on the event loop of gRPC, whose health it reports: so a
loop that hangs fails its liveness probe, and metrics are read by the thread that writes them. That is why it is not
prometheus_client's WSGI server, which answers from threads of its own; and its ASGI application would need a web
server, for three paths. A page of metrics takes 2 to 4 ms of the loop, and `pages` bounds how many there are.
Connections are bounded, too, but none is refused: a new one ends an old one, so that probes and scrapers get through
whoever else connects.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from attnserve_server.access.callers import Caller, Callers
from attnserve_server.errors import PermissionDenied, Unauthenticated
from attnserve_server.observability.health import Health
from attnserve_server.observability.pages import Pages
from attnserve_server.observability.refusals import Refusals, request_id
from attnserve_server.settings.units import Address, parse_address
from attnserve_server.start_errors import ListenError

_NO_REQUEST: Final = (b"\x16", b"\r")
"""First bytes of what is answered at once, without waiting for the end of a header: an empty line, and a TLS handshake,
whose peer sends nothing that would end a header, but waits for an answer.
"""
_MAX_HEADER_BYTES: Final = 16 * 1024
_PATIENCE_S: Final = 5.0
MOST_CONNECTIONS: Final = 256
"""Connections open at once, not counting those whose TLS handshake is not over. A probe or a scraper has one, for
milliseconds; what is left of the process's file descriptors is for callers.
"""
MOST_OF_AN_ADDRESS: Final = 64
"""Of these, those of one address: many, since behind a proxy all have the same."""
_TEXT: Final = "text/plain; charset=utf-8"
_ODD_VERSION: Final = re.compile(r"version=(?![0-9]{1,4}(\.[0-9]{1,4})*\s*(;|\Z))")
"""A version that is no number. prometheus_client may raise TypeError at it, or answer with it as it came."""
logger = logging.getLogger(__name__)


class _Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = _TEXT
    fields: tuple[str, ...] = ()


def _words(error: OSError) -> str:
    """Why an address cannot be listened on. uvloop puts the address, which the message has already, before the
    system's words.
    """
    if error.errno is None or isinstance(error, socket.gaierror):  # the latter has numbers of its own
        return error.strerror or str(error)
    return os.strerror(error.errno)


class HttpServer:
    """Serves metrics and health on `host:port`.

    A connection is closed after its answer. If its request has not come after `patience_s` seconds, it is told so, and
    after twice that it is closed, whatever has been taken of its answer.
    """

    def __init__(
        self,
        listen: str,
        metrics_registry: CollectorRegistry,
        health: Health,
        callers: Callers,
        tls: ssl.SSLContext | None,
        refusals: Refusals,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._address = parse_address(listen)
        self._pages = Pages(metrics_registry)
        self._health = health
        self._callers = callers
        self._tls = tls
        self._refusals = refusals
        self._patience_s = patience_s
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], str] = {}
        """Each with its peer's address, the oldest first."""
        self._waiting: set[asyncio.Task[None] | None] = set()
        """Those that wait for a page of metrics."""

    async def start(self) -> str:
        """Starts to listen and returns the actual `host:port`. Raises ListenError if that is not possible."""
        try:
            # asyncio does not set SO_REUSEPORT unless asked: a taken port is an error here.
            self._server = await asyncio.start_server(
                self._accept,
                *self._address,
                limit=_MAX_HEADER_BYTES,
                ssl=self._tls,
                ssl_handshake_timeout=self._patience_s if self._tls else None,
            )
        except OSError as error:
            raise ListenError("http_listen", str(self._address), _words(error)) from error
        # uvloop does not say that it could make no socket for an address, or not listen on it.
        listening = [each for each in self._server.sockets if each is not None]
        if not listening:
            self._server.close()
            raise ListenError("http_listen", str(self._address), "none of its addresses can be listened on")
        host, port = listening[0].getsockname()[:2]
        return str(Address(host, port))

    async def stop(self) -> None:
        """Stops listening and ends open connections."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()  # what has just been accepted comes to `_accept` all the same
        self._pages.close()
        for connection in self._connections:
            connection.cancel()
        # Not `wait_closed`: from Python 3.12 on it waits for TLS handshakes, too, however long they take.
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Starts to serve a connection. One that was accepted before `stop` and gets here after it is aborted."""
        if self._server is None:
            writer.transport.abort()
            return
        peer = str((writer.get_extra_info("peername") or ("",))[0])
        self._make_room(peer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections[task] = peer

        def end(task: asyncio.Task[None]) -> None:
            self._connections.pop(task, None)
            writer.transport.abort()  # does nothing unless serving was cut short, or never began

        task.add_done_callback(end)

    def _make_room(self, peer: str) -> None:
        """Ends a connection if there would be too many with another one of this peer: one of the peer's own or, if all
        together are too many, one of the peer that has most. It is the oldest that does not wait for a page, or the
        oldest if all do.
        """
        if len(self._connections) < MOST_OF_AN_ADDRESS:
            return
        of_peers = Counter(self._connections.values())
        if of_peers[peer] < MOST_OF_AN_ADDRESS:
            if len(self._connections) < MOST_CONNECTIONS:
                return
            peer = of_peers.most_common(1)[0][0]
        its = [task for task, other in self._connections.items() if other == peer]
        task = next((task for task in its if task not in self._waiting), its[0])
        del self._connections[task]
        task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(2 * self._patience_s):
                await self._converse(reader, writer)
        except OSError as error:  # of the network, of TLS, or a timeout
            logger.debug("an HTTP connection was given up: %s", error)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = "GET"
        try:
            async with asyncio.timeout(self._patience_s):
                first = await reader.readexactly(1)
                head = first if first in _NO_REQUEST else first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return  # nothing came, or not a whole header: a TCP probe, for one
        except asyncio.LimitOverrunError:
            answer = _Answer(431, b"the header is too long\n")
        except TimeoutError:
            answer = _Answer(408, b"no request came\n")
        else:
            method, answer = await self._answer(head.decode("latin-1"))
        fields = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
            *answer.fields,
        ]
        writer.write("\r\n".join([*fields, "", ""]).encode("latin-1") + (b"" if method == "HEAD" else answer.body))
        # Closing with unread bytes, such as the body of a POST, resets the connection and loses the answer: so send
        # EOF, and read until the peer has closed.
        if writer.can_write_eof():  # which TLS cannot
            writer.write_eof()
            while await reader.read(_MAX_HEADER_BYTES):
                continue
        writer.close()
        await writer.wait_closed()

    async def _answer(self, head: str) -> tuple[str, _Answer]:
        """The method of a request and the answer to it."""
        request, *lines = head.split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "GET", _Answer(400, b"not an HTTP/1 request\n")
        method, target, _ = words
        path = target.partition("?")[0]
        if path not in ("/metrics", "/healthz", "/readyz"):
            return method, _Answer(404, b"there are /metrics, /healthz and /readyz\n")
        if method not in ("GET", "HEAD"):
            return method, _Answer(405, b"GET and HEAD only\n", fields=("Allow: GET, HEAD",))
        if path == "/metrics":
            headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            return method, await self._metrics(headers)
        well = self._health.live if path == "/healthz" else self._health.ready
        return method, _Answer(200 if well else 503, f"{self._health.state}\n".encode())

    async def _metrics(self, headers: Sequence[tuple[str, str]]) -> _Answer:
        caller: Caller | None = None
        try:
            caller = self._callers.of_header(next((value for name, value in headers if name == "authorization"), None))
            caller.require("metrics")
        except (Unauthenticated, PermissionDenied) as error:
            name = None if caller is None else caller.name
            self._refusals.note("metrics", error, lambda: request_id("http", headers), name)
            if isinstance(error, Unauthenticated):
                return _Answer(401, f"{error}\n".encode(), fields=("WWW-Authenticate: Bearer",))
            return _Answer(403, f"{error}\n".encode())
        accepted = ",".join(value for name, value in headers if name == "accept").split(",")
        encode, content_type = choose_encoder(",".join(each for each in accepted if not _ODD_VERSION.search(each)))
        task = asyncio.current_task()
        self._waiting.add(task)
        try:
            page = await self._pages.page(content_type, encode)
        finally:
            self._waiting.discard(task)
        if page is None:
            return _Answer(500, b"the metrics could not be read\n")
        return _Answer(200, page, content_type)
