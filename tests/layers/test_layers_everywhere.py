"""Layers loaded and unloaded through a client that knows several servers: on each of them, whatever others answer."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import grpc
import pytest
from conftest import POOL, Server, served
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from safetensors.torch import save_file
from scores import BROKEN, X, expected, weight, write

from attnserve import AsyncClient, Client, InvalidRequestError, NotFoundError, UnavailableError
from attnserve._errors import error_from_status
from attnserve._layers import _Answers

Ask: TypeAlias = Callable[..., Any]


class Kept(NamedTuple):
    """A server, and its model directory."""

    server: Server
    directory: Path

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def names(self) -> list[str]:
        """The names of its layers."""
        with Client(self.address) as client:
            return [layer.name for layer in client.layers.list()]

    @property
    def versions(self) -> list[int]:
        """Their versions, in the order of their names."""
        with Client(self.address) as client:
            return [layer.version for layer in client.layers.list()]


@contextmanager
def keeping(root: Path) -> Iterator[Kept]:
    """A server with a model directory of its own."""
    directory = root / "models"
    directory.mkdir()
    with served(("--device", "cpu", *POOL, "--model-directory", str(directory)), root) as server:
        yield Kept(server, directory)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kept, Kept]]:
    """Two servers, which tests share."""
    with keeping(tmp_path_factory.mktemp("first")) as first, keeping(tmp_path_factory.mktemp("second")) as second:
        yield first, second


@pytest.fixture
def first_and_second(both: tuple[Kept, Kept]) -> tuple[Kept, Kept]:
    """The two, with their definitions as they were, and no layers."""
    for kept in both:
        write(kept.directory)
        with Client(kept.address) as client:
            if names := kept.names:
                client.layers.unload(names)
    return both


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where no server listens, and none can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def ask_in_a_thread(addresses: Sequence[str], method: str, *arguments: Any, **options: Any) -> Any:
    with Client(addresses) as client:
        return getattr(client.layers, method)(*arguments, **options)


def ask_in_a_task(addresses: Sequence[str], method: str, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(lambda: list(addresses)) as client:
            return await getattr(client.layers, method)(*arguments, **options)

    return asyncio.run(run())


@pytest.fixture(params=[ask_in_a_thread, ask_in_a_task], ids=["Client", "AsyncClient"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Asks the layers of a client that knows some servers."""
    function: Ask = request.param
    return function


def test_every_server_loads_and_unloads(ask: Ask, first_and_second: tuple[Kept, Kept]) -> None:
    first, second = first_and_second
    addresses = [first.address, second.address]
    layers = ask(addresses, "load", "layers.toml")
    assert [layer.name for layer in layers] == first.names == second.names == ["one", "two"]
    before = first.versions, second.versions
    for kept in first_and_second:
        save_file({"weight": weight(3.0)}, kept.directory / "one.safetensors")
    (one,) = ask(addresses, "load", "layers.toml", "one")
    assert first.versions == [max(before[0]) + 1, before[0][1]]
    assert second.versions == [max(before[1]) + 1, before[1][1]]
    assert one.version == first.versions[0]  # as the first of them describes it
    with Client(addresses) as client:
        for _ in range(8):  # wherever a call goes
            assert abs(client.apply("one", X).output - expected(X, 3.0)).max() < 1e-5
    ask(addresses, "unload", ["one"])
    assert first.names == second.names == ["two"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_out_of_reach_is_named_once_the_others_were_asked(
    ask: Ask, first_and_second: tuple[Kept, Kept], nobody: str, place: int
) -> None:
    kept = first_and_second[0]
    addresses = [kept.address]
    addresses.insert(place, nobody)
    with pytest.raises(UnavailableError, match=f"^{nobody}: ") as caught:
        ask(addresses, "load", "layers.toml")
    assert kept.address not in str(caught.value)
    assert kept.names == ["one", "two"]
    with pytest.raises(UnavailableError, match=f"^{nobody}: "):
        ask(addresses, "unload", "one")
    assert kept.names == ["two"]
    # Asked again, the other server no longer has it. That does not hide that one is out of reach.
    with pytest.raises(UnavailableError, match=f"{nobody}: ") as caught:
        ask(addresses, "unload", "one")
    assert re.search(f"{kept.address}: .*'one'", str(caught.value))


def test_a_definition_that_is_wrong_on_one_server(ask: Ask, first_and_second: tuple[Kept, Kept]) -> None:
    first, second = first_and_second
    addresses = [first.address, second.address]
    definitions, found = BROKEN["a wrong shape"]
    right = (first.directory / "layers.toml").read_text()
    (first.directory / "layers.toml").write_text(definitions)
    with pytest.raises(InvalidRequestError, match=rf"^{first.address}: definitions: .*{found}") as caught:
        ask(addresses, "load", "layers.toml")
    assert second.address not in str(caught.value)
    assert (caught.value.field, caught.value.reason) == ("definitions", "INVALID_FIELD")
    assert (first.names, second.names) == ([], ["one", "two"])
    (first.directory / "layers.toml").write_text(right)
    ask(addresses, "load", "layers.toml")
    assert first.names == second.names == ["one", "two"]


def test_what_several_servers_say_alike_is_said_once(ask: Ask, first_and_second: tuple[Kept, Kept]) -> None:
    addresses = [kept.address for kept in first_and_second]
    with pytest.raises(NotFoundError, match=f"^{addresses[0]}, {addresses[1]}: .*'one'$") as caught:
        ask(addresses, "unload", "one")
    assert caught.value.name == "one"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_the_error_of_several_servers_is_that_of_one(code: grpc.StatusCode) -> None:
    """Its class, and all that a program may ask of it."""
    status = Status(code=code.value[0], message="because")
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason="WHY", metadata={"name": "one", "limit": "max_layers"})
    )
    of_one = error_from_status(status, resent=True)
    answers: _Answers[None] = _Answers()
    with answers.of("a:1"):
        raise of_one
    with answers.of("b:1"):
        answers.add(None)
    with pytest.raises(type(of_one), match=r"^a:1: because$") as caught:
        answers.first()
    assert vars(caught.value) == vars(of_one)
    assert caught.value.__cause__ is of_one
