"""The command `attnserve top` against the real server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import calls
import numpy as np
import pytest

from attnserve import Client
from attnserve._commands import cli
from attnserve._commands.reading import Reading
from attnserve._commands.top_figures import figures

NOBODY = "127.0.0.1:9"


def test_the_figures_of_a_real_server(server: Any) -> None:
    calls.until_nothing_is_in_flight(server.http_address)
    query = np.ones((2, 3, 16), np.float32)
    before = Reading.of(server.http_address)
    with Client(server.address) as client, client.create_cache(num_kv_heads=2, head_dim=16) as cache:
        futures = [client.submit(query, query, query) for _ in range(20)]
        sizes = [future.result().batch_size for future in futures]
        cache.append(query, query)
        calls.until_nothing_is_in_flight(server.http_address)
        after = Reading.of(f"http://{server.http_address}/")
    found = figures(before, after)
    assert found.requests * found.seconds == pytest.approx(22), "the cache's creation is one, too"
    assert found.query_tokens * found.seconds == pytest.approx(60)
    assert found.operations["attend_stream"].requests * found.seconds == pytest.approx(20)
    assert found.operations["append"].requests * found.seconds == pytest.approx(1)
    assert 0 < found.operations["attend_stream"].p50 <= found.operations["attend_stream"].p99
    assert found.batches.batches * found.seconds == pytest.approx(sum(1 / size for size in sizes) + 1)
    others = before.total("attnserve_caches"), before.total("attnserve_cache_tokens")  # those of other tests
    assert (found.caches.open, found.caches.tokens) == (others[0] + 1, others[1] + 3)
    assert found.caches.pool_bytes == 512 << 20
    assert 0 < found.device.use < 1
    assert found.device.resident_bytes > 1e6
    assert set(found.phases) == {"decode", "queue", "staging", "compute", "encode"}
    assert found.state == "serving"
    assert set(found.load.limits) >= {"requests", "bytes", "flops"}
    assert sum(found.callers.values()) == pytest.approx(found.flops)
    assert "20" not in found.rejected


def test_once(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", server.http_address, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert server.http_address in shown
    assert "requests/s" in shown
    assert "in use" in shown


def test_json(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", server.http_address, "--json", "--interval", "0.1"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["state"] == "serving"
    assert found["device"]["name"] == "cpu"
    assert found["load"]["limits"]["requests"] == 4096
    assert found["seconds"] >= 0.1


@pytest.mark.parametrize("flag", ["--once", "--json"])
def test_what_was_not_printed_is_no_success(
    server: Any, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-c between the two readings."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert cli.main(["top", server.http_address, flag]) == 130
    assert capsys.readouterr().out == ""


def test_what_is_wrong_is_one_line(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", NOBODY, "--once"]) == 1
    assert capsys.readouterr().err.startswith(f"attnserve: no metrics at http://{NOBODY}/metrics: ")
    assert cli.main(["top", f"{server.http_address}/nowhere", "--once"]) == 1
    assert "404" in capsys.readouterr().err
    assert cli.main(["top", server.address, "--once"]) == 1  # the gRPC port
    assert capsys.readouterr().err.endswith(
        "/metrics: what is there does not speak HTTP; metrics are on the HTTP port, by default 8002\n"
    )
    assert cli.main(["top", server.http_address]) == 2
    assert "--once" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rich", "prometheus_client"])
def test_without_its_extra_it_says_what_to_install(missing: str) -> None:
    command = "from attnserve._commands.cli import main; sys.exit(main(['top']))"
    program = f"import sys; sys.modules[{missing!r}] = None; {command}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"attnserve: top needs {missing}")
    assert "pip install 'attnserve[top]'" in done.stderr


class Terminal:
    """The command in a terminal, and its output there."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        command = [sys.executable, "-m", "attnserve", "top", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.written = ""

    def until(self, words: str) -> None:
        """Waits until it has written `words`, after what was waited for before."""
        deadline = time.monotonic() + calls.PATIENCE_S
        while words not in self.written:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} did not come: {self.written}"
            assert self._read(), f"it has ended, and {words!r} did not come: {self.written}"
        self.written = self.written.partition(words)[2]

    def _read(self) -> bool:
        """Reads what it has written, and returns whether it was anything: once it has ended, nobody holds the other
        end, which is an error on Linux and the end of a file elsewhere.
        """
        try:
            found = os.read(self._ours, 65536)
        except OSError:
            found = b""
        self.written += found.decode(errors="replace")
        return bool(found)

    def interrupt(self) -> int:
        """Presses Ctrl-C. Returns the exit status."""
        return self.end(signal.SIGINT)

    def end(self, number: signal.Signals) -> int:
        """Sends it a signal. Returns the exit status."""
        self.process.send_signal(number)
        while select.select([self._ours], [], [], calls.PATIENCE_S)[0] and self._read():
            pass
        try:
            return self.process.wait(calls.PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)


def test_live(server: Any) -> None:
    terminal = Terminal(server.http_address, "--interval", "0.1")
    try:
        for _ in range(3):
            terminal.until("ctrl-c ends it")
            terminal.until("requests/s")
    finally:
        status = terminal.interrupt()
    assert status == 0


def test_the_terminal_is_as_it_was_when_it_is_told_to_stop(server: Any) -> None:
    terminal = Terminal(server.http_address, "--interval", "0.1")
    try:
        terminal.until("\x1b[?1049h")  # another screen
        terminal.until("\x1b[?25l")  # without a cursor
        terminal.until("requests/s")
    finally:
        status = terminal.end(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert {"\x1b[?1049l", "\x1b[?25h"} <= set(re.findall(r"\x1b\[\?\d+[hl]", terminal.written))


def test_live_waits_for_a_server_that_is_not_there() -> None:
    terminal = Terminal(NOBODY, "--interval", "0.05")
    try:
        terminal.until("no metrics at")
        terminal.until("no metrics at")
    finally:
        status = terminal.interrupt()
    assert status == 0
