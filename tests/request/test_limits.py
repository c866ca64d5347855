"""The limits of one request: what just passes them, what does not, and that the error states the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import calls
import grpc
import messages
import numpy as np
import pytest
from google.rpc import error_details_pb2
from limits import LIMITS

from attnserve import Client, InvalidRequestError
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.limits import CPU_REQUEST_FLOPS, default_request_flops

if TYPE_CHECKING:
    from conftest import Server


def read(message: pb.AttendRequest, **limits: int) -> None:
    data = message.SerializeToString()
    messages.read_request(data, 0, len(data), replace(LIMITS, **limits))


def packed(sequences: int) -> pb.AttendRequest:
    """That many sequences, without queries or keys."""
    empty, lengths = np.zeros((0, 2, 8), np.float32), np.zeros(sequences, np.int64)
    return messages.attend(empty, empty, empty, layout=pb.LAYOUT_PACKED, query_lengths=lengths, kv_lengths=lengths)


ATTEND = messages.random_attend(0, 3, kv_length=5, batch=2, mask=np.ones((2, 2, 3, 5), bool))
SOFTCAP = messages.random_attend(0, 3, kv_length=5, batch=2, softcap=1.0)
WEIGHTS = messages.tensor(np.zeros((4, 8), np.float32))
ADDITIVE = messages.random_attend(0, 3, additive=pb.AdditiveScore(query_weight=WEIGHTS, key_weight=WEIGHTS))
PAIRS = (2 * 3 * 5) * 2
FLOPS = PAIRS * 64
"""Of heads of 8: more than their operations, for those of narrow heads take longer."""
WIDE = messages.random_attend(0, 3, kv_length=5, batch=2, width=40)
WIDE_FLOPS = 2 * PAIRS * (40 + 40)


@pytest.mark.parametrize(
    ("message", "limit", "least", "field", "words"),
    [
        (ATTEND, "max_rank", 4, "query.shape", "at most 3 axes (max_rank), found 4 axes"),
        (
            messages.random_attend(0, 3, batch=1),
            "max_elements",
            48,
            "query.shape",
            "at most 47 elements (max_elements), found 48",
        ),
        (packed(7), "max_sequences", 7, "query_lengths.shape", "at most 6 sequences (max_sequences), found 7"),
        (ATTEND, "max_request_flops", FLOPS, "", f"at most {FLOPS - 1} FLOPs (max_request_flops), found {FLOPS} FLOPs"),
        (WIDE, "max_request_flops", WIDE_FLOPS, "", f"at most {WIDE_FLOPS - 1} FLOPs"),
        (SOFTCAP, "max_request_flops", 1024 * PAIRS, "", f"at most {1024 * PAIRS - 1} FLOPs"),  # slower kernels
        (ADDITIVE, "max_request_flops", 80 * messages.read(ADDITIVE).extent.flops, "", "FLOPs"),
        (ATTEND, "max_sequences", 2, "query.shape", "at most 1 sequences (max_sequences), found 2"),
    ],
)
def test_a_limit_is_the_most_that_passes(
    message: pb.AttendRequest, limit: str, least: int, field: str, words: str
) -> None:
    read(message, **{limit: least})
    for _ in range(2):  # unseen, then remembered
        with pytest.raises(InvalidRequest) as caught:
            read(message, **{limit: least - 1})
        assert (caught.value.field, caught.value.reason) == (field, "LIMIT_EXCEEDED")
        assert caught.value.metadata == ({"field": field} if field else {}) | {"limit": limit}
        assert words in str(caught.value)
    read(message, **{limit: least})


def test_headers_are_remembered_for_each_server_apart() -> None:
    """Two servers in one process: a request that one accepts may be refused by the other."""
    generous, strict = LIMITS, replace(LIMITS, max_rank=3)
    data = ATTEND.SerializeToString()
    for _ in range(3):
        messages.read_request(data, 0, len(data), generous)
        with pytest.raises(InvalidRequest):
            messages.read_request(data, 0, len(data), strict)


def test_a_cpu_takes_what_it_can_compute_in_seconds() -> None:
    assert default_request_flops(2, 2 * 10**13) == 2 * CPU_REQUEST_FLOPS
    assert default_request_flops(2, 10**9) == 10**9
    assert default_request_flops(0, 2 * 10**13) == 2 * 10**13


def test_the_largest_limits_can_be_shown(start_server: Callable[..., Server]) -> None:
    """Limits travel in 64 bits: a setting that is meant as no limit at all must fit."""
    largest = dict.fromkeys(("max_requests", "max_flops", "max_batch_flops", "max_elements", "max_caches"), "1e18")
    largest |= {"max_bytes": "1048576TiB", "max_sequences": "2147483647"}
    flags = [word for name, limit in largest.items() for word in (f"--{name.replace('_', '-')}", limit)]
    server = start_server(*flags)
    with Client(server.address) as client:
        limits = client.server_info().limits
    assert (limits.max_flops, limits.max_bytes) == (10**18, 2**60)
    assert limits.max_header_bytes == (1 << 16) + 64 * (2**31 - 1)


def test_a_servers_own_limits(start_server: Callable[..., Server]) -> None:
    """Set by flags, shown by ServerInfo, enforced, and stated by the errors: of requests, caches and layers."""
    limits = {
        "max_rank": 3,
        "max_elements": 1000,
        "max_sequences": 10,
        "max_request_flops": 500_000,
        "max_caches": 2,
        "max_cache_layers": 3,
        "max_layers": 4,
        "max_message_calls": 1024,
    }
    flags = [word for name, limit in limits.items() for word in (f"--{name.replace('_', '-')}", str(limit))]
    server = start_server(*flags, "--max-batch-flops", "1e6", "--device", "cpu")
    with Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        info = client.server_info()
        assert {name: getattr(info.limits, name) for name in limits} == limits
        assert info.limits.max_header_bytes == (1 << 16) + 64 * 10
        for message, field in (
            (ATTEND, "query.shape"),
            (messages.attend(*[np.zeros((1, 126, 8), np.float32)] * 3), "query.shape"),
            (packed(11), "query_lengths.shape"),
            (messages.attend(*[np.zeros((200, 4), np.float32)] * 3), ""),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                calls.unary(channel, "Attend", message.SerializeToString())
            status = calls.status_of(caught.value)
            error: Any = calls.detail(status, error_details_pb2.ErrorInfo)
            assert (error.reason, error.metadata["field"]) == ("LIMIT_EXCEEDED", field), status.message
            assert "at most " in status.message
        with pytest.raises(InvalidRequestError, match=r"at most 3 \(max_cache_layers\), found 4"):
            client.create_cache(1, 8, layers=4)
        with client.create_cache(1, 8) as cache:
            tokens = np.zeros((1, 125, 8), np.float32)
            assert cache.append(tokens, tokens) == 125
            with pytest.raises(
                InvalidRequestError, match=r"at most 1000 elements \(max_elements\), found 1008"
            ) as refused:
                cache.append(*[np.zeros((1, 126, 8), np.float32)] * 2)
            assert refused.value.field == "key.shape"
