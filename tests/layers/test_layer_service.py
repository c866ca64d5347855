"""Layers managed on a running server: listed, loaded, replaced, unloaded."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import assert_same_bits
from calls import until
from checkpoints import CHECKPOINTS, DTYPES, PLAIN
from conftest import Models, Server
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from scores import BROKEN, DEFINITION, PATIENCE_S, X, expected, weight, write

from attnserve import AsyncClient, Client, InvalidRequestError, NotFoundError
from attnserve.__main__ import main


@pytest.fixture(scope="module")
def changing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server whose layers tests may change, and its model directory."""
    directory = tmp_path_factory.mktemp("changing") / "models"
    directory.mkdir()
    write(directory)
    server = Server(("--layers", str(directory / "layers.toml")), directory.parent / "stderr")
    yield server, directory
    assert server.stop() == 0, server.stderr()


@pytest.fixture
def directory(changing_server: tuple[Server, Path]) -> Path:
    """The server's model directory, restored to its initial contents."""
    write(changing_server[1])
    return changing_server[1]


@pytest.fixture
def changing(changing_server: tuple[Server, Path], directory: Path) -> Iterator[tuple[Server, Client]]:
    """The server with its initial layers, freshly loaded, and a client of it."""
    server, _ = changing_server
    with Client(server.address) as client:
        client.layers.load("layers.toml")
        if others := [layer.name for layer in client.layers.list() if layer.name not in ("one", "two")]:
            client.layers.unload(others)
        yield server, client


def metrics(server: Server, name: str) -> dict[str, float]:
    """A metric's current values by layer ("" where it has no such label)."""
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=PATIENCE_S) as page:
        text = page.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels.get("layer", ""): sample.value for sample in samples if sample.name == name}


async def test_what_is_there(layer_server: Server, layer_client: Client, models: Models) -> None:
    """Layers are listed as defined; the asynchronous client sees the same."""
    layers = layer_client.layers.list()
    names = sorted(name + suffix for name in (*CHECKPOINTS, *PLAIN) for suffix in ("", *(f"/{d}" for d in DTYPES[1:])))
    assert [layer.name for layer in layers] == names
    for layer in layers:
        module = models.modules[layer.name if layer.name in models.modules else layer.name.rpartition("/")[0]]
        dtype = layer.name.rpartition("/")[2] if layer.name not in models.modules else "float64"
        assert layer.dtype == dtype
        assert layer.parameters == sum(each.numel() for each in module.parameters())
    by_name = {layer.name: layer for layer in layers}
    bert = by_name["bert"]
    assert (bert.kind, bert.vocabulary, bert.input_width, bert.output_width) == ("transformer", 40, None, 24)
    assert (bert.blocks, bert.num_query_heads, bert.head_dim, bert.causal) == (2, 4, 6, False)
    assert bert.bytes == 8 * bert.parameters
    assert (bert.value_dim, bert.positions) == (6, 32)
    llama = by_name["llama/bfloat16"]
    assert (llama.num_query_heads, llama.num_kv_heads, llama.head_dim, llama.causal) == (4, 2, 8, True)
    assert llama.bytes == 2 * llama.parameters
    decoder = by_name["decoder/stack"]
    assert (decoder.blocks, decoder.input_width, decoder.context_width, decoder.causal) == (3, 24, 24, True)
    original = by_name["original/encoder_decoder"]
    assert (original.kind, original.num_query_heads, original.head_dim) == ("multi_head", 8, 64)
    additive = by_name["additive/float32"]
    assert (llama.value_dim, llama.positions, additive.value_dim) == (8, None, additive.output_width)
    assert (additive.kind, additive.input_width, additive.context_width, additive.head_dim) == ("additive", 24, 10, 16)
    assert (bert.context_width, additive.blocks, additive.vocabulary) == (None, None, None)
    assert len({layer.version for layer in layers}) == len(layers)
    async with AsyncClient(layer_server.address) as client:
        assert await client.layers.list() == layers
        assert await client.layers.get("bert") == bert
    assert metrics(layer_server, "attnserve_layer_bytes") == {layer.name: layer.bytes for layer in layers}


