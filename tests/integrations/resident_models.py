"""A model whose attention the service computes, and the check that tests of resident caches leave none behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from random_models import CAUSAL, build
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnserve import Client
from attnserve.integrations.transformers import register


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
