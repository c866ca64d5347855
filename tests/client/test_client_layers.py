"""Layers of a server, listed, loaded and unloaded by both clients and from a shell, against a fake peer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
import pytest
from peers import good, peer

from attnserve import (
    AsyncClient,
    Client,
    ClientClosedError,
    FailedPreconditionError,
    InvalidRequestError,
    Layer,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    ServerError,
    UnavailableError,
)
from attnserve._commands import cli
from attnserve.v1 import layers_pb2 as pb
from attnserve.v1 import tensor_pb2

SERVICE = "attnserve.v1.LayerService"

ENCODER = pb.Layer(
    name="minilm",
    kind="transformer",
    dtype=tensor_pb2.DATA_TYPE_FLOAT32,
    parameters=22_713_216,
    bytes=90_852_864,
    version=3,
    output_width=384,
    num_query_heads=12,
    num_kv_heads=12,
    head_dim=32,
    blocks=6,
    vocabulary=30_522,
    value_dim=32,
    positions=512,
)
CROSS = pb.Layer(
    name="decoder/cross",
    kind="multi_head",
    dtype=tensor_pb2.DATA_TYPE_BFLOAT16,
    parameters=4_096,
    bytes=8_192,
    version=2,
    input_width=64,
    context_width=96,
    output_width=64,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=16,
    causal=True,
    value_dim=24,
)
ABSENT_AS_0 = ("input_width", "context_width", "blocks", "vocabulary", "positions")
"""The fields that are 0 on the wire where a layer has none."""

Ask: TypeAlias = Callable[..., Any]


class Shelf:
    """A peer's layers: the requests that it gets and its replies."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refusal: grpc.StatusCode | None = None
        self.layers = {layer.name: pb.Layer.FromString(layer.SerializeToString()) for layer in (CROSS, ENCODER)}

    def methods(self) -> dict[str, Any]:
        return {"List": self.list, "Get": self.get, "Load": self.load, "Unload": self.unload}

    def _take(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        if self.refusal is not None:
            context.abort(self.refusal, "because")
        return request

    def list(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        self._take(pb.LayerServiceListRequest.FromString(message), context)
        return pb.LayerServiceListResponse(layers=self.layers.values()).SerializeToString()

    def get(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = self._take(pb.LayerServiceGetRequest.FromString(message), context)
        if request.name not in self.layers:
            context.abort(grpc.StatusCode.NOT_FOUND, "no layer of that name")
        return pb.LayerServiceGetResponse(layer=self.layers[request.name]).SerializeToString()

    def load(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = self._take(pb.LayerServiceLoadRequest.FromString(message), context)
        names = request.names or self.layers
        return pb.LayerServiceLoadResponse(layers=[self.layers[name] for name in names]).SerializeToString()

    def unload(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        request = self._take(pb.LayerServiceUnloadRequest.FromString(message), context)
        for name in request.names:
            del self.layers[name]
        return pb.LayerServiceUnloadResponse().SerializeToString()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def address(shelf: Shelf) -> Iterator[str]:
    with peer(good, None, {SERVICE: shelf.methods()}) as address:
        yield address


def ask_in_a_thread(address: str, method: str, *arguments: Any, **options: Any) -> Any:
    with Client(address) as client:
        return getattr(client.layers, method)(*arguments, **options)


def ask_in_a_task(address: str, method: str, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(address) as client:
            return await getattr(client.layers, method)(*arguments, **options)

    return asyncio.run(run())


@pytest.fixture(params=[ask_in_a_thread, ask_in_a_task], ids=["Client", "AsyncClient"])
def ask(request: pytest.FixtureRequest) -> Ask:
    function: Ask = request.param
    return function


def plain(layer: pb.Layer) -> dict[str, Any]:
    """A layer's fields, read one by one, with the usual name of its dtype; None for what it lacks."""
    fields = {field.name: getattr(layer, field.name) for field in pb.Layer.DESCRIPTOR.fields}
    fields |= {name: fields[name] or None for name in ABSENT_AS_0}
    return fields | {"dtype": tensor_pb2.DataType.Name(layer.dtype).removeprefix("DATA_TYPE_").lower()}


def test_list(ask: Ask, address: str) -> None:
    layers = ask(address, "list")
    assert all(isinstance(layer, Layer) for layer in layers)
    assert [dataclasses.asdict(layer) for layer in layers] == [plain(CROSS), plain(ENCODER)]


def test_get(ask: Ask, address: str) -> None:
    layer = ask(address, "get", "minilm")
    assert dataclasses.asdict(layer) == plain(ENCODER)
    assert (layer.dtype, layer.bytes, layer.causal) == ("float32", 90_852_864, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.name = "mine"
    with pytest.raises(NotFoundError, match="no layer of that name"):
        ask(address, "get", "maxilm")


def test_what_a_layer_lacks_is_none(ask: Ask, address: str) -> None:
    encoder, cross = ask(address, "get", "minilm"), ask(address, "get", "decoder/cross")
    assert (encoder.input_width, encoder.context_width) == (None, None)
    assert (cross.blocks, cross.vocabulary, cross.positions) == (None, None, None)


def test_load(ask: Ask, address: str, shelf: Shelf) -> None:
    assert [layer.name for layer in ask(address, "load", "layers.toml")] == ["decoder/cross", "minilm"]
    assert [layer.name for layer in ask(address, "load", "layers.toml", None)] == ["decoder/cross", "minilm"]
    assert [layer.name for layer in ask(address, "load", "a/b.toml", ("minilm",))] == ["minilm"]
    assert [layer.name for layer in ask(address, "load", "a/b.toml", names="minilm")] == ["minilm"]
    asked = [(request.definitions, list(request.names)) for request in shelf.requests]
    assert asked == [("layers.toml", [])] * 2 + [("a/b.toml", ["minilm"]), ("a/b.toml", ["minilm"])]


def test_unload(ask: Ask, address: str, shelf: Shelf) -> None:
    ask(address, "unload", "minilm")
    assert list(shelf.layers) == ["decoder/cross"]
    ask(address, "unload", ["decoder/cross"])
    assert shelf.layers == {}
    assert ask(address, "list") == ()


@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("get", ("",), "name"),
        ("get", (3,), "name"),
        ("load", (None,), "definitions"),
        ("load", ("layers.toml", ["minilm", ""]), "names"),
        ("load", ("layers.toml", []), "names"),
        ("load", ("layers.toml", iter(())), "names"),
        ("unload", ([1],), "names"),
        ("unload", (None,), "names"),
    ],
)
def test_names_are_strings(ask: Ask, address: str, shelf: Shelf, method: str, arguments: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(address, method, *arguments)
    assert caught.value.field == field
    assert shelf.requests == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
        (grpc.StatusCode.UNAUTHENTICATED, PermissionDeniedError),
        (grpc.StatusCode.FAILED_PRECONDITION, FailedPreconditionError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
    ],
)
def test_refusals(ask: Ask, address: str, shelf: Shelf, code: grpc.StatusCode, error: type[Exception]) -> None:
    shelf.refusal = code
    with pytest.raises(error, match=r"^because$"):  # of a single server, none needs to be told which
        ask(address, "load", "layers.toml")


@pytest.mark.parametrize(
    ("method", "arguments", "attempts"),
    [("list", (), 4), ("get", ("minilm",), 4), ("load", ("layers.toml",), 1), ("unload", ("minilm",), 1)],
)
def test_what_changes_a_server_is_sent_once(
    ask: Ask, address: str, shelf: Shelf, method: str, arguments: Any, attempts: int
) -> None:
    """Nobody can know whether a server that went away had carried it out."""
    shelf.refusal = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(UnavailableError):
        ask(address, method, *arguments)
    assert len(shelf.requests) == attempts


def test_nonsense(ask: Ask) -> None:
    methods = {"List": lambda message, context: b"\xff\xff", "Get": lambda message, context: b""}
    with peer(good, None, {SERVICE: methods}) as address:
        with pytest.raises(ProtocolError, match="not a LayerServiceListResponse"):
            ask(address, "list")
        with pytest.raises(ProtocolError, match="without one"):
            ask(address, "get", "minilm")


def test_a_peer_without_layers(ask: Ask) -> None:
    with peer(good) as address, pytest.raises(ServerError) as caught:
        ask(address, "list")
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert str(caught.value).startswith("what answers there is no attnserve server, or an older one (")


def test_a_closed_client_has_no_layers(address: str) -> None:
    client = Client(address)
    layers = client.layers
    assert len(layers.list()) == 2
    client.close()
    with pytest.raises(ClientClosedError):
        layers.list()


def test_layers_keep_their_client(address: str) -> None:
    layers = Client(address).layers
    assert len(layers.list()) == 2


def test_the_command_lists_layers(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layers", address]) == 0
    title, cross, encoder = capsys.readouterr().out.splitlines()
    columns = [
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
    ]
    assert title.split() == columns
    assert cross.startswith("decoder/cross  multi_head, causal  bfloat16  ")
    assert cross.split()[4:] == ["4,096", "8,192", "2", "64", "96", "64", "8/2", "×", "16/24"]
    assert encoder.split()[3:] == ["22,713,216", "90,852,864", "3", "token", "ids", "384", "12", "×", "32", "6"]
    for column in ("parameters", "bytes", "version", "output"):
        end = title.index(column) + len(column)
        assert all(line[end - 1].isdigit() and line[end] == " " for line in (cross, encoder))


def test_the_command_prints_layers_as_json(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layers", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [plain(CROSS), plain(ENCODER)]


def test_the_command_without_layers(address: str, shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.layers.clear()
    assert cli.main(["layers", address]) == 0
    assert capsys.readouterr().out == "no layers are loaded\n"
    assert cli.main(["layers", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_command_says_why_it_is_refused(address: str, shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.refusal = grpc.StatusCode.PERMISSION_DENIED
    assert cli.main(["layers", address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"attnserve: {address}: because\n"
