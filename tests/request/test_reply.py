"""Replies in pieces: what varies between replies is kept out of what is shared by all of the same shapes."""

from __future__ import annotations

import math
from pathlib import Path

import messages
import numpy as np
import pytest
import torch
from layer_requests import read_layer_request, registry_of
from safetensors.torch import save_file

from attnserve import _wire
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.requests.reply import Timed
from attnserve_server.requests.work import Phases, RequestResult, Work

DEFINITION = """
[[layers]]
name = "score"
kind = "general"
file = "weights.safetensors"
parameters.score.weight = "weight"
"""


@pytest.fixture
def device(tensor_devices: dict[int, CpuDevice]) -> CpuDevice:
    """A CPU of one thread."""
    return tensor_devices[1]


@pytest.fixture(params=["attend", "apply"])
async def work(request: pytest.FixtureRequest, tmp_path: Path, device: CpuDevice) -> Work:
    """A request that also asks for its lse and its scores."""
    if request.param == "attend":
        return messages.read(messages.random_attend(0, return_lse=True, return_scores=pb.SCORE_STAGE_WEIGHTS))
    save_file({"weight": torch.randn(4, 4)}, tmp_path / "weights.safetensors")
    (tmp_path / "layers.toml").write_text(DEFINITION)
    registry = registry_of(device, tmp_path)
    await registry.load("layers.toml")
    message = pb.ApplyRequest(
        layer="score",
        input=messages.tensor(np.ones((3, 4), np.float32)),
        return_lse=True,
        return_scores=pb.SCORE_STAGE_WEIGHTS,
    )
    return read_layer_request(registry, message.SerializeToString())


def test_replies_of_equal_shapes_are_taken_apart_once(work: Work, device: CpuDevice) -> None:
    """However much their timings differ: otherwise each would evict another header from the cache."""
    (result,) = work.run_batch(device, [work]).results
    misses = []
    for number in range(1, 4):
        pieces, size = work.encode(
            result, Phases(*(number * phase for phase in (1e-5, 2e-5, 3e-5, 4e-5, 5e-5))), number
        )
        message = b"".join(pieces)
        assert len(message) == size
        response = (pb.AttendResponse if work.layer is None else pb.ApplyResponse).FromString(message)
        assert response.batch_size == number
        assert response.timings.queue_ns == number * 20_000
        assert response.output.data == bytes(result.output)
        assert response.lse.data == bytes(result.lse or b"")
        assert response.scores.data == bytes(result.scores or b"")
        misses.append(_wire._template.cache_info().misses)  # type: ignore[attr-defined]
    assert misses[0] == misses[1] == misses[2]


@pytest.mark.parametrize(
    ("layout", "query", "key", "rows"),
    [
        (pb.LAYOUT_UNSPECIFIED, (2, 4, 3, 8), (2, 4, 5, 8), [2, 4, 3]),
        (pb.LAYOUT_LENGTH_FIRST, (2, 3, 4, 8), (2, 5, 4, 8), [2, 4, 3]),
        (pb.LAYOUT_HEADS_FIRST, (4, 3, 8), (4, 5, 8), [4, 3]),
        (pb.LAYOUT_LENGTH_FIRST, (3, 4, 8), (5, 4, 8), [4, 3]),
        (pb.LAYOUT_HEADS_FIRST, (3, 8), (5, 8), [3]),
        (pb.LAYOUT_LENGTH_FIRST, (3, 8), (5, 8), [3]),
        (pb.LAYOUT_PACKED, (3, 4, 8), (5, 4, 8), [4, 3]),
    ],
)
def test_the_output_is_laid_out_as_queries_are_and_what_rows_have_by_heads(
    layout: int, query: tuple[int, ...], key: tuple[int, ...], rows: list[int]
) -> None:
    packed = {"query_lengths": np.array([1, 2]), "kv_lengths": np.array([1, 4])} if layout == pb.LAYOUT_PACKED else {}
    asked = {"return_lse": True, "return_scores": pb.SCORE_STAGE_RAW}
    arrays = (np.zeros(shape, np.float16) for shape in (query, key, (*key[:-1], 6)))
    request = messages.read(messages.attend(*arrays, layout=layout, **asked, **packed))
    keys = request.longest[1]
    result = RequestResult(*(memoryview(bytes(math.prod(rows) * size)) for size in (6 * 2, 4, keys * 2)))
    pieces, length = request.encode(result, Phases(0.0, 0.0, 0.0, 0.0, 0.0), 1)
    reply = pb.AttendResponse.FromString(b"".join(pieces))
    assert length == reply.ByteSize()
    assert list(reply.output.shape) == [*query[:-1], 6]
    assert (list(reply.lse.shape), list(reply.scores.shape)) == (rows, [*rows, keys])
    dtypes = [tensor_pb2.DATA_TYPE_FLOAT16, tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_FLOAT16]
    assert [tensor.dtype for tensor in (reply.output, reply.lse, reply.scores)] == dtypes


@pytest.mark.parametrize("response_type", [pb.AttendResponse, pb.ApplyResponse])
def test_a_reply_says_nothing_of_the_one_before(
    response_type: type[pb.AttendResponse] | type[pb.ApplyResponse],
) -> None:
    timed = Timed(response_type)
    for phases, size in ((Phases(1e-6, 2e-6, 3e-6, 4e-6, 5e-6), 300), (Phases(0.0, 0.0, 0.0, 1e-9, 0.0), 1)):
        names = ("decode_ns", "queue_ns", "staging_ns", "compute_ns", "encode_ns")
        timings = {name: round(seconds * 1e9) for name, seconds in zip(names, phases, strict=True)}
        assert response_type.FromString(timed.encode(phases, size)) == response_type(timings=timings, batch_size=size)
