"""The types of results: what type checkers infer, and that it is what comes. `make check` runs mypy over this file."""

from __future__ import annotations

import asyncio
import inspect
import typing
from concurrent.futures import Future
from typing import Any, assert_type

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from attnserve import ArrayOf, AsyncCache, AsyncClient, AttentionResult, Cache, Client, LayerResult, Names

NumPy = NDArray[Any]

FLOATS: NDArray[np.float32] = np.ones((2, 3, 4), np.float32)
HALVES = np.ones((2, 3, 4), np.float16)
LIST = [[1.0, 2.0], [3.0, 4.0]]
OF_ONE_TOKEN: list[list[list[float]]] = [[[1.0] * 4]] * 2
TENSOR = torch.ones(2, 3, 4)
IDS: NDArray[np.int64] = np.arange(3)
LAYER = "llama/float32"


def test_attentions(layer_client: Client) -> None:
    client = layer_client
    result = client.attend(FLOATS, FLOATS, FLOATS, return_lse=True)
    assert_type(result, AttentionResult[NumPy])
    assert_type(result.lse, NumPy | None)
    assert isinstance(result.output, np.ndarray)
    of_halves = client.attend(HALVES, HALVES, HALVES, return_lse=True)
    assert_type(of_halves.lse, NumPy | None)
    assert of_halves.lse is not None
    assert of_halves.lse.dtype == np.float32, "a result's arrays need not all be of the query's dtype"
    of_lists = client.attend(LIST, LIST, LIST)
    assert_type(of_lists, AttentionResult[NumPy])
    assert isinstance(of_lists.output, np.ndarray)
    of_tensors = client.attend(TENSOR, TENSOR, TENSOR)
    assert_type(of_tensors, AttentionResult[torch.Tensor])
    assert isinstance(of_tensors.output, torch.Tensor)
    with torch.no_grad():
        of_parameter = client.attend(torch.nn.Parameter(TENSOR), TENSOR, TENSOR)
    assert_type(of_parameter.output, torch.Tensor)
    assert type(of_parameter.output) is torch.Tensor
    future = client.submit(LIST, LIST, LIST)
    assert_type(future, Future[AttentionResult[NumPy]])
    assert isinstance(future.result().output, np.ndarray)
    assert_type(client.submit(TENSOR, TENSOR, TENSOR), Future[AttentionResult[torch.Tensor]])


def test_layers(layer_client: Client) -> None:
    client = layer_client
    result = client.apply(LAYER, IDS)
    assert_type(result, LayerResult[NumPy])
    assert result.output.dtype == np.float32
    of_lists = client.apply(LAYER, [1, 2, 3])
    assert_type(of_lists, LayerResult[NumPy])
    assert isinstance(of_lists.output, np.ndarray)
    of_tensors = client.apply(LAYER, torch.arange(3))
    assert_type(of_tensors, LayerResult[torch.Tensor])
    assert isinstance(of_tensors.output, torch.Tensor)
    future = client.submit_apply(LAYER, IDS)
    assert_type(future, Future[LayerResult[NumPy]])
    assert future.result().output.dtype == np.float32
    assert_type(client.submit_apply(LAYER, torch.arange(3)), Future[LayerResult[torch.Tensor]])


def test_caches(layer_client: Client) -> None:
    with layer_client.create_cache(2, 4) as cache:
        assert_type(cache, Cache)
        result = cache.attend(OF_ONE_TOKEN, FLOATS, FLOATS)
        assert_type(result, AttentionResult[NumPy])
        assert isinstance(result.output, np.ndarray)
        of_tensors = cache.attend(TENSOR)
        assert_type(of_tensors, AttentionResult[torch.Tensor])
        assert isinstance(of_tensors.output, torch.Tensor)


async def test_asyncio(layer_server: Any) -> None:
    async with AsyncClient(layer_server.address) as client:
        result = await client.attend(LIST, LIST, LIST)
        assert_type(result, AttentionResult[NumPy])
        assert isinstance(result.output, np.ndarray)
        assert_type(await client.attend(TENSOR, TENSOR, TENSOR), AttentionResult[torch.Tensor])
        future = client.submit(FLOATS, FLOATS, FLOATS)
        assert_type(future, asyncio.Future[AttentionResult[NumPy]])
        assert isinstance((await future).output, np.ndarray)
        applied = await client.apply(LAYER, IDS)
        assert_type(applied, LayerResult[NumPy])
        assert applied.output.dtype == np.float32
        asked = client.submit_apply(LAYER, torch.arange(3))
        assert_type(asked, asyncio.Future[LayerResult[torch.Tensor]])
        assert isinstance((await asked).output, torch.Tensor)
        async with client.create_cache(2, 4) as cache, await cache.fork() as fork, cache.fork() as another:
            assert_type(cache, AsyncCache)
            assert_type(fork, AsyncCache)
            assert_type(another, AsyncCache)
            attended = await cache.attend(OF_ONE_TOKEN, FLOATS, FLOATS)
            assert_type(attended, AttentionResult[NumPy])
            assert isinstance(attended.output, np.ndarray)


KindT = typing.TypeVar("KindT")


def attend_to_itself(client: Client, query: ArrayOf[KindT]) -> AttentionResult[KindT]:
    """A wrapper that passes on what kind of array it gets."""
    return client.attend(query, query, query)


def delete(client: Client, names: Names) -> None:
    """A wrapper of what takes one name or several."""
    client.caches.delete(names)


def test_wrappers(layer_client: Client) -> None:
    assert_type(attend_to_itself(layer_client, FLOATS), AttentionResult[NumPy])
    of_tensors = attend_to_itself(layer_client, TENSOR)
    assert_type(of_tensors, AttentionResult[torch.Tensor])
    assert isinstance(of_tensors.output, torch.Tensor)
    cache = layer_client.create_cache(2, 4)
    delete(layer_client, cache.name)
    delete(layer_client, [cache.name])
    assert cache.name not in {each.name for each in layer_client.caches.list()}


def either_kind(client: Client, array: NDArray[np.float32] | torch.Tensor) -> None:
    """Never run. What may be either is not taken for one of them: mypy then knows nothing of the result."""
    assert_type(client.attend(array).output, object)


def no_array(client: Client) -> None:
    """Never run. mypy sees that these are no arrays, or it would say that the comments are not needed."""
    client.attend(None)  # type: ignore[arg-type]
    client.apply(LAYER, {1, 2})  # type: ignore[arg-type]
    client.attend(FLOATS, {1, 2}, TENSOR)  # type: ignore[arg-type]
    client.attend(FLOATS, FLOATS, FLOATS, mask=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method",
    [Client.__init__, AsyncClient.__init__, Client.attend, Client.submit_apply, AsyncClient.attend, Cache.attend],
)
def test_annotations_can_be_read_while_running(method: Any) -> None:
    assert typing.get_type_hints(method).keys() - {"return", "options"} <= inspect.signature(method).parameters.keys()
