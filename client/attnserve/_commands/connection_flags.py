"""The flags and environment variables that tell a command how to connect.

In: an argument parser, the parsed arguments, the environment. Out: a client, or its `tls` and `token`. A flag overrides
its variable. There is no flag for the token itself: all users of a machine can see each other's command lines.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, TypeVar

from attnserve._settings.credentials import TLS, Token

T = TypeVar("T")

TOKEN_VARIABLE: Final = "ATTNSERVE_TOKEN"
NOT_TLS: Final = "WRONG_VERSION_NUMBER"
"""OpenSSL's reason, also in the messages of gRPC, if a TLS handshake is answered by something that is not TLS."""
UNKNOWN_AUTHORITY: Final = "CERTIFICATE_VERIFY_FAILED"
"""OpenSSL's reason, likewise, if the server's certificate cannot be verified."""
ASK_FOR_CA: Final = "; its certificate is of an authority that is not known here, or has expired: --ca FILE"
ASK_FOR_NAME: Final = "; its certificate has another name: --server-name says which one to accept"
"""The hints where a server's certificate is not accepted."""


class UsageError(ValueError):
    """The command line, or the environment, is invalid."""


class Flag(TypedDict):
    """A flag that takes a value, and its environment variable."""

    variable: str
    metavar: str
    help: str


FLAGS: Final[Mapping[str, Flag]] = {
    "--ca": {
        "variable": "ATTNSERVE_CA",
        "metavar": "FILE",
        "help": "connect over TLS, to a server with a certificate from these authorities",
    },
    "--certificate": {
        "variable": "ATTNSERVE_CLIENT_CERTIFICATE",
        "metavar": "FILE",
        "help": "the client certificate (mutual TLS)",
    },
    "--key": {"variable": "ATTNSERVE_CLIENT_KEY", "metavar": "FILE", "help": "its private key"},
    "--server-name": {
        "variable": "ATTNSERVE_SERVER_NAME",
        "metavar": "NAME",
        "help": "the name in the server's certificate, if not that of the address",
    },
    "--token-file": {
        "variable": "ATTNSERVE_TOKEN_FILE",
        "metavar": "FILE",
        "help": f"a file with the bearer token; or put the token itself into the variable {TOKEN_VARIABLE}",
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the connection flags to a command."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--tls", action="store_true", help="connect over TLS, to a server with a certificate from public authorities"
    )
    for name, flag in FLAGS.items():
        group.add_argument(name, metavar=flag["metavar"], type=not_empty, help=f"{flag['help']} [{flag['variable']}]")
    group.add_argument("--plaintext-token", action="store_true", help="send the token even without TLS")


def set_up(make: Callable[..., T], parsed: argparse.Namespace, **arguments: Any) -> T:
    """Has `make` make something that connects, such as a client: from the address, and from what the command line and
    the environment say about TLS and tokens. UsageError if they are invalid.
    """
    try:
        tls, token = tls_of(parsed, os.environ), token_of(parsed, os.environ)
        return make(parsed.address, tls=tls, token=token, **arguments)
    except ValueError as error:
        raise UsageError(str(error)) from None


def tls_of(parsed: argparse.Namespace, environ: Mapping[str, str]) -> TLS | None:
    """The TLS that the command line and the environment ask for. ValueError if it is incomplete."""
    ca, certificate, key, name = (
        _given(parsed, flag, environ) for flag in ("--ca", "--certificate", "--key", "--server-name")
    )
    if not (parsed.tls or ca or certificate or key or name):
        return None
    return TLS(ca, certificate, key, name)


def tls_named(parsed: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The flags and variables that ask for TLS, in words; empty if none does."""
    names = ["--tls"] if parsed.tls else []
    for flag in ("--ca", "--certificate", "--key", "--server-name"):
        names += [flag] if _flag(parsed, flag) else []
        names += [FLAGS[flag]["variable"]] if environ.get(FLAGS[flag]["variable"]) else []
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def token_of(parsed: argparse.Namespace, environ: Mapping[str, str]) -> Token | None:
    """The token given by the command line or the environment; a token file overrides the variable with a token."""
    if file := _given(parsed, "--token-file", environ):
        return Token(file=file, plaintext=parsed.plaintext_token)
    if value := environ.get(TOKEN_VARIABLE):
        if value.endswith(("\n", "\r")):
            raise ValueError(f"{TOKEN_VARIABLE}: found a line break at its end; --token-file reads files")
        return Token(value, plaintext=parsed.plaintext_token)
    return None


def not_empty(value: str) -> str:
    """The value of a flag. An empty one, as from an unset variable in a script, would leave out what was asked for."""
    if not value:
        raise argparse.ArgumentTypeError("expected a value, found an empty one")
    return value


def _given(parsed: argparse.Namespace, flag: str, environ: Mapping[str, str]) -> str | None:
    return _flag(parsed, flag) or environ.get(FLAGS[flag]["variable"]) or None


def _flag(parsed: argparse.Namespace, flag: str) -> str | None:
    value: str | None = getattr(parsed, flag.removeprefix("--").replace("-", "_"))
    return value
