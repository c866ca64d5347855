"""The metrics of a real server, after requests over a real socket."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING

import calls
import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from attnserve import Client
from attnserve_server.observability import metrics as declared

if TYPE_CHECKING:
    from tests.conftest import Server


def test_a_real_server_tells_what_happened(start_server: Callable[..., Server]) -> None:
    server = start_server()
    query = np.ones((2, 3, 16), np.float32)
    with Client(server.address) as client:
        for _ in range(3):
            assert client.attend(query, query, query).output.shape == query.shape
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/attnserve.v1.AttentionService/Attend")(b"", timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    calls.until_nothing_is_in_flight(server.http_address)  # a reply counts until it has been written
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=30) as response:
        text = response.read().decode()
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    assert read["attnserve_requests_total", "OK", "attend_stream"] == 3
    assert read["attnserve_requests_total", "INVALID_ARGUMENT", "attend"] == 1
    assert read["attnserve_request_duration_seconds_count", "attend_stream"] == 3
    for phase in declared.PHASES:
        assert read["attnserve_request_phase_duration_seconds_count", phase] == 3
    assert read["attnserve_batch_requests_sum",] == 3
    assert read["attnserve_query_tokens_total",] == 9
    assert read["attnserve_caller_query_tokens_total", "anonymous"] == 9
    assert read["attnserve_caller_flops_total", "anonymous"] == read["attnserve_flops_total",]
    assert read["attnserve_flops_total",] > 0
    busy = read["attnserve_device_busy_seconds_total",]
    assert read["attnserve_caller_device_seconds_total", "anonymous"] == pytest.approx(busy)
    assert read["attnserve_received_bytes_total",] > 3 * 3 * query.nbytes
    assert read["attnserve_sent_bytes_total",] > 3 * query.nbytes
    assert sum(count for (name, *_), count in read.items() if name == "attnserve_kernel_calls_total") > 0
    assert read["attnserve_in_flight_requests",] == read["attnserve_queue_bytes",] == 0
    assert "_created" not in text


@pytest.mark.parametrize(
    ("method", "operation", "message", "code"),
    [
        ("AttentionService/ServerInfo", "server_info", b"", "OK"),
        ("AttentionService/ServerInfo", "server_info", b"\xff", "INVALID_ARGUMENT"),
        ("CacheService/Create", "create", b"", "INVALID_ARGUMENT"),
        ("CacheService/List", "list", b"", "OK"),
        ("CacheService/Delete", "delete", b"\x0a\x01x", "OK"),
        ("LayerService/List", "list_layers", b"", "OK"),
        ("LayerService/Get", "get_layer", b"\x0a\x01x", "NOT_FOUND"),
        ("LayerService/Load", "load_layers", b"", "INVALID_ARGUMENT"),
        ("LayerService/Unload", "unload_layers", b"", "INVALID_ARGUMENT"),
    ],
)
def test_requests_without_tensors_are_counted_too(
    server: Server, method: str, operation: str, message: bytes, code: str
) -> None:
    def counted() -> list[float]:
        answered = calls.metric(server.http_address, "attnserve_requests_total", operation=operation, code=code)
        name = "attnserve_request_duration_seconds_count"
        timed = calls.metric(server.http_address, name, operation=operation)
        return [answered, timed, calls.metric(server.http_address, "attnserve_received_bytes_total")]

    before = counted()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/attnserve.v1.{method}").future(message, timeout=calls.PATIENCE_S)
        assert call.code().name == code
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 1, len(message)]
