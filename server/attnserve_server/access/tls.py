"""TLS: the server's certificate and the authorities that it trusts, read again when the files change.

In: PEM files. Out: credentials for the gRPC port, a context for the HTTP port, and when the certificate expires; all
use new files from the next connection or question on. If new files are not valid (a key that does not match the
certificate, in the middle of a rotation), the old ones stay in use.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from attnserve_server.access.watched import Watched
from attnserve_server.exit_statuses import WRONG_SETTING
from attnserve_server.start_errors import StartError

logger = logging.getLogger(__name__)


_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's flag (X509_V_FLAG_NO_CHECK_TIME) to accept certificates at any time, which Python has no name for."""


class TlsError(StartError):
    """The certificate, the key or the authorities cannot be used."""

    exit_status = WRONG_SETTING


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The contents of the files, in the forms that the two ports need."""

    grpc: grpc.ServerCertificateConfiguration = field(repr=False)
    http: ssl.SSLContext
    expiry: float


class ServerTls:
    """The TLS of a server."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Reads the files. With `client_ca`, callers need certificates from these authorities. Raises TlsError."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        paths = [path for path in (certificate, key, client_ca) if path is not None]
        self._loaded = Watched("the certificate", "the previous one stays in use", paths, self._load)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for one address of the gRPC port."""
        with self._lock:
            given = self._loaded.current

        def fetch() -> Any:  # None means unchanged, which the stubs do not know
            nonlocal given
            with self._lock:
                before, given = given, self._loaded.current
                return None if given is before else given.grpc

        return grpc.dynamic_ssl_server_credentials(given.grpc, fetch, self._client_ca is not None)

    def http_context(self) -> ssl.SSLContext:
        """A context for the HTTP port, which asks for no certificates: probes have none."""

        def choose(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
            with self._lock:
                connection.context = self._loaded.current.http

        context = _context(self._certificate, self._key)
        context.sni_callback = choose  # it is called whether or not the peer names a server
        return context

    def expiry(self) -> float:
        """When the certificate expires, in seconds since 1970; NaN if that cannot be told."""
        with self._lock:
            return self._loaded.current.expiry

    def reload_failed(self) -> bool:
        """Whether the files have changed and could not be used: then those before are still in use."""
        with self._lock:
            return self._loaded.reload_failed()

    def _load(self) -> _Loaded:
        pair = _read("tls_key", self._key), _read("tls_certificate", self._certificate)
        try:
            # This checks the key against the certificate, which gRPC does only when the first caller connects.
            context = _context(self._certificate, self._key)
        except (ssl.SSLError, OSError) as error:  # the latter if they have been removed meanwhile
            files = f"tls_certificate and tls_key ({self._certificate}, {self._key})"
            reason = "not a certificate and its key, both PEM and not encrypted"
            raise TlsError(f"{files}: {reason}{_reason(error)}") from None
        authorities = None
        if self._client_ca is not None:
            authorities = _read("tls_client_ca", self._client_ca)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self._client_ca)
            except (ssl.SSLError, OSError) as error:
                raise TlsError(f"tls_client_ca ({self._client_ca}): not certificates in PEM{_reason(error)}") from None
        expiry = _expiry(context, self._certificate)
        if expiry < time.time():
            logger.warning(
                "the certificate has expired: callers will refuse it", extra={"certificate": self._certificate}
            )
        return _Loaded(grpc.ssl_server_certificate_configuration([pair], authorities), context, expiry)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{setting} ({path}): {error.strerror}") from None


def _reason(error: OSError) -> str:
    """The reason that OpenSSL or the system gives, if any."""
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return f" ({reason})" if reason else ""


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def _expiry(context: ssl.SSLContext, certificate: Path) -> float:
    """When the certificate of a context expires; NaN if that cannot be told.

    Python tells it only of a peer whose certificate it has verified: so this shows the certificate to such a peer.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    to_server, to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        trusting.load_verify_locations(certificate)
        server = context.wrap_bio(to_server, to_peer, server_side=True)
        peer = trusting.wrap_bio(to_peer, to_server)
        for end in (peer, server, peer):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
        return float(ssl.cert_time_to_seconds(str((peer.getpeercert() or {})["notAfter"])))
    except (ssl.SSLError, OSError, KeyError, ValueError):
        return math.nan


def _no_password() -> str:
    """Makes an encrypted key an error, instead of a prompt on the terminal."""
    return ""
