"""The results of devices, against the oracle, alone and in batches."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import oracle

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import RequestResult

STAGES = {
    pb.SCORE_STAGE_RAW: "raw",
    pb.SCORE_STAGE_CAPPED: "capped",
    pb.SCORE_STAGE_MASKED: "masked",
    pb.SCORE_STAGE_WEIGHTS: "weights",
}
"""The oracle's names for the score stages."""


def contents(result: RequestResult) -> tuple[bytes | None, ...]:
    return tuple(None if part is None else bytes(part) for part in (result.output, result.lse, result.scores))


def assert_batch_invariant(devices: dict[int, CpuDevice], requests: list[Request]) -> None:
    """Asserts the same bits, of the promised length, alone and together, with one thread and with two."""
    alone = [contents(devices[1].run([request]).results[0]) for request in requests]
    for threads, device in devices.items():
        for order in (requests, requests[::-1]):
            together = [contents(result) for result in device.run(order).results]
            expected = alone if order is requests else alone[::-1]
            for place, (one, other) in enumerate(zip(together, expected, strict=True)):
                assert one == other, (threads, place, order[place].problem)
        for request, bits in zip(requests, alone, strict=True):
            assert contents(device.run([request]).results[0]) == bits, (threads, request.problem)
    for request, bits in zip(requests, alone, strict=True):
        assert sum(len(part) for part in bits if part is not None) == request.extent.reply_bytes


def assert_matches_oracle(device: CpuDevice, message: pb.AttendRequest, **options: Any) -> None:
    request = messages.read(message)
    result = device.run([request]).results[0]
    arrays = (messages.array(getattr(message, name)) for name in ("query", "key", "value"))
    expected = oracle.attend(*arrays, **options)
    if message.return_scores:
        wanted = getattr(expected, STAGES[message.return_scores])
        assert result.scores is not None
        np.testing.assert_allclose(
            np.frombuffer(result.scores, np.float32).reshape(wanted.shape), wanted, rtol=0, atol=4e-6
        )
    np.testing.assert_allclose(
        np.frombuffer(result.output, np.float32).reshape(expected.output.shape), expected.output, rtol=0, atol=2e-6
    )
    if message.return_lse:
        assert result.lse is not None
        np.testing.assert_allclose(
            np.frombuffer(result.lse, np.float32).reshape(expected.lse.shape), expected.lse, rtol=0, atol=4e-6
        )


def packed(seed: int, query_lengths: list[int], kv_lengths: list[int], **fields: Any) -> pb.AttendRequest:
    rng = np.random.default_rng(seed)
    dtype = fields.pop("dtype", np.float32)

    def normal(total: int, heads: int) -> messages.Array:
        return rng.standard_normal((total, heads, 8)).astype(dtype)

    return messages.attend(
        normal(sum(query_lengths), 4),
        normal(sum(kv_lengths), 2),
        normal(sum(kv_lengths), 2),
        layout=pb.LAYOUT_PACKED,
        query_lengths=np.array(query_lengths, np.int64),
        kv_lengths=np.array(kv_lengths, np.int64),
        **fields,
    )
