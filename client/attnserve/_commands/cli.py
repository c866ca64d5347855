"""The command `attnserve`: the service from a shell.

In: arguments. Out: text or JSON on standard output, one line on standard error if it fails (before which gRPC writes
its own where a TLS handshake fails, unless GRPC_VERBOSITY=NONE), and an exit status: 0, 1 if the service could not be
reached or refused, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from grpc import StatusCode

from attnserve._client import Client
from attnserve._commands import bench as _bench
from attnserve._commands.connection_flags import (
    ASK_FOR_CA,
    ASK_FOR_NAME,
    NOT_TLS,
    UNKNOWN_AUTHORITY,
    UsageError,
    add_flags,
    not_empty,
    set_up,
    tls_named,
    tls_of,
    token_of,
)
from attnserve._commands.endpoint import METRICS_PORT
from attnserve._commands.texts import info_text, layers_text, pool_text, room_text
from attnserve._errors import AttnServeError, DeadlineExceededError, PermissionDeniedError, UnavailableError
from attnserve._layers import LOAD_TIMEOUT
from attnserve._settings.config import ANYHOW, DEFAULT_ADDRESS
from attnserve._version import __version__

_METRICS_ADDRESS: Final = f"127.0.0.1:{METRICS_PORT}"
"""The default address of a server's metrics."""
_INTERRUPTED: Final = 130
"""The exit status by convention for a command ended by ctrl-c."""
_NO_CONNECTION: Final = (
    "Failed to connect to remote host",
    "connect failed",
    "connect() timed out",
    "errors resolving",
    "tcp handshaker shutdown",
)
"""What gRPC's messages say where nobody is, or nobody is known: it does not say so in any other way."""
_IPV6: Final = " ipv6:"
"""What they have before an address of that kind."""
_NOT_HTTP_2: Final = ("Failed parsing HTTP/2", "http1.x server")
"""What they say where the answer is HTTP/1, or nothing of the kind: again only they do."""
_NO_HTTP_2: Final = "missing selected ALPN property"
"""What they say where TLS is spoken, and HTTP/2 not offered."""
_OTHER_NAME: Final = "Hostname Verification Check failed"
"""What they say where the server's certificate is of another name."""
_TIMEOUT: Final = 5.0
"""How long to wait, in seconds, unless a command says otherwise."""
_LONGEST: Final = 1e9
"""Seconds: thirty years, which all systems' clocks can wait for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    _be_able_to_print()
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except UsageError as error:
        print(f"attnserve: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of standard output: whatever else can fail has errors of its own
        if not isinstance(error, BrokenPipeError):  # where the reader has enough, as `head` does
            print(f"attnserve: standard output cannot be written: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails at exit
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def _be_able_to_print() -> None:
    """Has a command that nobody listens to, or that has an old terminal, still do its work and tell its status."""
    if sys.stdout is None:  # it was closed by whoever started the command
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the command lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and units, where there is only ASCII


def _ask(parsed: argparse.Namespace) -> int:
    """Asks the service, and prints the answer."""
    try:
        with set_up(Client, parsed, options=parsed.options) as client:
            answer, text = parsed.ask(client, parsed)
    except AttnServeError as error:
        _complain(parsed, error)
        return 1
    _print(parsed, answer, text)
    return 0


def _print(parsed: argparse.Namespace, answer: Any, text: str) -> None:
    print(json.dumps(answer, indent=2) if parsed.json else text, flush=True)


def _complain(parsed: argparse.Namespace, error: Exception, what: str = "") -> None:
    """Prints an error, with the server's address once, and `what` has failed where several things may."""
    said, where = str(error), f"{parsed.address}: "
    if isinstance(error, DeadlineExceededError) and parsed.address in said:  # it says from whom there is no reply
        where = ""
    print(f"attnserve: {where}{what}{said.removeprefix(where)}{_hint(parsed, error)}", file=sys.stderr)


