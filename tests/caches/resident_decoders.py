"""A server with decoders and a small pool of caches, and a client of it: fixtures for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Models, Server, served
from decoders import MISTRAL, write_mistral
from occupied import PATIENT

from attnserve import Client

__all__ = ["cached_server", "client", "modules", "seed"]


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(7)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def modules(models: Models) -> dict[str, Any]:
    return models.modules | {"mistral": write_mistral(models.directory)}


@pytest.fixture(scope="module")
def cached_server(
    models: Models, modules: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = (
        "--layers",
        str(models.directory / "layers.toml"),
        "--cache-page-bytes",
        "4096",
        "--cache-bytes",
        "16777216",
        *PATIENT,
    )
    with served(flags, tmp_path_factory.mktemp("cached-server")) as server:
        yield server


@pytest.fixture(scope="module")
def client(cached_server: Server) -> Iterator[Client]:
    with Client(cached_server.address) as client:
        client.layers.load(MISTRAL)
        yield client
