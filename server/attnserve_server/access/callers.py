"""Who calls, and what they may do.

In: the context of an RPC. Out: a `Caller`, resolved once per RPC (per stream, not per call on it), which is passed to
the readers of requests and the services, and by whose `share` the queue counts.

A caller proves who it is by a bearer token or by its certificate (mutual TLS); the callers file says what it may do
(see `grants`). Without that file, any caller with a certificate may use the service, and where none are asked for,
anybody may do everything.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from grpc import aio

from attnserve_server.errors import PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from attnserve_server.access.grants import Grants, GrantsFile

Role: TypeAlias = Literal["use", "layers", "metrics"]
"""What a caller may do: use the service; load and unload layers; read the metrics."""

ALL_ROLES: Final[frozenset[Role]] = frozenset(get_args(Role))

MAX_NAME: Final = 256
"""The longest name of a caller, in characters."""

_SCHEME: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request."""

    name: str | None
    """None where callers are not identified. Caches belong to a name."""
    roles: frozenset[Role]
    share: Hashable
    """By what callers that compete are told apart: the name, or else the connection, except on a unix socket, where
    gRPC gives all connections the same address.
    """

    def require(self, *roles: Role) -> None:
        """Raises PermissionDenied if the caller has none of the roles."""
        if self.roles.isdisjoint(roles):
            needed = " or ".join(roles)
            raise PermissionDenied(f"the caller lacks the role {needed}", "ROLE_MISSING", role=needed)


@lru_cache(4096)
def anybody(peer: str) -> Caller:
    """The caller at the other end of a connection, if callers are not identified: all may do everything."""
    return Caller(None, ALL_ROLES, peer)


@lru_cache(4096)
def certified(name: str) -> Caller:
    """The caller with a certificate of that name, if no file says what it may do."""
    return Caller(name, frozenset({"use"}), name)


class Callers:
    """Identifies callers: by a callers file, by certificates, by both, or (without `grants` and `certificates`)
    not at all.
    """

    def __init__(self, grants: GrantsFile | None, *, certificates: bool) -> None:
        self._grants = grants
        self._certificates = certificates

    @property
    def edition(self) -> object:
        """The same object for as long as no caller's permissions change: when it is another, callers that stay
        connected are checked again.
        """
        return None if self._grants is None else self._grants.current

    def identify(self, context: aio.ServicerContext[Any, Any]) -> Caller:
        """Who makes an RPC. Raises Unauthenticated, or PermissionDenied if nothing is granted to it."""
        if self._grants is not None:
            return self._granted(self._grants.current, context)
        if self._certificates:
            return certified(_names(context)[0])
        return anybody(context.peer())

    def of_header(self, authorization: str | None) -> Caller:
        """Who makes an HTTP request with this header. Raises Unauthenticated.

        Without a callers file it is anybody, who may do everything.
        """
        return anybody("") if self._grants is None else _of_token(self._grants.current, authorization)

    def _granted(self, grants: Grants, context: aio.ServicerContext[Any, Any]) -> Caller:
        metadata = context.invocation_metadata() or ()
        authorization = next((value for key, value in metadata if key == "authorization"), None)
        if authorization is None and self._certificates:
            names = _names(context)
            caller = grants.of_certificate(names)
            if caller is None:
                raise PermissionDenied(f"no role is granted to {names[0]!r}", "UNKNOWN_CERTIFICATE")
            return caller
        return _of_token(grants, authorization)


def _of_token(grants: Grants, authorization: str | bytes | None) -> Caller:
    """The caller that the value of an `authorization` field proves. Raises Unauthenticated."""
    if authorization is None:
        raise Unauthenticated("there is no token: authorization: Bearer TOKEN", "NO_TOKEN")
    text = authorization if isinstance(authorization, str) else authorization.decode("latin-1")
    if text[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("authorization is not of the form: Bearer TOKEN", "NO_TOKEN")
    caller = grants.of_token(text[len(_SCHEME) :].strip())
    if caller is None:
        raise Unauthenticated("the token is not known", "UNKNOWN_TOKEN")
    return caller


def _names(context: aio.ServicerContext[Any, Any]) -> list[str]:
    """The names in a caller's certificate: its subject alternative names, or else its common name."""
    names = [name.decode("utf-8", "backslashreplace") for name in context.peer_identities() or () if name]
    if not names:  # gRPC gives an empty common name for a certificate without names
        raise Unauthenticated("the certificate has no name", "NO_NAME")
    return names
