"""What answers the RPCs about layers, without a server: what the registry does is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnserve.v1 import layers_pb2
from attnserve_server.errors import ComputationFailed
from attnserve_server.rpc.layer_service import LayerService

LOAD = layers_pb2.LayerServiceLoadRequest(definitions="layers.toml")


def answers(registry: Any, let_go: list[None]) -> dict[str, Any]:
    """What answers each RPC, and adds to a list when the memory of something large is let go."""
    made: dict[str, Any] = {}
    rpcs: Any = SimpleNamespace(answering=lambda name, message, answer, *roles: made.setdefault(name, answer))
    memory: Any = SimpleNamespace(let_go=lambda: let_go.append(None))
    server: Any = SimpleNamespace(add_generic_rpc_handlers=lambda handlers: None)
    LayerService(registry, rpcs, lambda: None, memory, administration=True).register(server)
    return made


async def test_a_failure_of_the_servers_own_is_not_said_to_be_of_the_device() -> None:
    class Broken:
        max_layers = 1

        async def load(self, definitions: str, names: list[str]) -> Any:
            raise TypeError(f"nothing for callers: {definitions}, {names}")

    with pytest.raises(ComputationFailed, match=r"the layers could not be loaded$"):
        await answers(Broken(), [])["load_layers"](None, LOAD)


async def test_the_memory_of_layers_that_are_gone_is_given_back_before_long() -> None:
    class Empty:
        max_layers = 1

        async def load(self, definitions: str, names: list[str]) -> list[Any]:
            return []

        def unload(self, names: list[str]) -> None:
            pass

    let_go: list[None] = []
    made = answers(Empty(), let_go)
    await made["load_layers"](None, LOAD)
    assert len(let_go) == 1, "others may have been replaced"
    made["unload_layers"](None, layers_pb2.LayerServiceUnloadRequest(names=["one"]))
    assert len(let_go) == 2