def test_the_command_changes_layers(changing: tuple[Server, Client], capsys: pytest.CaptureFixture[str]) -> None:
    server, client = changing

    def said(status: int, *flags: str) -> str:
        assert main(["layers", *flags, server.address]) == status
        out, err = capsys.readouterr()
        assert not (out and err)
        return out or err

    assert said(0, "--unload", "one", "--unload", "two", "--unload", "one") == "2 unloaded\n"
    assert said(0) == "no layers are loaded\n"
    title, row = said(0, "--load", "layers.toml", "--only", "two").splitlines()
    assert (title.split()[0], row.split()[0]) == ("name", "two")
    assert [layer.name for layer in client.layers.list()] == ["two"]
    assert [layer["name"] for layer in json.loads(said(0, "--load", "layers.toml", "--json"))] == ["one", "two"]
    assert json.loads(said(0, "--unload", "one", "--json")) == {"unloaded": ["one"]}
    assert "there is no layer 'one'" in said(1, "--unload", "two", "--unload", "one")
    assert "nothing.toml" in said(1, "--load", "nothing.toml")
    assert "expected names of layers in layers.toml, found 'three'" in said(
        1, "--load", "layers.toml", "--only", "three"
    )
    assert said(2, "--only", "two") == "attnserve: --only: expected with --load FILE\n"
    assert [layer.name for layer in client.layers.list()] == ["two"]


def test_a_name_that_nothing_has(changing: tuple[Server, Client]) -> None:
    """Get, Load and Unload say so, and nothing changes."""
    _, client = changing
    before = client.layers.list()
    with pytest.raises(NotFoundError):
        client.layers.get("three")
    with pytest.raises(NotFoundError):
        client.layers.unload(["one", "three"])
    lacking = "^names: expected names of layers in layers.toml, found 'three', 'four'$"
    with pytest.raises(InvalidRequestError, match=lacking) as caught:
        client.layers.load("layers.toml", ["one", "three", "four"])
    assert caught.value.field == "names"
    with pytest.raises(NotFoundError):
        client.layers.load("nothing.toml")
    with pytest.raises(InvalidRequestError) as caught:
        client.layers.unload([])
    assert caught.value.field == "names"
    with pytest.raises(InvalidRequestError) as caught:
        client.layers.load("")
    assert caught.value.field == "definitions"
    assert client.layers.list() == before


def test_the_work_of_each_layer_is_counted(changing: tuple[Server, Client]) -> None:
    server, client = changing
    counted = ("requests", "tokens", "flops")

    def work() -> dict[str, dict[str, float]]:
        return {name: metrics(server, f"attnserve_layer_{name}_total") for name in counted}

    before = work()
    for _ in range(3):
        client.apply("two", X)
    done = {name: each["two"] - before[name].get("two", 0.0) for name, each in work().items()}
    assert (done["requests"], done["tokens"]) == (3, 3 * len(X))
    # Each row is projected, and its score with each row is a product.
    assert done["flops"] >= 3 * 2 * (X.size * X.shape[-1] + len(X) * X.size)
    assert work()["requests"].get("one") == before["requests"].get("one")


def test_unloading_and_loading_again(changing: tuple[Server, Client]) -> None:
    server, client = changing
    one, two = client.layers.list()
    client.layers.unload("one")
    assert client.layers.list() == (two,)
    assert set(metrics(server, "attnserve_layer_bytes")) == {"two"}
    with pytest.raises(NotFoundError):
        client.apply("one", X)
    (again,) = client.layers.load("layers.toml", "one")
    assert again.version > max(one.version, two.version)
    assert client.layers.list() == (again, two)
    assert client.apply("one", X).layer_version == again.version
    assert set(metrics(server, "attnserve_layer_bytes")) == {"one", "two"}


