"""The command `attnserve`: what a caller does from a shell.

In: arguments. Out: text or JSON on standard output, one line on standard error where it fails, and an exit status: 0,
1 if the service could not be asked or refuses, 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from attnserve._client import Client
from attnserve._config import DEFAULT_ADDRESS
from attnserve._errors import AttnServeError
from attnserve._info import ServerInfo
from attnserve._layers import Layer
from attnserve._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        with Client(parsed.address) as client:
            answer, text = parsed.ask(client, parsed.timeout)
    except AttnServeError as error:
        print(f"attnserve: {parsed.address}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2) if parsed.json else text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnserve", description="Talk to an attention service.")
    parser.add_argument("--version", action="version", version=f"attnserve {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("address", nargs="?", default=DEFAULT_ADDRESS, help="host:port or unix:/path (%(default)s)")
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="how long to wait (%(default)s)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, ask, help_text in (
        ("info", _info, "what a server is"),
        ("layers", _layers, "the layers that a server holds"),
    ):
        command = commands.add_parser(name, parents=[common], help=help_text, description=f"Say {help_text}.")
        command.set_defaults(ask=ask)
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, found {text}")
    return seconds


def _info(client: Client, timeout: float) -> tuple[Any, str]:
    info = client.server_info(timeout=timeout)
    return dataclasses.asdict(info), _text(info)


def _layers(client: Client, timeout: float) -> tuple[Any, str]:
    layers = client.layers.list(timeout=timeout)
    return [dataclasses.asdict(layer) for layer in layers], _table(layers)


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


def _table(layers: Sequence[Layer]) -> str:
    """The layers, one a line: names and words to the left, numbers to the right, and nothing for what a layer lacks."""
    if not layers:
        return "no layers are loaded"
    titles = (
        "name",
        "kind",
        "dtype",
        "parameters",
        "bytes",
        "version",
        "input",
        "context",
        "output",
        "heads",
        "blocks",
    )
    rows = [titles, *map(_row, layers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(layer: Layer) -> tuple[str, ...]:
    heads = f"{layer.query_heads}" if layer.kv_heads == layer.query_heads else f"{layer.query_heads}/{layer.kv_heads}"
    return (
        layer.name,
        f"{layer.kind}, causal" if layer.causal else layer.kind,
        layer.dtype,
        f"{layer.parameters:,}",
        f"{layer.bytes:,}",
        str(layer.version),
        "token ids" if layer.vocabulary else str(layer.input_width),
        str(layer.context_width or ""),
        str(layer.output_width),
        f"{heads} × {layer.head_dim}",
        str(layer.blocks or ""),
    )


if __name__ == "__main__":
    sys.exit(main())
