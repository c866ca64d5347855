"""The thread that writes log lines: in order, all that there is room for, and a word about what is missing."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from full_pipe import PIPE, FullPipe

from attnserve_server.observability import log_writer
from attnserve_server.observability.log_writer import LogWriter
from attnserve_server.observability.logs import JsonFormatter


@pytest.fixture
def pipe() -> Iterator[FullPipe]:
    """A full pipe."""
    full = FullPipe()
    yield full
    full.close()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 1, text, (), None)


def test_what_does_not_fit_is_left_out_counted_and_told_of(pipe: FullPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MAX_WAITING", 10_000)
    stream = os.fdopen(os.dup(pipe.writer.fileno()), "w", encoding="utf-8")
    writer = LogWriter(stream)
    writer.setFormatter(JsonFormatter())
    for number in range(500):
        writer.handle(record(f"line {number}"))
    missing = writer.left_out
    assert 300 < missing < 500
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.append(pipe.rest()))
    reading.start()
    writer.flush()
    for number in range(500, 510):  # there is room again
        writer.handle(record(f"line {number}"))
    writer.close()
    writer.handle(record("after the end"))
    stream.close()
    reading.join()
    lines = [json.loads(line) for line in said[0].splitlines()]
    kept = 500 - missing
    assert [line["message"] for line in lines[:kept]] == [f"line {number}" for number in range(kept)]
    assert (lines[kept]["left_out"], lines[kept]["level"]) == (missing, "warning")
    rest = [line["message"] for line in lines[kept + 1 :]]
    assert rest == [*(f"line {number}" for number in range(500, 510)), "after the end"]
    assert writer.left_out == missing


def test_what_cannot_be_written_is_counted() -> None:
    with open("/dev/full", "w") as full:
        writer = LogWriter(full)
        writer.handle(record("to a full disk"))
        writer.close()
        assert writer.left_out == 1


def read_to_the_end(pipe: FullPipe, writer: LogWriter, stream: IO[str]) -> str:
    """What somebody reads who begins as the writer ends."""
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.append(pipe.rest()))
    reading.start()
    writer.close()
    stream.close()
    reading.join()
    return said[0]


def test_what_was_left_out_is_told_of_though_no_line_follows(pipe: FullPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MAX_WAITING", 10_000)
    monkeypatch.setattr(log_writer, "PATIENCE_S", 60.0)
    stream = os.fdopen(os.dup(pipe.writer.fileno()), "w", encoding="utf-8")
    writer = LogWriter(stream)
    writer.setFormatter(JsonFormatter())
    while not writer.left_out:
        writer.handle(record("a line"))
    said = read_to_the_end(pipe, writer, stream)
    *lines, last = map(json.loads, said.splitlines())
    assert (last["left_out"], last["level"]) == (1, "warning")
    assert {line["message"] for line in lines} == {"a line"}


def test_who_ends_waits_once_for_a_log_that_nobody_reads(pipe: FullPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = os.fdopen(os.dup(pipe.writer.fileno()), "w", encoding="utf-8")
    writer = LogWriter(stream)
    monkeypatch.setattr(log_writer, "PATIENCE_S", 0.01)
    writer.handle(record("unread"))
    writer.flush()
    monkeypatch.setattr(log_writer, "PATIENCE_S", 1e6)
    writer.flush()
    writer.close()
    writer.handle(record("after the end"))
    pipe.close()
    stream.close()


def test_a_disk_that_has_room_again_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "PATIENCE_S", 60.0)
    with open("/dev/full", "w") as disk, (tmp_path / "log").open("w") as room:
        writer = LogWriter(disk)
        writer.setFormatter(JsonFormatter())
        for number in range(3):
            writer.handle(record(f"to a full disk, line {number}"))
        writer.flush()
        os.dup2(room.fileno(), disk.fileno())
        for number in range(2):
            writer.handle(record(f"line {number}"))
        writer.close()
    missing, *lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (missing["left_out"], missing["level"], writer.left_out) == (3, "warning", 3)
    assert [line["message"] for line in lines] == ["line 0", "line 1"]


def test_a_process_without_standard_error_logs_to_nobody() -> None:
    writer = LogWriter(None)
    writer.handle(record("to nobody"))
    writer.close()
    assert writer.left_out == 0


def test_what_cannot_be_formatted_is_said() -> None:
    out = io.StringIO()
    writer = LogWriter(out)
    writer.setFormatter(JsonFormatter())
    writer.handle(logging.LogRecord("test", logging.INFO, __file__, 1, "%d", ("no number",), None))
    writer.close()
    line = json.loads(out.getvalue())
    assert (line["level"], line["message"]) == ("error", "a line of test cannot be written")
    assert "TypeError" in line["traceback"]


def test_a_pipe_that_does_not_block_is_waited_for(pipe: FullPipe) -> None:
    """As some runtimes set theirs."""
    os.set_blocking(pipe.writer.fileno(), False)
    stream = os.fdopen(os.dup(pipe.writer.fileno()), "w", encoding="utf-8")
    writer = LogWriter(stream)
    writer.handle(record("x" * 3 * PIPE))
    said = read_to_the_end(pipe, writer, stream)
    assert (said, writer.left_out) == ("x" * 3 * PIPE + "\n", 0)
