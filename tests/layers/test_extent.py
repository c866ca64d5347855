"""The extents of layer requests: computed once for equal headers, and separately for each layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_requests import read_layer_request, registry_of
from limits import LIMITS
from scores import WIDTH, X, write

from attnserve._requests.apply import encode_apply
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import InvalidRequest
from attnserve_server.layers import extent
from attnserve_server.layers.registry import Registry
from attnserve_server.layers.request import LayerRequest
from attnserve_server.requests.extent import CALL_COST
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.problem import WRITTEN_OUT_PAIR_COST
from attnserve_server.requests.work import Phases

NO_TIME = Phases(0, 0, 0, 0, 0)


def message(layer: str = "one", rows: Any = X, **options: Any) -> bytes:
    return b"".join(encode_apply(layer, np.asarray(rows, np.float32), **options).pieces)


def version_in_reply(request: LayerRequest, device: CpuDevice) -> int:
    (result,) = request.run_batch(device, [request]).results
    return pb.ApplyResponse.FromString(b"".join(request.encode(result, NO_TIME, 1)[0])).layer_version


@pytest.fixture
async def registry(tmp_path: Path, devices: dict[int, CpuDevice]) -> Registry:
    """A registry with the layers of `write`."""
    write(tmp_path)
    registry = registry_of(devices[1], tmp_path)
    await registry.load("layers.toml")
    return registry


async def test_headers_that_are_the_same_are_counted_once(registry: Registry) -> None:
    first, second = (read_layer_request(registry, message(rows=rows)) for rows in (X, X + 1))
    assert first.extent is second.extent
    assert read_layer_request(registry, message(rows=X[:2])).extent is not first.extent
    assert read_layer_request(registry, message("two")).extent is not first.extent


async def test_a_layer_that_is_loaded_anew_counts_anew(registry: Registry, devices: dict[int, CpuDevice]) -> None:
    """For the same header, and whichever version is asked: replies name the version that computed them."""
    before = read_layer_request(registry, message())
    await registry.load("layers.toml")
    after = read_layer_request(registry, message())
    assert before.extent is not after.extent
    assert before.application is after.application
    versions = [version_in_reply(request, devices[1]) for request in (before, after, before)]
    assert versions == [before.loaded.version, after.loaded.version, before.loaded.version]
    assert versions[0] < versions[1]


@pytest.mark.parametrize("name", ["lengths", "context_lengths", "query_offset"])
async def test_what_contents_say_is_not_remembered(registry: Registry, name: str) -> None:
    """Equal headers with other lengths or offsets."""
    rows = np.zeros((2, 5, WIDTH))
    asked: dict[str, Any] = {"context": rows.astype(np.float32)} if name == "context_lengths" else {}
    requests = [read_layer_request(registry, message(rows=rows, **asked, **{name: each})) for each in ([1, 5], [3, 2])]
    assert requests[0].application is requests[1].application
    field = "offsets" if name == "query_offset" else name
    assert [getattr(request.extent, field) for request in requests] == [[1, 5], [3, 2]]
    assert (requests[0].extent.flops == requests[1].extent.flops) == (name == "query_offset")
    if name != "query_offset":
        with pytest.raises(InvalidRequest, match="from 0 to 5"):
            read_layer_request(registry, message(rows=rows, **asked, **{name: [6, 0]}))


async def test_limits_hold_for_what_is_remembered(registry: Registry) -> None:
    """A refusal is never remembered as accepted, nor is a request that one limit refuses accepted by another."""
    extent = read_layer_request(registry, message()).extent
    most = extent.weighed
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="FLOPs"):
            read_layer_request(registry, message(), limits=replace(LIMITS, max_request_flops=most - 1))
    allowed = read_layer_request(registry, message(), limits=replace(LIMITS, max_request_flops=most))
    assert allowed.extent.weighed == most
    assert most == WRITTEN_OUT_PAIR_COST * len(X) ** 2 + 2 * len(X) * WIDTH * WIDTH > extent.flops


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (replace(LIMITS, max_elements=2 * X.size - 1), "max_elements"),
        (replace(LIMITS, max_rank=2), "max_rank"),
        (replace(LIMITS, max_sequences=1), "max_sequences"),
    ],
)
async def test_tensors_are_within_limits(registry: Registry, limits: RequestLimits, limit: str) -> None:
    """Whether or not such a request has come before."""
    buffer = message(rows=np.stack([X, X]))
    enough = replace(LIMITS, max_elements=2 * X.size, max_rank=3, max_sequences=2)
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            read_layer_request(registry, buffer, limits=limits)
        assert (caught.value.field, caught.value.reason) == ("input.shape", "LIMIT_EXCEEDED")
        assert caught.value.metadata["limit"] == limit
    assert read_layer_request(registry, buffer, limits=enough).extent.query_tokens == 2 * len(X)


async def test_calls_cost_for_each_sequence(registry: Registry) -> None:
    request = read_layer_request(registry, message(rows=np.stack([X] * 3)))
    assert request.extent.cost == request.extent.weighed + 3 * CALL_COST


async def test_no_more_is_remembered_than_there_is_room_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extent, "MOST_KEPT", 3)
    monkeypatch.setattr(extent, "MOST_SEQUENCES", 4)
    known = registry.get("one").extents._known
    for length in range(1, 6):
        read_layer_request(registry, message(rows=X[:length]))
        assert len(known) <= 3
    before = len(known)
    request = read_layer_request(registry, message(rows=np.zeros((5, 2, WIDTH))))
    assert len(known) == before
    assert request.extent.lengths == [2] * 5
