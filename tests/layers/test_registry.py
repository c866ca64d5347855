"""The registry in process: when a layer is freed, and what happens when there is no room for one."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_requests import read_layer_request, registry_of
from scores import PATIENCE_S, X, write

from attnserve._requests.apply import encode_apply
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import FailedPrecondition, NotFound, OutOfMemory
from attnserve_server.layers import registry as registries


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with the layers of `write`."""
    write(tmp_path)
    return tmp_path


async def test_a_layer_lives_as_long_as_its_requests(directory: Path) -> None:
    """An unloaded layer is freed with the last of them, at once, without the garbage collector."""
    threads = torch.get_num_threads()
    device = CpuDevice(1, 0, None)
    try:
        registry = registry_of(device, directory)
        await registry.load("layers.toml")
        message = b"".join(encode_apply("one", X).pieces)
        requests = [read_layer_request(registry, message) for _ in range(2)]
        gone = threading.Event()
        weakref.finalize(registry.get("one").layer, gone.set)
        gc.disable()
        registry.unload(["one"])
        assert not gone.is_set()
        requests.pop().run_batch(device, requests)
        assert not gone.is_set()
        requests.clear()
        # The thread that loaded it may not have released it yet.
        assert await asyncio.to_thread(gone.wait, PATIENCE_S)
        with pytest.raises(NotFound):
            read_layer_request(registry, message)
    finally:
        gc.enable()
        device.close()
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("can't allocate memory")]
)
async def test_layers_for_which_there_is_no_memory(
    directory: Path, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two does not fit: neither is loaded, and the existing layers stay."""
    threads = torch.get_num_threads()
    device = CpuDevice(1, 0, None)
    load, loads = registries.load, itertools.count()

    def load_one(*arguments: Any) -> Any:
        if next(loads) == 1:
            raise failure
        return load(*arguments)

    try:
        registry = registry_of(device, directory)
        before = await registry.load("layers.toml")
        monkeypatch.setattr(registries, "load", load_one)
        with pytest.raises(OutOfMemory):
            await registry.load("layers.toml")
        assert registry.all() == before
        assert [loaded.version for loaded in await registry.load("layers.toml")] > [loaded.version for loaded in before]
    finally:
        device.close()
        torch.set_num_threads(threads)


async def test_no_more_layers_than_there_may_be(directory: Path) -> None:
    """Existing layers may be replaced; one more is refused, and nothing is loaded."""
    threads = torch.get_num_threads()
    device = CpuDevice(1, 0, None)
    try:
        registry = registry_of(device, directory, max_layers=2)
        await registry.load("layers.toml", ["one", "two"])
        await registry.load("layers.toml", ["two"])
        registry.max_layers = 1
        registry.unload(["one"])
        with pytest.raises(FailedPrecondition, match="at most 1 layers") as caught:
            await registry.load("layers.toml", ["one"])
        assert caught.value.reason == "LIMIT_EXCEEDED"
        assert [loaded.name for loaded in registry.all()] == ["two"]
    finally:
        device.close()
        torch.set_num_threads(threads)
