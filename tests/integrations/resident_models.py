"""A server of their own for tests of resident caches, the check that they leave none there, and a model whose attention
it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Server
from occupied import PATIENT
from random_models import CAUSAL, build
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnserve import Client
from attnserve.integrations.transformers import register


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server that other tests leave no caches on."""
    server = Server(PATIENT, tmp_path_factory.mktemp("resident") / "stderr")
    with Client(server.address) as client:
        yield client
    assert server.stop() == 0, server.stderr()


@pytest.fixture(autouse=True)
def nothing_left(client: Client) -> Iterator[None]:
    """Whatever happens, the service holds nothing afterwards."""
    yield
    assert client.caches.list() == ()


@pytest.fixture
def llama(client: Client) -> PreTrainedModel:
    """One whose attention `client` computes."""
    register(client)
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    model.set_attn_implementation("attnserve")
    return model


def locally(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """Its logits with eager attention."""
    model.set_attn_implementation("eager")
    logits: Tensor = model(ids, **inputs).logits
    model.set_attn_implementation("attnserve")
    return logits
