"""Devices: results are right for scores, lengths, sizes of 0, sinks and masks."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import pytest
from device_bench import STAGES, assert_matches_oracle, contents, packed

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library

MOST = 2**31 - 1
"""The longest axis of a tensor."""


@pytest.mark.parametrize("stage", STAGES, ids=STAGES.get)
@pytest.mark.parametrize("kv_lengths", [(5, 5), (5, 2), (0, 3), (2, 2), (0, 0)])
def test_scores_with_lengths(devices: dict[int, CpuDevice], stage: int, kv_lengths: tuple[int, int]) -> None:
    """Raw and capped scores cover all keys; beyond a sequence's length, masked scores are -inf and weights 0."""
    lengths = np.array(kv_lengths)
    message = messages.random_attend(
        0, 3, kv_length=5, batch=2, return_scores=stage, softcap=2.0, kv_lengths=lengths, return_lse=True
    )
    assert_matches_oracle(devices[1], message, softcap=2.0, kv_lengths=lengths)


@pytest.mark.parametrize("stage", STAGES, ids=STAGES.get)
def test_scores_with_lengths_and_a_mask(devices: dict[int, CpuDevice], stage: int) -> None:
    """A key is attended if both allow it."""
    lengths, mask = np.array([5, 2]), np.random.default_rng(0).random((2, 1, 3, 5)) < 0.6
    message = messages.random_attend(
        0, 3, kv_length=5, batch=2, return_scores=stage, kv_lengths=lengths, mask=mask, return_lse=True
    )
    assert_matches_oracle(devices[1], message, kv_lengths=lengths, mask=mask)


@pytest.mark.parametrize("stage", STAGES, ids=STAGES.get)
def test_scores_of_packed_sequences(devices: dict[int, CpuDevice], stage: int) -> None:
    message = packed(0, [3, 1, 2], [2, 5, 0], return_scores=stage, return_lse=True)
    assert_matches_oracle(
        devices[1], message, layout="packed", query_lengths=np.array([3, 1, 2]), kv_lengths=np.array([2, 5, 0])
    )


@pytest.mark.parametrize("stage", [pb.SCORE_STAGE_UNSPECIFIED, *STAGES])
@pytest.mark.parametrize(
    ("batch", "length", "kv_length"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0), (1, 1, 0), (3, 0, 0)]
)
@pytest.mark.parametrize("with_mask", [False, True])
def test_zero_sizes(
    devices: dict[int, CpuDevice], batch: int, length: int, kv_length: int, stage: int, with_mask: bool
) -> None:
    fields: dict[str, Any] = {"return_lse": True, "return_scores": stage, "causal": True}
    if with_mask:
        fields["mask"] = np.ones((batch, 1, length, kv_length), bool)
    requests = [
        messages.read(messages.random_attend(seed, length, kv_length=kv_length, batch=batch, **fields))
        for seed in range(3)
    ]
    for count in (1, 3):
        for result in devices[2].run(requests[:count]).results:
            output, lse, scores = contents(result)
            rows = batch * 2 * length
            assert output == bytes(rows * 8 * 4)
            assert lse == np.full(rows, -np.inf, np.float32).tobytes()
            assert scores == (b"" if stage else None)


@pytest.mark.parametrize("stage", [pb.SCORE_STAGE_UNSPECIFIED, *STAGES])
@pytest.mark.parametrize("shape", [[MOST, MOST, 0, MOST], [0, MOST, MOST, MOST]])
@pytest.mark.parametrize("native", [None, *library.available()[:1]])
def test_what_has_no_queries_costs_nothing_however_long_its_other_axes_are(
    shape: list[int], native: str | None, stage: int
) -> None:
    """With an axis of length 0, the other axes need no payload: no work may be done per element of theirs."""
    message = messages.random_attend(0, 0, return_scores=stage, return_lse=True)
    for name in ("query", "key", "value"):
        getattr(message, name).shape[:] = shape
    request = messages.read(message)
    empty = b"" if stage else None
    device = CpuDevice(1, 0, None if native is None else library.Library(native))
    assert [contents(result) for result in device.run([request] * 2).results] == [(b"", b"", empty)] * 2


def test_sinks_without_keys(devices: dict[int, CpuDevice]) -> None:
    """Only the sink is attended to: the log-sum-exp is the sink's."""
    sinks = np.array([0.5, -3.0], np.float32)
    request = messages.read(messages.random_attend(0, 2, kv_length=0, sinks=sinks, return_lse=True))
    output, lse, _ = contents(devices[1].run([request]).results[0])
    assert output == bytes(2 * 2 * 8 * 4)
    assert lse == np.repeat(sinks, 2).tobytes()


@pytest.mark.parametrize("byte", [1, 2, 128, 255])
@pytest.mark.parametrize("count", [1, 3])
def test_any_mask_byte_but_0_is_true(devices: dict[int, CpuDevice], byte: int, count: int) -> None:
    mask = np.random.default_rng(0).random((2, 4, 4)) < 0.5
    usual, unusual = (messages.random_attend(1, 4, mask=mask) for _ in range(2))
    unusual.mask.data = bytes(byte * given for given in usual.mask.data)
    expected = contents(devices[1].run([messages.read(usual)]).results[0])
    results = devices[1].run([messages.read(unusual)] * count).results
    assert [contents(result) for result in results] == [expected] * count
