"""How a client verifies its server, and identifies itself: two values, for TLS and for a bearer token.

In: names of files, a token. Out: gRPC's channel credentials, and the metadata that every call carries.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc

Metadata: TypeAlias = tuple[tuple[str, str], ...]
PathLike: TypeAlias = str | os.PathLike[str]

LOOK_INTERVAL_S: Final = 1.0
"""The shortest interval between looks at the certificate files, in seconds: every call asks for one."""

_SCHEME: Final = re.compile(r"(dns|ipv4|ipv6):(//[^/]*/)?")


@dataclass(frozen=True, slots=True)
class TLS:
    """An encrypted connection to a server with a certificate.

        TLS()                                                             gRPC's own list of authorities
        TLS(ca="ca.pem")                                                  your own authorities
        TLS(ca="ca.pem", certificate="client.pem", key="client-key.pem")  mutual TLS
        TLS(ca="ca.pem", server_name="attnserve.example.org")             a server reached by another name

    The files are read when a client is made, and again when they have changed: new calls then use new connections, and
    those in flight end on the old ones. While the files do not fit together, during a rotation, the old ones are used.

    - `ca`: the authorities that may sign the server's certificate, a PEM file. Default: gRPC's own list.
    - `certificate`: the client's certificate, with its chain, a PEM file.
    - `key`: the private key of that certificate, a PEM file.
    - `server_name`: the name that the server's certificate must have. Default: that of the address.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            _check_path("tls", name, getattr(self, name))
        if self.server_name is not None and not _is_name(self.server_name):
            raise ValueError(f"tls: expected a name as server_name, found {self.server_name!r}")
        if (self.certificate is None) != (self.key is None):
            alone = "a key" if self.certificate is None else "a certificate"
            raise ValueError(f"tls: expected both a certificate and its key, or neither, found {alone} alone")


def _is_name(name: object) -> bool:
    """Whether a certificate may have such a name: it is text, and what it is encoded as for a handshake is one, too."""
    try:
        return isinstance(name, str) and name.isprintable() and bool(name.encode("idna"))
    except UnicodeError:
        return False


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token, by which the server identifies the caller.

        Token("attnserve_...")
        Token(file="/run/secrets/attnserve-token")     read again when it changes
        Token("attnserve_...", plaintext=True)         over a network that encrypts by itself, without TLS here

    Without TLS a token is sent to this machine only, unless `plaintext` says otherwise.

    - `value`: the token itself; or use `file`.
    - `file`: the file that holds the token and nothing else.
    - `plaintext`: whether to send it to other machines without TLS.
    """

    value: str | None = field(default=None, repr=False)
    file: str | os.PathLike[str] | None = None
    plaintext: bool = False

    def __post_init__(self) -> None:
        if (self.value is None) == (self.file is None):
            found = "neither" if self.value is None else "both"
            raise ValueError(f"token: expected either the token or a file, found {found}")
        _check_path("token", "file", self.file)
        if self.value is not None:
            _checked(self.value)
        if not isinstance(self.plaintext, bool):
            raise ValueError(f"token: expected True or False as plaintext, found {self.plaintext!r}")


class Identity:
    """The credentials for a client's channels: the files of a `TLS`, as they are now."""

    def __init__(self, tls: TLS | None) -> None:
        """Reads the files. ValueError if one cannot be read or used."""
        self._tls = tls
        files = () if tls is None else (tls.ca, tls.certificate, tls.key)
        self._paths = [Path(file) for file in files if file is not None]
        self._seen = self._look()
        self._next_look = time.monotonic() + LOOK_INTERVAL_S if self._paths else inf
        self._lock = threading.Lock()
        self.credentials = None if tls is None else _channel_credentials(tls)
        """The credentials of a channel; None for an unencrypted one."""

    def changed(self) -> bool:
        """Whether the credentials have changed since this was last asked. Looks at the files at most once per
        `LOOK_INTERVAL_S`; any thread may ask.
        """
        now = time.monotonic()
        if now < self._next_look or not self._lock.acquire(blocking=False):
            return False
        try:
            self._next_look = now + LOOK_INTERVAL_S
            seen = self._look()
            if self._tls is None or seen == self._seen:
                return False
            try:
                credentials = _channel_credentials(self._tls)
            except ValueError:  # they are being replaced: the next look will find the new ones
                return False
            if self._look() != seen:
                return False
            self._seen, self.credentials = seen, credentials
            return True
        finally:
            self._lock.release()

    def _look(self) -> list[object]:
        return [_identity(path) for path in self._paths]