def test_a_new_version_swaps_at_once(changing: tuple[Server, Client], directory: Path) -> None:
    """Callers that never stop asking get each reply from one version or the other, after a load from the new one."""
    _, client = changing
    old = client.layers.get("one")
    known = {old.version: expected(X, 1.0)}
    stop = threading.Event()
    seen: list[int] = []
    results: list[Any] = []

    def ask() -> None:
        while not stop.is_set():
            results.append(client.apply("one", X))

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        for value in (2.0, -3.0, 0.5):
            until(lambda: len(results) > 20 * (len(known)), "callers are answered")
            save_file({"weight": weight(value)}, directory / "one.safetensors")
            (loaded,) = client.layers.load("layers.toml", ["one"])
            known[loaded.version] = expected(X, value)
            assert client.apply("one", X).layer_version == loaded.version
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    assert client.layers.get("two").version < min(version for version in known if version != old.version)
    for result in results:
        np.testing.assert_allclose(result.output, known[result.layer_version], rtol=0, atol=2e-6)
        seen.append(result.layer_version)
    assert set(seen) >= set(list(known)[:-1])


def test_requests_in_flight_finish_on_the_old_version(changing: tuple[Server, Client], directory: Path) -> None:
    """The layer is replaced, then unloaded, while requests for it wait for the device."""
    _, client = changing
    old = client.layers.get("one")
    alone = client.apply("one", X).output
    x = np.random.default_rng(1).standard_normal((8, 1024, 64))
    # Each keeps a CPU busy for a few tenths of a second, since it is float64, and is too large to share a batch.
    blocking = [client.submit(x, x, x, softcap=1.0) for _ in range(4)]

    def wait() -> Future[Any]:
        future = client.submit_apply("one", X)
        with pytest.raises(NotFoundError):
            client.apply("nobody", X)  # streams are read in order: once this one is answered, the other has been read
        return future

    first = wait()
    save_file({"weight": weight(2.0)}, directory / "one.safetensors")
    (new,) = client.layers.load("layers.toml", ["one"])
    second = wait()
    client.layers.unload("one")
    with pytest.raises(NotFoundError):
        client.apply("one", X)
    assert not first.done(), "the device was not busy for long enough"
    for future in blocking:
        future.result()
    assert first.result().layer_version == old.version
    assert_same_bits(first.result().output, alone)
    assert second.result().layer_version == new.version
    np.testing.assert_allclose(second.result().output, expected(X, 2.0), rtol=0, atol=2e-6)


@pytest.mark.parametrize("what", BROKEN)
def test_a_load_that_fails_changes_nothing(changing: tuple[Server, Client], directory: Path, what: str) -> None:
    """Not even the good layers of the same file, before the broken one or after it."""
    _, client = changing
    before, output = client.layers.list(), client.apply("one", X).output
    text, named = BROKEN[what]
    fine = DEFINITION.format(name="{}", file="two.safetensors")
    (directory / "broken.toml").write_text(fine.format("three") + text + fine.format("two"))
    with pytest.raises((InvalidRequestError, NotFoundError), match=named):
        client.layers.load("broken.toml")
    assert client.layers.list() == before
    result = client.apply("one", X)
    assert_same_bits(result.output, output)


@pytest.mark.parametrize("wrong", ["28", [28], {}])
def test_a_config_whose_numbers_are_none_is_the_callers_to_mend(
    changing: tuple[Server, Client], directory: Path, wrong: Any
) -> None:
    _, client = changing
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 2}
    config["max_window_layers"] = wrong
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "qwen2.toml").write_text('[[layers]]\nname = "qwen2"\nfile = "one.safetensors"\npreset = "llama"')
    with pytest.raises(InvalidRequestError, match="max_window_layers: expected a whole number") as caught:
        client.layers.load("qwen2.toml")
    assert caught.value.field == "definitions"


def test_more_defects_than_a_status_has_room_for(changing: tuple[Server, Client], directory: Path) -> None:
    """Some are reported, with the number of the others."""
    _, client = changing
    long = "x" * 100
    bad = "".join(DEFINITION.format(name=f"{n}/{long}", file="two.safetensors") + "inputs = 7" for n in range(300))
    (directory / "broken.toml").write_text(bad)
    with pytest.raises(InvalidRequestError, match=r"layer '0/x+'(?s:.*)and 29\d more") as caught:
        client.layers.load("broken.toml")
    assert caught.value.field == "definitions"


