"""What callers are granted: the file `callers.toml`, read again when it changes.

    [[tokens]]
    name = "ranker"
    roles = ["use"]                     # and "layers", "metrics"
    hash = "sha256:9f86d081..."         # of the token, as `attnserve-server token` prints it

    [[certificates]]
    name = "spiffe://example.org/admin"  # a subject alternative name, or the common name where there is none
    roles = ["use", "layers"]

In: that file. Out: the `Caller` of a token or of a certificate. A name may have several tokens, each with its own
roles: to replace one, add the new one, hand it out, and remove the old. A name is one caller, however it is proved.
"""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from attnserve_server.access.callers import MAX_NAME, Caller, Role
from attnserve_server.access.tokens import digest, parse_hash
from attnserve_server.access.watched import Watched
from attnserve_server.exit_statuses import WRONG_SETTING
from attnserve_server.start_errors import StartError

LOOK_INTERVAL_S: Final = 1.0
"""The file is checked at most this often: a token that is removed works for that much longer."""

_KEY_BYTES: Final = 8


class GrantsError(StartError):
    """The callers file cannot be used. The message says where it is wrong, and quotes no hash."""

    exit_status = WRONG_SETTING


@dataclass(frozen=True, slots=True)
class Grants:
    """Which caller has which token or certificate, and what it may do."""

    tokens: Mapping[bytes, tuple[bytes, Caller]] = field(repr=False)
    """Digests and callers, by the first bytes of the digest."""
    certificates: Mapping[str, Caller]

    def of_token(self, token: str) -> Caller | None:
        """The caller that has a token; None if nobody does.

        The time it takes reveals at most that the digest begins like that of a token: the whole digest is compared in
        constant time, and nobody can search for a token by its digest.
        """
        found = digest(token)
        known = self.tokens.get(found[:_KEY_BYTES])
        return known[1] if known is not None and hmac.compare_digest(known[0], found) else None

    def of_certificate(self, names: Iterable[str]) -> Caller | None:
        """The caller of a certificate with these names: that of the first known name; None if none is known."""
        return next((self.certificates[name] for name in names if name in self.certificates), None)


class GrantsFile:
    """The current grants of a file. If it cannot be read, the previous ones stay."""

    def __init__(self, path: Path, *, certificates: bool) -> None:
        """Reads the file, which may list certificates only if callers are asked for them. Raises GrantsError."""
        self._path = path
        self._certificates = certificates
        self._grants = Watched("the callers file", "the callers stay as they were", [path], self._read, LOOK_INTERVAL_S)

    @property
    def current(self) -> Grants:
        """The grants; another object once they have changed."""
        return self._grants.current

    def reload_failed(self) -> bool:
        """Whether the file has changed and could not be read: then the grants are not what it says."""
        return self._grants.reload_failed()

    def _read(self) -> Grants:
        try:
            grants = parse(self._path.read_text("utf-8"))
            if grants.certificates and not self._certificates:
                raise ValueError("certificates: nobody is asked for one; expected tls_client_ca to be set too")
        except OSError as error:
            raise GrantsError(f"callers: {self._path}: {error.strerror}") from None
        except ValueError as error:  # of TOML and of Unicode, too
            raise GrantsError(f"callers: {self._path}: {error}") from None
        return grants


def parse(text: str) -> Grants:
    """Parses grants from TOML. ValueError says what is wrong with it."""
    document = tomllib.loads(text)
    if unknown := document.keys() - {"tokens", "certificates"}:
        raise ValueError(f"expected [[tokens]] and [[certificates]], found {min(unknown)!r}")
    tokens: dict[bytes, tuple[bytes, Caller]] = {}
    for where, entry in _entries(document, "tokens", {"name", "roles", "hash"}):
        try:
            whole = parse_hash(str(entry["hash"]))
        except ValueError:  # its message would quote the text, which may be a token by mistake
            raise ValueError(f"{where}.hash: expected sha256: and 64 hexadecimal digits") from None
        if whole[:_KEY_BYTES] in tokens:
            raise ValueError(f"{where}.hash: another token has it")
        tokens[whole[:_KEY_BYTES]] = whole, _caller(where, entry)
    certificates: dict[str, Caller] = {}
    for where, entry in _entries(document, "certificates", {"name", "roles"}):
        caller = _caller(where, entry)
        if entry["name"] in certificates:
            raise ValueError(f"{where}.name: another certificate has it")
        certificates[entry["name"]] = caller
    if not tokens and not certificates:  # more likely a half-written file than a server for nobody
        raise ValueError("expected [[tokens]] or [[certificates]], found neither")
    return Grants(tokens, certificates)


def _entries(document: Mapping[str, Any], name: str, keys: set[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables of a list, each with its path. ValueError if one does not have exactly these keys."""
    entries = document.get(name, [])
    if not isinstance(entries, list):
        raise ValueError(f"{name}: expected a list of tables, [[{name}]]")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.keys() != keys:
            raise ValueError(f"{name}[{index}]: expected a table of {', '.join(sorted(keys))}")
        yield f"{name}[{index}]", entry


def _caller(where: str, entry: Mapping[str, Any]) -> Caller:
    name, roles = entry["name"], entry["roles"]
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{where}.name: expected 1 to {MAX_NAME} printable characters, found {name!r}")
    if not isinstance(roles, list) or not roles or not all(role in get_args(Role) for role in roles):
        raise ValueError(f"{where}.roles: expected some of {', '.join(get_args(Role))}, found {roles!r}")
    return Caller(name, frozenset(roles), share=name)
