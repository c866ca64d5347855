"""The command `attnserve`: what a caller does from a shell.

In: arguments. Out: text or JSON on standard output, one line on standard error where it fails, and an exit status: 0,
1 if the service could not be asked, 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from attnserve._client import Client
from attnserve._config import DEFAULT_ADDRESS
from attnserve._errors import AttnServeError
from attnserve._info import ServerInfo
from attnserve._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnserve", description="Talk to an attention service.")
    parser.add_argument("--version", action="version", version=f"attnserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what a server is", description="Say what a server is.")
    info.add_argument("address", nargs="?", default=DEFAULT_ADDRESS, help="host:port or unix:/path (%(default)s)")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="how long to wait (%(default)s)")
    info.set_defaults(run=_info)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, found {text}")
    return seconds


def _info(arguments: argparse.Namespace) -> int:
    try:
        with Client(arguments.address) as client:
            info = client.server_info(timeout=arguments.timeout)
    except AttnServeError as error:
        print(f"attnserve: {arguments.address}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(info), indent=2) if arguments.json else _text(info))
    return 0


def _text(info: ServerInfo) -> str:
    """The information, one thing a line."""
    rows = [
        ("version", info.version),
        ("device", f"{info.device} ({info.device_name})" if info.device_name else info.device),
        ("torch", info.torch_version),
        ("threads", str(info.threads)),
        ("dtypes", ", ".join(info.dtypes)),
        ("features", ", ".join(info.features)),
        *((name, f"{limit:,}") for name, limit in dataclasses.asdict(info.limits).items()),
        *((f"kernel {kernel.name}", kernel.description) for kernel in info.kernels),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


if __name__ == "__main__":
    sys.exit(main())