def _hint(parsed: argparse.Namespace, error: Exception) -> str:
    """The flags, or the port, that the server may expect. It does not say why it closes a connection without TLS or a
    certificate; and gRPC says only in the text of an error what else is wrong with what came.
    """
    if isinstance(error, PermissionDeniedError) and error.code is StatusCode.UNAUTHENTICATED:
        return "; --token-file shows a token" if token_of(parsed, os.environ) is None else ""
    if not isinstance(error, UnavailableError):
        return ""
    if not _was_reached(error):
        return _elsewhere(parsed, str(error))
    said = str(error)
    if any(each in said for each in _NOT_HTTP_2):
        return "; no gRPC is spoken there: if it is the HTTP port, gRPC is on another, by default 8001"
    if _NO_HTTP_2 in said:
        return "; that is an HTTP port (gRPC is on another, by default 8001), or a proxy that offers no HTTP/2"
    if UNKNOWN_AUTHORITY in said:
        return ASK_FOR_CA
    if _OTHER_NAME in said:
        return ASK_FOR_NAME
    tls = tls_of(parsed, os.environ)
    if tls is None:
        return "; if it speaks TLS: --tls or --ca"
    if NOT_TLS in said:
        return f"; it speaks no TLS: leave out {tls_named(parsed, os.environ)}"
    return "; if it wants a certificate: --certificate and --key" if tls.certificate is None else ""


def _elsewhere(parsed: argparse.Namespace, said: str) -> str:
    """Where else a server on this machine may be. Of a name with several addresses, gRPC says of one alone why it
    failed: of `localhost`, often that nobody is at ::1, and not what the server at 127.0.0.1 wants.
    """
    name, _, port = parsed.address.rpartition(":")
    return f"; 127.0.0.1:{port} may say more" if name.lower() == "localhost" and _IPV6 in said else ""


def _was_reached(error: UnavailableError) -> bool:
    """Whether something may have accepted the connection, and then have closed it without an answer."""
    looked_up = not isinstance(error.__cause__, OSError)
    return looked_up and not error.details and not any(said in str(error) for said in _NO_CONNECTION)


def _measure(parsed: argparse.Namespace) -> int:
    """Measures the service, and prints the results."""
    try:
        return _ask(parsed)
    except _bench.UnfinishedError as unfinished:
        if unfinished.results is not None:
            _print(parsed, *unfinished.results)
        for failure in unfinished.failures:
            _complain(parsed, failure.error, f"load {failure.load}: ")
    return 1


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flags, which another flag would make ambiguous."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="attnserve",
        description="Query and measure an attention service.",
        epilog="Exit status: 0; 1 if the service cannot be reached, refuses or (health) is not ready; 2 for invalid "
        "arguments; 130 after ctrl-c.",
    )
    parser.add_argument("--version", action="version", version=f"attnserve {__version__}")
    common = _common(_TIMEOUT, "%(default)s")
    patient = _common(None, f"{_TIMEOUT}; to load, {LOAD_TIMEOUT}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, ask, parent, add_own_flags, help_text in (
        ("info", _info, common, None, "show a server's version, device, limits and settings"),
        ("layers", _layers, patient, _add_layer_flags, "list a server's loaded layers, or load or unload some"),
        ("caches", _caches, common, _add_cache_flags, "list the caller's caches on a server, or delete some"),
    ):
        command = commands.add_parser(name, parents=[parent], help=help_text, description=f"{help_text.capitalize()}.")
        command.set_defaults(run=_ask, ask=ask, options=(ANYHOW,))
        if add_own_flags is not None:
            add_own_flags(command)
    bench = commands.add_parser(
        "bench", parents=[common], help="measure a server's speed", description="Measure a server's speed."
    )
    _bench.add_flags(bench, _seconds)
    bench.set_defaults(run=_measure, ask=_loads, options=())
    top = commands.add_parser(
        "top",
        help="show a server's load and latency, live",
        description="Show a server's load and latency, live, from its metrics.",
    )
    top.add_argument(
        "address", nargs="?", default=_METRICS_ADDRESS, help="host, host:port or URL of its HTTP port (%(default)s)"
    )
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="time between readings (%(default)s)"
    )
    top.add_argument("--once", action="store_true", help="print once and exit")
    top.add_argument("--json", action="store_true", help="print JSON once and exit")
    top.add_argument("--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="how long to wait (%(default)s)")
    add_flags(top)
    top.set_defaults(run=_top)
    health = commands.add_parser(
        "health",
        help="check whether a server is ready",
        description="Check a server's health (grpc.health.v1). The exit status is 0 if it is healthy, and 1 if not.",
    )
    health.add_argument("address", nargs="?", default=DEFAULT_ADDRESS, help="host:port or unix:/path (%(default)s)")
    health.add_argument("--live", action="store_true", help="check whether it is alive, ready or not")
    health.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="how long to wait for an answer (%(default)s)"
    )
    health.add_argument(
        "--wait", type=_seconds, metavar="SECONDS", help="wait so long until it is ready, whether it runs yet or not"
    )
    add_flags(health)
    health.set_defaults(run=_health)
    return parser