class Bearer:
    """The token that calls carry, as it is now."""

    def __init__(self, token: Token | None) -> None:
        """Reads the token. ValueError if it cannot be read."""
        self._file = None if token is None or token.file is None else Path(token.file)
        self._identity: object = None
        self._metadata: Metadata = ()
        if token is not None and token.value is not None:
            self._metadata = _metadata(token.value)
        elif self._file is not None:
            self._identity = _identity(self._file)
            self._metadata = _metadata(_token_in(self._file))

    @property
    def metadata(self) -> Metadata:
        """The metadata of a call. While the file cannot be read, the last token from it is kept."""
        if self._file is not None and (identity := _identity(self._file)) != self._identity:
            with suppress(ValueError):  # the file is being replaced: the next call looks again
                self._metadata = _metadata(_token_in(self._file))
                self._identity = identity
        return self._metadata


def as_token(token: str | Token | None) -> Token | None:
    """The token, which may be given as a plain string."""
    return token if token is None or isinstance(token, Token) else Token(token)


def is_local(address: str) -> bool:
    """Whether an address is on this machine, judged by its text alone."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = _SCHEME.sub("", address, count=1)
    if (not host.endswith("]") and host.count(":") == 1) or "]:" in host:
        host = host.rpartition(":")[0]
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _check_path(argument: str, name: str, path: Any) -> None:
    """ValueError if what should be a path, or None, is neither. It is not quoted: it may be what the file has."""
    if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
        found = "an empty one" if path == "" else type(path).__name__
        raise ValueError(f"{argument}: expected the path of a file as {name}, found {found}")


def _checked(token: Any) -> str:
    expected = "token: expected visible ASCII characters"
    if not isinstance(token, str) or not token:
        raise ValueError(f"{expected}, found {'none' if token == '' else type(token).__name__}")
    if token.endswith(("\n", "\r")):
        raise ValueError(f"{expected}, found a line break at its end; Token(file=...) reads files")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{expected}, found others")  # never quote the token itself
    return token


def _metadata(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


def _channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    """The credentials for a channel. ValueError if a file cannot be read, has no certificates, or has a key that is not
    the certificate's. gRPC would report some of these as a server that does not answer, and take an empty `ca` for its
    own list of authorities.
    """
    ca, certificate, key = _read(tls.ca), _read(tls.certificate), _read(tls.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca is not None:
        with _used("ca", tls.ca):
            context.load_verify_locations(tls.ca)
    if tls.certificate is not None and tls.key is not None:
        with _used("certificate and key", tls.certificate, tls.key):
            context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")  # never prompt on a terminal
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _read(path: PathLike | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"tls: cannot read {os.fspath(path or '')}: {error.strerror}") from None


@contextmanager
def _used(name: str, *files: PathLike) -> Iterator[None]:
    """Names what cannot be used, by its names in a `TLS`."""
    try:
        yield
    except OSError as error:  # SSLError is one, too
        used = ", ".join(os.fspath(file) for file in files)
        raise ValueError(f"tls: cannot use {used} as {name}: {error.strerror or error}") from None


def _token_in(path: Path) -> str:
    try:
        return _checked(path.read_text("ascii").strip())
    except OSError as error:
        raise ValueError(f"token: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("token: expected visible ASCII characters, found others") from None


def _identity(path: Path) -> object:
    """A value that changes when the file does."""
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
