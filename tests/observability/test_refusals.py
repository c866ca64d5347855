"""Log lines for refused requests: the reason and the request's id, and only a few per reason however many there are."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calls
import grpc
import messages
import numpy as np
import pytest
from frames import HEADERS, Connection
from google.rpc import error_details_pb2

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.tokens import digest, format_hash, new_token
from attnserve_server.errors import Cancelled, ComputationFailed, InvalidRequest, RequestError
from attnserve_server.observability.refusals import BURST, LINES_PER_SECOND, MAX_ID, Refusals, request_id
from attnserve_server.rpc.services import CONNECTION_STREAMS

if TYPE_CHECKING:
    from conftest import Server

SECRET = b"never-in-a-log!!"


class Lines(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    logger, handler = logging.getLogger("attnserve_server.observability.refusals"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(level)


def invalid() -> RequestError:
    return InvalidRequest("query.shape", "rank 4", 5)


def note(refusals: Refusals, error: RequestError, times: int = 1) -> None:
    for n in range(times):
        refusals.note("attend", error, lambda n=n: f"r-{n}", "team")  # type: ignore[misc]


async def test_a_line_says_what_whose_and_why(lines: list[Any]) -> None:
    note(Refusals(), invalid())
    (line,) = lines
    assert line.getMessage() == "refused: query.shape: expected rank 4, found 5"
    assert (line.levelname, line.operation, line.code) == ("INFO", "attend", "INVALID_ARGUMENT")
    assert (line.reason, line.request_id, line.caller) == ("INVALID_FIELD", "r-0", "team")


async def test_faults_of_the_server_are_errors_and_calls_given_up_are_none(lines: list[Any]) -> None:
    refusals = Refusals()
    note(refusals, ComputationFailed("a kernel"))
    note(refusals, Cancelled())
    assert [line.levelname for line in lines] == ["ERROR"]


async def test_under_attack_there_are_few_lines_of_a_reason_and_the_rest_is_counted(lines: list[Any]) -> None:
    now = 0.0
    refusals = Refusals(lambda: now)
    asked: list[int] = []
    for n in range(10_000):
        refusals.note("attend", invalid(), lambda n=n: str(asked.append(n)), None)  # type: ignore[misc]
    assert len(lines) == len(asked) == BURST
    note(refusals, ComputationFailed("a kernel"))
    assert len(lines) == BURST + 1, "each reason has lines of its own"
    now = 2.0
    note(refusals, invalid(), 10_000)
    written = BURST + 1 + 2 * LINES_PER_SECOND
    assert len(lines) == written
    refusals.close()
    summary = lines[-1]
    assert (len(lines), summary.reason, summary.left_out) == (written + 1, "INVALID_FIELD", 20_001 - written)
    refusals.close()
    assert len(lines) == written + 1


async def test_what_was_left_out_is_said_at_the_end_at_the_level_of_its_lines(lines: list[Any]) -> None:
    refusals = Refusals(lambda: 0.0)
    note(refusals, ComputationFailed("a kernel"), int(BURST) + 7)
    refusals.close()
    assert (lines[-1].left_out, lines[-1].levelname) == (7, "ERROR")


async def test_what_was_left_out_is_said_without_being_asked(lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time only those since the last time."""
    monkeypatch.setattr("attnserve_server.observability.refusals.SUMMARY_AFTER", 0.0)
    refusals = Refusals(lambda: 0.0)
    note(refusals, invalid(), int(BURST))
    for times, missing in enumerate((7, 5), 1):
        note(refusals, invalid(), missing)
        for _ in range(100):  # turns of the event loop, in one of which the timer fires
            await asyncio.sleep(0)
        assert (len(lines), lines[-1].left_out) == (BURST + times, missing)