def _add_layer_flags(command: argparse.ArgumentParser) -> None:
    change = command.add_mutually_exclusive_group()
    change.add_argument(
        "--load",
        type=not_empty,
        metavar="FILE",
        help="load the layers that this file defines, a path in the server's model directory; a layer of the same name "
        "is replaced",
    )
    _add_names(change, "--unload", "unload this one, and others that are named in the same way")
    _add_names(command, "--only", "of the file's layers, load this one, and others that are named in the same way")


def _add_cache_flags(command: argparse.ArgumentParser) -> None:
    _add_names(
        command,
        "--delete",
        "delete this one, and others that are named in the same way; what is not there is counted, and no error; "
        "--delete=NAME for a name that begins with a dash",
    )


def _add_names(command: argparse._ActionsContainer, flag: str, help_text: str) -> None:
    """Adds a flag that may be given several times, each time with a name."""
    command.add_argument(flag, action="append", type=not_empty, default=[], metavar="NAME", help=help_text)


def _common(timeout: float | None, shown: str) -> _Parser:
    """The arguments of commands that ask the service something. The default timeout is given, and as help shows it."""
    common = _Parser(add_help=False)
    common.add_argument("address", nargs="?", default=DEFAULT_ADDRESS, help="host:port or unix:/path (%(default)s)")
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument(
        "--timeout", type=_seconds, default=timeout, metavar="SECONDS", help=f"how long to wait ({shown})"
    )
    add_flags(common)
    return common


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and at most {_LONGEST:g}, found {text!r}")
    return seconds


def _health(parsed: argparse.Namespace) -> int:
    """Asks whether the server is healthy."""
    try:
        with set_up(Client, parsed, retries=0, options=(ANYHOW,)) as client:
            if parsed.wait is not None:
                client.wait_until_ready(timeout=parsed.wait)
            ask = client.is_alive if parsed.live else client.is_ready
            well = ask(timeout=parsed.timeout)
    except AttnServeError as error:
        _complain(parsed, error)
        return 1
    print(("" if well else "not ") + ("alive" if parsed.live else "ready"))
    return 0 if well else 1


def _top(parsed: argparse.Namespace) -> int:
    try:
        from attnserve._commands import top
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in ("rich", "prometheus_client"):
            raise
        print(f"attnserve: top needs {missing.name}: pip install 'attnserve[top]'", file=sys.stderr)
        return 1
    return top.run(parsed)


def _info(client: Client, parsed: argparse.Namespace) -> tuple[Any, str]:
    info = client.server_info(timeout=parsed.timeout)
    return dataclasses.asdict(info), info_text(info)


def _layers(client: Client, parsed: argparse.Namespace) -> tuple[Any, str]:
    timeout = parsed.timeout or _TIMEOUT
    if parsed.only and not parsed.load:
        raise UsageError("--only: expected with --load FILE")
    if parsed.unload:
        client.layers.unload(parsed.unload, timeout=timeout)
        return {"unloaded": sorted(set(parsed.unload))}, f"{len(set(parsed.unload))} unloaded"
    if parsed.load:
        layers = client.layers.load(parsed.load, parsed.only or None, timeout=parsed.timeout or LOAD_TIMEOUT)
    else:
        layers = client.layers.list(timeout=timeout)
    return [dataclasses.asdict(layer) for layer in layers], layers_text(layers)


def _caches(client: Client, parsed: argparse.Namespace) -> tuple[Any, str]:
    pool = client.caches.pool(timeout=parsed.timeout)
    if parsed.delete:
        there = {cache.name for cache in pool.caches}.intersection(parsed.delete)
        client.caches.delete(parsed.delete, timeout=parsed.timeout)
        pool = client.caches.pool(timeout=parsed.timeout)
        answer = {"deleted": sorted(there), "bytes": pool.bytes, "free_bytes": pool.free_bytes}
        return answer, f"{len(there)} of {len(set(parsed.delete))} deleted; {room_text(pool)}"
    return dataclasses.asdict(pool), pool_text(pool)


def _loads(client: Client, parsed: argparse.Namespace) -> tuple[Any, str]:
    return _bench.run(client, parsed.loads, parsed.seconds, parsed.rounds, parsed.open, parsed.timeout)
