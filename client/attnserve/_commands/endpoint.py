"""Fetches a server's metrics: over HTTP or HTTPS, with a token if one is needed.

In: an address, and TLS and a token as for a client. Out: the page of metrics.
"""

from __future__ import annotations

import http.client
import os
import ssl
from contextlib import closing
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from attnserve._commands.connection_flags import ASK_FOR_CA, ASK_FOR_NAME, NOT_TLS
from attnserve._settings.credentials import TLS, Bearer, Token, is_local

METRICS_PORT: Final = 8002
"""The port of a server's metrics, unless it is told another."""
_OTHER_NAMES: Final = (62, 64)
"""OpenSSL's codes for certificates of another name or another IP address (X509_V_ERR_HOSTNAME_MISMATCH and so on)."""
_SAID: Final = 200
"""How many characters of a refusal are quoted in the error."""
_OTHER_PORT: Final = f"; metrics are on the HTTP port, by default {METRICS_PORT}"
"""What may be wrong where something else than HTTP answers."""
_PIECE: Final = 64 * 1024
_LARGEST: Final = 64 * 1024 * 1024
"""The most bytes that are read: more than any page of metrics has."""


class Endpoint:
    """The metrics at `host:port`, at the default port of `host`, or below `http://host:port` or `https://host:port`.

    Files are read at once, the token's again when it changes. `timeout` is in seconds. ValueError says what is wrong.
    """

    def __init__(
        self, address: str, *, tls: TLS | None = None, token: Token | None = None, timeout: float = 10.0
    ) -> None:
        expected = f"address: expected host:port or http://host:port, found {address!r}"
        try:
            url = urlsplit(address if "://" in address else f"//{address}")
            port = url.port
            for each, encoding in ((url.hostname or "", "idna"), (url.path, "ascii")):
                each.encode(encoding)  # as a request will, whose errors would not say what they are about
        except ValueError:
            raise ValueError(expected) from None
        secure = tls is not None or url.scheme == "https"
        if url.hostname is None or url.scheme not in ("", "http", "https"):
            raise ValueError(expected)
        if " " in address or not address.isprintable():
            raise ValueError(expected)
        if tls is not None and url.scheme == "http":
            raise ValueError(f"address: expected https://, as flags or variables ask for TLS, found {address!r}")
        netloc = url.netloc.rpartition("@")[2].removesuffix(":")
        if port is None and not url.scheme:
            port, netloc = METRICS_PORT, f"{netloc}:{METRICS_PORT}"
        self._host, self._port, self._timeout = url.hostname, port, timeout
        self._path = f"{url.path.rstrip('/').removesuffix('/metrics')}/metrics"
        if token is not None and not secure and not token.plaintext and not is_local(self._host):
            raise ValueError(f"token: {address} would get it unencrypted; use TLS, or allow a plaintext token")
        self._tls = (tls or TLS()) if secure else None
        self._context = None if self._tls is None else _context(self._tls)
        self._bearer = Bearer(token)
        self.url: Final = f"{'https' if secure else 'http'}://{netloc}{self._path}"

    def fetch(self) -> str:
        """Fetches the page. OSError if there is none."""
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", self._path, headers=dict(self._bearer.metadata))
                answer = connection.getresponse()
                text = self._read(answer).decode(errors="replace")
        except OSError as error:
            hint = ""
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = ASK_FOR_NAME if error.verify_code in _OTHER_NAMES else ASK_FOR_CA
            elif self._tls is None and isinstance(error, ConnectionResetError):  # as a server that speaks TLS does
                hint = "; if it speaks TLS: https://"
            elif self._tls is not None and (isinstance(error, TimeoutError) or _is_no_tls(error)):
                # A server of plain HTTP takes the handshake for part of a request, and waits for the rest.
                hint = "; if it speaks no TLS: http://, and none of the flags and variables for TLS"
            elif isinstance(error, http.client.RemoteDisconnected):
                hint = _OTHER_PORT
            raise OSError(f"no metrics at {self.url}: {error}{hint}") from None
        except http.client.HTTPException:  # without its text, which is whatever was received, perhaps nothing
            raise OSError(f"no metrics at {self.url}: what is there does not speak HTTP{_OTHER_PORT}") from None
        if answer.status != http.HTTPStatus.OK:
            said = "".join(each if each.isprintable() else " " for each in text[:_SAID]).strip()
            raise OSError(f"no metrics at {self.url}: {answer.status} {said}")
        return text

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        """The whole page. OSError if it comes too late, is too long or is cut short. The timeout is checked here, since
        a socket applies it to each piece alone.
        """
        page, until = bytearray(), monotonic() + self._timeout
        while piece := answer.read1(_PIECE):
            page += piece
            if monotonic() > until or len(page) > _LARGEST:
                raise OSError(f"the page has no end, after {len(page)} bytes")
        if answer.length:
            raise OSError(f"the page ends {answer.length} bytes too soon")
        return bytes(page)

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None or self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return _NamedConnection(self._tls.server_name, self._host, self._port, self._timeout, self._context)


class _NamedConnection(http.client.HTTPSConnection):
    """HTTPS to a server whose certificate may have a name other than the address."""

    def __init__(self, name: str | None, host: str, port: int | None, timeout: float, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._name, self._given = name or host, context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._given.wrap_socket(self.sock, server_hostname=self._name)


def _is_no_tls(error: OSError) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason == NOT_TLS


def _context(tls: TLS) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(os.fspath(path) for path in (tls.ca, tls.certificate, tls.key) if path is not None)
        raise ValueError(f"tls: cannot use {files}: {error.strerror or error}") from None
    return context