async def test_what_was_said_at_the_end_is_not_said_again(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("attnserve_server.observability.refusals.SUMMARY_AFTER", 0.0)
    refusals = Refusals(lambda: 0.0)
    note(refusals, invalid(), int(BURST) + 7)
    refusals.close()
    for _ in range(100):  # turns of the event loop, in one of which a timer would fire
        await asyncio.sleep(0)
    assert (len(lines), lines[-1].left_out) == (BURST + 1, 7)
    assert "Exception" not in caplog.text


def test_long_request_ids_are_cut_off() -> None:
    assert request_id("rpc", [("other", "x"), ("x-request-id", "y" * 1000)]) == "y" * MAX_ID


def test_a_server_under_attack(start_server: Callable[..., Server]) -> None:
    """Over a socket: lines carry the callers' request ids, there are few, and they hold nothing of the payload."""
    server = start_server("--log-format", "json", "--device", "cpu")
    bad = messages.random_attend(0, kv_lengths=np.array([99]))
    bad.query.data = (SECRET * len(bad.query.data))[: len(bad.query.data)]
    with grpc.insecure_channel(server.address) as channel:
        metadata = (("x-request-id", "mine one"),)
        with pytest.raises(grpc.RpcError) as caught:
            calls.unary(channel, "Attend", bad.SerializeToString(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError):
            calls.unary(channel, "ServerInfo", b"\xff" + SECRET)
        stream = calls.Stream(channel)
        stream.send(*(calls.call(n, bad) for n in range(1000)))
        assert all(reply.error.code for reply in stream.replies(1000))
        stream.half_close()
        stream.rest()
    assert server.stop() == 0
    said = server.stderr()
    assert SECRET.decode() not in said
    logged = [json.loads(line) for line in said.splitlines()]
    refused = [line for line in logged if line["logger"] == "attnserve_server.observability.refusals"]
    first, malformed, *others = refused
    assert (first["operation"], first["reason"], first["request_id"]) == ("attend", "INVALID_FIELD", "mine?one")
    assert "kv_lengths[0]: expected from 0 to 3, found 99" in first["message"]
    assert (malformed["operation"], malformed["reason"]) == ("server_info", "MALFORMED_MESSAGE")
    lines = [line for line in others if "request_id" in line]
    assert BURST - 1 <= len(lines) < 300
    assert all(re.fullmatch(r"rpc-[0-9a-f]{6}-\d+/\d+", line["request_id"]) for line in lines)
    assert len(lines) + sum(line["left_out"] for line in others if "left_out" in line) == 1000


def test_metadata_that_are_not_text_are_no_fault(start_server: Callable[..., Server]) -> None:
    """GRPC logs a traceback for each, and each time that they are asked for."""
    server = start_server("--log-format", "json", "--device", "cpu")
    with Connection(server.address) as connection:
        connection.begin("/attnserve.v1.AttentionService/Attend", metadata={"x-request-id": b"mine \xff"})
        assert connection.until(HEADERS, ends=True, count=1)
    assert server.stop() == 0
    logged = [json.loads(line) for line in server.stderr().splitlines()]
    (refused,) = [line for line in logged if line["logger"] == "attnserve_server.observability.refusals"]
    assert (refused["reason"], refused["request_id"]) == ("INVALID_FIELD", "mine??")
    assert {line["level"] for line in logged} == {"info"}
    assert not any("traceback" in line for line in logged)


def test_refused_readers_of_metrics_are_in_the_log(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """As refused RPCs are: with the reason and an id, without the token, and few of a kind."""
    known, unknown = new_token(), new_token()
    (tmp_path / "callers.toml").write_text(
        f'[[tokens]]\nname = "ann"\nroles = ["use"]\nhash = "{format_hash(digest(known))}"\n'
    )
    server = start_server("--log-format", "json", "--device", "cpu", "--callers", str(tmp_path / "callers.toml"))

    def status(**headers: str) -> int:
        request = urllib.request.Request(f"http://{server.http_address}/metrics", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=30):
            pass
        caught.value.close()
        return caught.value.code

    assert status(**{"Authorization": f"Bearer {known}", "X-Request-Id": "mine one"}) == 403
    assert status() == 401
    attempts = 50
    for _ in range(attempts):
        assert status(Authorization=f"Bearer {unknown}") == 401
    assert server.stop() == 0
    said = server.stderr()
    assert not re.search(f"{known}|{unknown}", said)
    logged = [json.loads(line) for line in said.splitlines()]
    lines = [line for line in logged if line["logger"] == "attnserve_server.observability.refusals"]
    lacking, nobody, *others = lines
    assert (lacking["operation"], lacking["code"], lacking["reason"]) == (
        "metrics",
        "PERMISSION_DENIED",
        "ROLE_MISSING",
    )
    assert (lacking["caller"], lacking["request_id"]) == ("ann", "mine?one")
    assert (nobody["code"], nobody["reason"], "caller" in nobody) == ("UNAUTHENTICATED", "NO_TOKEN", False)
    assert re.fullmatch(r"http-[0-9a-f]{6}-\d+", nobody["request_id"])
    assert {line["reason"] for line in others} == {"UNKNOWN_TOKEN"}
    written = [line for line in others if "request_id" in line]
    assert BURST <= len(written) <= attempts
    assert len(written) + sum(line.get("left_out", 0) for line in others) == attempts


def test_what_anybody_may_ask_is_refused_in_the_log(start_server: Callable[..., Server]) -> None:
    """Health and reflection: streams beyond those of a connection, and requests that are none."""
    server = start_server("--log-format", "json", "--device", "cpu")
    reflection, health = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/"
    with grpc.insecure_channel(server.address) as channel:
        for method in ("Check", "Watch"):
            with pytest.raises(grpc.RpcError):
                list(channel.unary_stream(health + method)(SECRET, timeout=calls.PATIENCE_S))
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(health + "Check")(b"\x0a\x04nope", timeout=calls.PATIENCE_S)
        watch = channel.unary_stream(health + "Watch")
        watches = [watch(b"", timeout=calls.PATIENCE_S) for _ in range(CONNECTION_STREAMS)]
        assert {next(each) for each in watches} == {b"\x08\x01"}  # SERVING
        codes = []
        for begin in (lambda: watch(b""), lambda: channel.stream_stream(reflection)(iter([b"\x3a\0"]))):
            with pytest.raises(grpc.RpcError) as caught:
                next(begin())
            codes.append(caught.value.code())  # type: ignore[attr-defined]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="caller_streams") == 2
        for each in watches:
            each.cancel()
    assert server.stop() == 0
    said = server.stderr()
    assert SECRET.decode() not in said
    lines = [json.loads(line) for line in said.splitlines()]
    assert [(line["operation"], line["reason"]) for line in lines if line["logger"].endswith(".refusals")] == [
        ("health_check", "MALFORMED_MESSAGE"),
        ("health_watch", "MALFORMED_MESSAGE"),
        ("health_check", "NOT_FOUND"),
        ("health_watch", "TOO_MANY_STREAMS"),
        ("reflection", "TOO_MANY_STREAMS"),
    ]


def test_a_caller_has_so_many_streams_and_no_more(start_server: Callable[..., Server]) -> None:
    server = start_server("--max-caller-streams", "2", "--device", "cpu")
    own = [("grpc.use_local_subchannel_pool", 1)]
    with (
        grpc.insecure_channel(server.address, own) as channel,
        grpc.insecure_channel(server.address, own) as neighbour,
    ):
        info = pb.ServerInfoResponse.FromString(calls.unary(channel, "ServerInfo", b""))
        assert info.limits.max_caller_streams == 2
        streams = [calls.Stream(channel) for _ in range(2)]
        request = messages.random_attend(0)
        for stream in streams:
            stream.send(calls.call(1, request))
            stream.replies(1)
        code, status = calls.Stream(channel).error()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "as many streams as one may have: 2" in status.message
        info_of_error = calls.detail(status, error_details_pb2.ErrorInfo)
        assert (info_of_error.reason, dict(info_of_error.metadata)) == (
            "TOO_MANY_STREAMS",
            {"bound": "caller_streams", "most": "2"},
        )
        assert calls.metric(server.http_address, "attnserve_rejected_requests_total", reason="caller_streams") == 1
        other = calls.Stream(neighbour)
        other.send(calls.call(1, request))
        other.replies(1)
        streams[0].half_close()
        streams[0].rest()
        another = calls.Stream(channel)
        another.send(calls.call(1, request))
        another.replies(1)
        for stream in (streams[1], other, another):
            stream.half_close()
            stream.rest()
    assert server.stop() == 0
    (line,) = (line for line in server.stderr().splitlines() if "reason=TOO_MANY_STREAMS" in line)
    assert "operation=attend_stream" in line


def test_ids_of_another_process_are_others() -> None:
    """So a line is found in the logs of several replicas."""
    module = "attnserve_server.observability.refusals"
    code = f"from {module} import request_id; print(request_id('rpc', ()), request_id('rpc', ()))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    processes = {each.rpartition("-")[0] for each in (*said, request_id("rpc", ()))}
    assert len(set(said)) == len(processes) == 2
