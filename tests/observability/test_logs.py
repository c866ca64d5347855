"""Log lines: for people and for machines, without payloads, and rate-limited."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from grpc import StatusCode
from grpc._cython import cygrpc

from attnserve_server.observability import logs
from attnserve_server.observability.rate_limit import RateLimit


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, restored afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    for writer in logs.writers():
        writer.close()
    root.handlers[:], root.level = before, level


def logged(log_format: str, message: str, *args: object, **extra: object) -> str:
    out = io.StringIO()
    logs.configure("info", log_format, out)
    logging.getLogger("attnserve_server.test").info(message, *args, extra=extra)
    logging.getLogger("attnserve_server.test").debug("too little to tell")
    return written(out)


def written(out: io.StringIO) -> str:
    """What has been logged."""
    logs.flush()
    return out.getvalue()


@pytest.mark.usefixtures("root_logger")
def test_text_lines_are_lines() -> None:
    line = logged("text", "said %s\nand more", "a\r\nlie", requests=3)
    assert line.endswith(r"Z info attnserve_server.test said a\r\nlie\nand more requests=3" + "\n")
    assert line.count("\n") == 1


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_callers_send_cannot_speak_to_a_terminal_or_break_lines(log_format: str) -> None:
    sent = "é \x1b[31m \x9b \x7f \x85 \u2028 \u202e \U000e0001 \ud800"
    line = logged(log_format, "no %s", sent, definitions=sent)
    assert line.removesuffix("\n").isprintable()
    assert line.count("é") == 2
    if log_format == "json":
        assert json.loads(line)["definitions"] == sent
    else:
        escaped = r"é \x1b[31m \x9b \x7f \x85 \u2028 \u202e \U000e0001 \ud800"
        assert line.endswith(f"no {escaped} definitions={escaped}\n")


@pytest.mark.usefixtures("root_logger")
def test_json_lines_are_objects() -> None:
    line = json.loads(logged("json", "took %.1f s", 1.25, requests=3, kernel=None))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "attnserve_server.test",
        "message": "took 1.2 s",
        "requests": 3,
        "kernel": None,
    }


@pytest.mark.usefixtures("root_logger")
def test_names_are_shown_as_people_know_them() -> None:
    line = logged("text", "of %s", Path("/a/file"), code=StatusCode.NOT_FOUND, error=ValueError("no"), level=0.5)
    assert line.endswith(" of /a/file code=NOT_FOUND error=ValueError: no level=0.5\n")


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_payloads_are_never_written(log_format: str) -> None:
    secret = b"secret!!"
    payloads = (secret, bytearray(secret), memoryview(secret), BytesValue(value=secret), [secret])
    for payload in payloads:
        line = logged(log_format, "got %s", payload, data=payload)
        assert "secret" not in line
    assert "<ndarray of 32 bytes>" in logged(log_format, "got %s", np.full(4, 123.0))
    assert "<google.protobuf.BytesValue>" in logged(log_format, "got", data=BytesValue(value=secret))
    assert "<memoryview of 8 bytes>" in logged(
        log_format, "got %(data)s", MappingProxyType({"data": memoryview(secret)})
    )


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("error", 0)])
def test_what_grpc_has_ended_itself_is_no_fault(level: str, lines: int) -> None:
    """For a message that is too large in mid-stream, or a caller that has gone, gRPC itself logs a traceback."""
    out = io.StringIO()
    logs.configure(level, "text", out)
    theirs = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise cygrpc.ExecuteBatchError("Failed to send")
    except cygrpc.ExecuteBatchError:
        theirs.exception("ExecuteBatchError raised in core by servicer method [/x]")
    assert written(out).count("\n") == lines
    line = " info grpc._cython.cygrpc gRPC has ended an RPC: its caller has gone, or its message is too large\n"
    assert out.getvalue().count(line) == lines
    try:
        raise ValueError("of another kind")
    except ValueError:
        theirs.exception("Unexpected")
    assert "ValueError: of another kind" in written(out)


@pytest.mark.usefixtures("root_logger")
def test_an_error_of_the_servers_own_in_text_keeps_its_traceback() -> None:
    """Unlike metadata that are no text, of which gRPC logs the same error with another message."""
    out = io.StringIO()
    logs.configure("info", "text", out)
    of_grpc = logging.getLogger("grpc._cython.cygrpc")
    for message in ("Invalid encoding on %s", "Unexpected [%s] raised by servicer method"):
        try:
            b"\xff".decode()
        except UnicodeDecodeError:
            of_grpc.exception(message, "it")
    assert "raised by servicer" in written(out)
    assert "Invalid encoding" not in written(out)
    assert written(out).count("Traceback") == 1


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_what_goes_wrong_again_and_again_is_written_a_few_times(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttled by place in the code, from warnings up; lower levels are always written."""
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(logs, "monotonic", lambda: now[0])
    logs.configure("info", "json", out)
    logger = logging.getLogger("attnserve_server.test")

    def fail(times: int) -> None:
        for n in range(times):
            logger.log(level, "it failed again, number %d", n)

    fail(1000)
    logger.error("something else failed")
    for _ in range(100):
        logger.info("all is well")
    now[0] = 3.0
    fail(1000)
    lines = [json.loads(line) for line in written(out).splitlines()]
    failed = [line for line in lines if "again" in line["message"]]
    assert len(failed) == logs.BURST + 3 * logs.LINES_PER_SECOND
    assert [line.get("left_out") for line in failed] == [*[None] * int(logs.BURST), 1000 - logs.BURST, None, None]
    assert sum("else" in line["message"] for line in lines) == 1
    assert sum("well" in line["message"] for line in lines) == 100


def test_lines_that_nobody_wrote_are_not_saved_up() -> None:
    limit = RateLimit(rate=5.0, burst=20.0, now=0.0)
    for now in (0.0, 3600.0):
        assert sum(limit.take(now) for _ in range(1000)) == 20
    assert limit.left_out == 2 * 980


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_tracebacks_are_kept(log_format: str) -> None:
    out = io.StringIO()
    logs.configure("info", log_format, out)
    try:
        raise ValueError("the reason")
    except ValueError:
        logging.getLogger("attnserve_server.test").exception("it failed")
    text = written(out)
    assert "Traceback" in text
    assert "ValueError: the reason" in text
    if log_format == "json":
        assert len(text.splitlines()) == 1
        assert json.loads(text)["level"] == "error"


@pytest.fixture
def taken_over(root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The log, which has all that Python writes by itself."""
    for module, hook in ((warnings, "showwarning"), (sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(module, hook, getattr(module, hook))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    logs.configure("info", "text", out := io.StringIO())
    logs.take_over()
    return out


def test_of_threads_that_end_those_that_fail_are_in_the_log_by_name(taken_over: io.StringIO) -> None:
    for target, name in ((sys.exit, "leaving"), (lambda: 1 / 0, "failing")):
        thread = threading.Thread(target=target, name=name)
        thread.start()
        thread.join()
    text = written(taken_over)
    assert text.count(" error ") == 1
    assert " uncaught exception in thread failing\nTraceback" in text


def test_who_interrupts_a_process_sees_what_python_says(
    taken_over: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert written(taken_over) == ""
    assert capsys.readouterr().err == "KeyboardInterrupt\n"
