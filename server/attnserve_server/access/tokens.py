"""Bearer tokens: how they are made and hashed, and the command that makes one.

    attnserve-server token ranker --roles use,layers --out ranker.token >> callers.toml

In: a caller's name and roles. Out: the entry of a new token for `callers.toml` (see `grants`), on standard output; and
the token itself, only this once: in a file that only its owner can read, or else on standard error.

A token is 256 random bits, so a plain SHA-256 is safe: guessing is hopeless, and need not be slowed down. The server
only ever knows the hash.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Final, get_args

from attnserve_server.access.callers import MAX_NAME, Role
from attnserve_server.host import standard_output

PREFIX: Final = "attnserve_"
"""What tokens begin with, so that secret scanners recognise them."""

HASH_PREFIX: Final = "sha256:"
_RANDOM_BYTES: Final = 32


def new_token() -> str:
    """A new random token."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest(token: str) -> bytes:
    """The SHA-256 of a token, whatever characters it consists of."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def format_hash(digest: bytes) -> str:
    """A digest as `callers.toml` has it: `sha256:` and 64 hexadecimal digits."""
    return HASH_PREFIX + digest.hex()


def parse_hash(text: str) -> bytes:
    """The digest in such a text. ValueError if the text is malformed."""
    digits = text.removeprefix(HASH_PREFIX)
    if digits == text or len(digits) != 2 * hashlib.sha256().digest_size:
        raise ValueError(f"{text!r} is not sha256: and 64 hexadecimal digits")
    return bytes.fromhex(digits)


def main(argv: Sequence[str]) -> int:
    """Makes a token; returns the exit status."""
    arguments = _parser().parse_args(argv)
    token = new_token()
    if arguments.out is None:
        print(token, file=sys.stderr)
    else:
        try:
            _write_secret(arguments.out, token)
        except OSError as error:
            print(f"attnserve-server: {arguments.out}: {error.strerror}", file=sys.stderr)
            return 1
    roles = ", ".join(f'"{role}"' for role in arguments.roles)
    entry = f'\n[[tokens]]\nname = "{arguments.name}"\nroles = [{roles}]\nhash = "{format_hash(digest(token))}"'
    try:
        print(entry, flush=True)
    except OSError as error:  # without its entry, the token is of no use
        print(f"attnserve-server: {standard_output.give_up(error)}", file=sys.stderr)
        if arguments.out is not None:
            os.unlink(arguments.out)
        return 1
    return 0


def _write_secret(path: str, token: str) -> None:
    """Writes a new file that nobody else can read at any time. OSError if it already exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnserve-server token",
        description="Make a bearer token. Its entry for callers.toml goes to standard output, the token itself to "
        "--out or standard error.",
        allow_abbrev=False,
    )
    parser.add_argument("name", type=_name, help="the caller's name")
    parser.add_argument(
        "--roles",
        type=_roles,
        default=["use"],
        metavar="ROLE,...",
        help=f"what the caller may do: any of {', '.join(get_args(Role))}. Default: use",
    )
    parser.add_argument("--out", metavar="FILE", help="write the token to this new file. Default: standard error")
    return parser


def _name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_NAME or set(text) & set('"\\'):
        expected = f"1 to {MAX_NAME} printable characters, none of them a quote or a backslash"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return text


def _roles(text: str) -> list[str]:
    roles = text.split(",")
    if unknown := [role for role in roles if role not in get_args(Role)]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(get_args(Role))}, found {unknown[0]!r}")
    return roles
