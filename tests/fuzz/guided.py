"""Coverage-guided fuzzing: atheris keeps the inputs that reach new code, and mutates those.

`python guided.py codec|server [libFuzzer's flags]`. The first byte of an input selects the message type or the RPC for
the rest. The server runs in this process, because coverage is measured there, and is called over a real socket.
The seed corpus is made by `sound`. libFuzzer ends the process: with 0 after `-runs` inputs, or else on a finding, which
it writes below `-artifact_prefix`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

MAX_BYTES = {"codec": 1024, "server": 4096}
"""The longest inputs. For the codec, longer ones reach nothing new and take longer."""
ROUND = 2000


def codec() -> tuple[list[Any], list[bytes], Callable[[Any, bytes], None]]:
    """Message types; seeds; the function that tests an input."""
    with atheris.instrument_imports(include=["attnserve._fields", "attnserve._wire"]):
        from attnserve import _wire  # noqa: F401 (the one that is watched)
    from random_codec import MESSAGE_TYPES, SEEDS, check

    return MESSAGE_TYPES, [bytes([MESSAGE_TYPES.index(kind)]) + data for kind, data in SEEDS], check


def server() -> tuple[list[Any], list[bytes], Callable[[Any, bytes], None]]:
    """RPCs; seeds; the function that tests an input."""
    with atheris.instrument_imports(include=["attnserve_server", "attnserve._fields", "attnserve._wire"]):
        from attnserve_server.server import Server, configured_device
    import checkpoints
    import grpc
    from random_service import FLAGS, Attack
    from sound import METHODS

    from attnserve_server.observability import logs
    from attnserve_server.settings import command_line

    logs.configure("error", "text")
    directory = Path(tempfile.mkdtemp())
    checkpoints.write(directory)
    flags = (*FLAGS, "--layers", str(directory / "layers.toml"), "--listen", "127.0.0.1:0")
    config = command_line.load((*flags, "--http-listen", "127.0.0.1:0"), {})
    ready: list[str] = []
    is_ready = threading.Event()

    async def serve() -> None:
        server = Server(config, configured_device)  # it lives for as long as something refers to it
        address, _ = await server.start()
        ready.append(address)
        is_ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
    assert is_ready.wait(300)
    attack = Attack(grpc.insecure_channel(ready[0]), Random(0))
    attack.prepare()
    # Loading is slow, and only reads files, which no caller sends.
    methods = [name for name in METHODS if name not in ("LayerService/Load", "LayerService/Unload")]
    inputs = 0

    def send(method: str, data: bytes) -> None:
        nonlocal inputs
        inputs += 1
        if inputs % ROUND == 0:
            attack.prepare()
        attack.send(method, data)

    seeds = [bytes([methods.index(name)]) + data for name in methods for data in attack.seeds(name)]
    return methods, seeds, send


def main() -> None:
    """Fuzzes until libFuzzer ends the process."""
    kinds, seeds, take = {"codec": codec, "server": server}[sys.argv[1]]()
    from mutation import mutated
    from sound import METHODS

    def one(data: bytes) -> None:
        if data:
            take(kinds[data[0] % len(kinds)], data[1:])

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if not data or random.random() < 0.4:
            other: bytes = atheris.Mutate(data, max_size)
            return other
        kind = kinds[data[0] % len(kinds)]
        message_type = METHODS[kind].request if isinstance(kind, str) else kind
        return (data[:1] + mutated(random, message_type, data[1:], random.choice(seeds)))[:max_size]

    corpus = Path(tempfile.mkdtemp())
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    arguments = [sys.argv[0], *sys.argv[2:], f"-max_len={MAX_BYTES[sys.argv[1]]}", "-timeout=120", str(corpus)]
    atheris.Setup(arguments, one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
