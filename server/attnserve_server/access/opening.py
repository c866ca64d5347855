"""Opens what decides who may call, according to a configuration: the callers file and the certificates.

In: a configuration. Out: `Access`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from attnserve_server.access.callers import Callers
from attnserve_server.access.grants import GrantsFile
from attnserve_server.access.tls import ServerTls
from attnserve_server.settings.config import Config


class Access(NamedTuple):
    """Who the callers of a server are, and its certificates, None if it serves without TLS. `reloads` has, for each
    kind of file that is read again when it changes, a function that tells whether that failed.
    """

    callers: Callers
    tls: ServerTls | None
    reloads: Mapping[str, Callable[[], bool]]


def open_access(config: Config) -> Access:
    """The access of a configuration. Raises TlsError, and GrantsError if the callers file cannot be used."""
    tls = None
    if config.tls_certificate:
        client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
        tls = ServerTls(Path(config.tls_certificate), Path(config.tls_key), client_ca)
    certificates = bool(config.tls_client_ca)
    grants = GrantsFile(Path(config.callers), certificates=certificates) if config.callers else None
    files = (("callers", grants), ("tls", tls))
    reloads = {name: each.reload_failed for name, each in files if each is not None}
    return Access(Callers(grants, certificates=certificates), tls, reloads)
