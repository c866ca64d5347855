"""Faults of the server: the error has the id of its line in the server's log, whichever way the call took."""

from __future__ import annotations

import json
from pathlib import Path

from askers import array, attend_in_tasks, attend_in_threads, attend_on_uvloop
from conftest import POOL, Server

from attnserve import AttentionResult, ServerError
from benchmarks.chaos import faulty


def test_a_kernel_that_fails_is_found_in_the_log(tmp_path: Path) -> None:
    server = Server((*POOL, "--log-format", "json"), tmp_path / "stderr", program=(faulty.__file__,))
    good, bad = array(1), array(1)
    bad.flat[0] = faulty.FAULTS["kernel"]
    errors = {}
    try:
        for attend in (attend_in_threads, attend_in_tasks, attend_on_uvloop):
            for transport, operation in (("stream", "attend_stream"), ("unary", "attend")):
                failed, answered, failed_too = attend(server.address, [bad, good, bad], transport=transport)
                assert isinstance(answered, AttentionResult)
                for error in (failed, failed_too):
                    assert isinstance(error, ServerError)
                    assert error.request_id
                    assert str(error).endswith(f": RuntimeError (request {error.request_id} in the server's log)")
                    errors[error.request_id] = operation, "INTERNAL", error.reason, "error"
    finally:
        status = server.stop()
    assert (status, len(errors)) == (0, 12), server.stderr()
    logged = [json.loads(line) for line in server.stderr().splitlines()]
    lines = [line for line in logged if "request_id" in line]
    keys = ("operation", "code", "reason", "level")
    assert {line["request_id"]: tuple(line[key] for key in keys) for line in lines} == errors
    assert len(lines) == len(errors)
    for line in lines:
        before = logged[: logged.index(line)]
        assert any("an error of a kernel" in earlier.get("traceback", "") for earlier in before)