@pytest.mark.parametrize("way", ["parent", "absolute", "link", "link of a directory", "home", "zero"])
def test_no_path_leaves_the_model_directory(changing: tuple[Server, Client], directory: Path, way: str) -> None:
    """Neither the path of the definitions nor that of the weights, even if it leads to a good file."""
    _, client = changing
    outside = directory.parent / "outside"
    outside.mkdir(exist_ok=True)
    save_file({"weight": weight(9.0)}, outside / "weights.safetensors")
    (outside / "layers.toml").write_text(DEFINITION.format(name="three", file="one.safetensors"))
    (directory / "link.toml").symlink_to(outside / "layers.toml")
    (directory / "link.safetensors").symlink_to(outside / "weights.safetensors")
    (directory / "directory").symlink_to(outside)
    paths = {
        "parent": "../outside/{}",
        "absolute": f"{outside}/{{}}",
        "link": "link.{1}",
        "link of a directory": "directory/{}",
        "home": "~/{}",
        "zero": "\0{}",
    }
    before = client.layers.list()
    with pytest.raises((InvalidRequestError, NotFoundError)) as caught:
        client.layers.load(paths[way].format("layers.toml", "toml"))
    assert str(directory) not in str(caught.value) or way == "absolute"
    file = paths[way].format("weights.safetensors", "safetensors").replace("\0", "\\u0000")
    (directory / "weights.toml").write_text(DEFINITION.format(name="three", file=file))
    with pytest.raises((InvalidRequestError, NotFoundError)):
        client.layers.load("weights.toml")
    assert client.layers.list() == before


def test_a_link_within_the_directory_is_followed(changing: tuple[Server, Client], directory: Path) -> None:
    """The links above are refused only because they lead outside."""
    _, client = changing
    (directory / "link.safetensors").symlink_to(directory / "one.safetensors")
    (directory / "link.toml").write_text(DEFINITION.format(name="three", file="link.safetensors"))
    (loaded,) = client.layers.load("link.toml")
    assert_same_bits(client.apply(loaded.name, X).output, client.apply("one", X).output)


def test_unloading_gives_the_memory_back(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """A layer of 64 MiB, replaced several times and finally unloaded. The server has done nothing else, because memory
    that large messages took is kept (`host.allocator`), and a layer would fit into it.
    """
    directory = tmp_path / "models"
    directory.mkdir()
    width, size = 2896, 2896 * 2896 * 8
    save_file({"weight": weight(1.0, width).double()}, directory / "large.safetensors")
    (directory / "large.toml").write_text(DEFINITION.format(name="large", file="large.safetensors"))
    server = start_server("--model-directory", str(directory))
    x = np.ones((1, width), np.float32)

    def resident() -> float:
        """Resident memory in units of the layer's size. Excludes file pages (libraries among them), which the kernel
        reclaims when it likes.
        """
        status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024 / size

    def more() -> float:
        return resident() - before

    with Client(server.address) as client:

        def unload() -> None:
            client.layers.unload("large")
            until(lambda: more() < 0.25, "the memory is given back", more)

        before = resident()
        client.layers.load("large.toml")
        client.apply("large", x)
        unload()
        for _ in range(4):
            (loaded,) = client.layers.load("large.toml")
            assert loaded.bytes == size
            client.apply("large", x)
            until(lambda: 0.5 < more() < 1.5, "only the last is there", more)
        unload()


def test_loads_one_after_the_other(changing: tuple[Server, Client]) -> None:
    """Concurrent loads run one after the other: the final state comes from one of them, whole."""
    _, client = changing
    with ThreadPoolExecutor(8) as callers:
        loads = list(callers.map(lambda _: client.layers.load("layers.toml"), range(16)))
    versions = sorted(tuple(layer.version for layer in load) for load in loads)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(versions))
    assert tuple(layer.version for layer in client.layers.list()) == versions[-1]


def test_what_is_loaded_at_start_is_said(changing: tuple[Server, Client]) -> None:
    server, _ = changing
    assert server.startup["layer"].startswith("two, general, 6 -> 6, 1 heads x 6, 144 bytes")
