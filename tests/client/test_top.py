"""The command `attnserve top` against the real server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calls
import certificates
import numpy as np
import pytest

from attnserve import TLS, Client, Token
from attnserve._commands import cli
from attnserve._commands.connection_flags import ASK_FOR_CA, ASK_FOR_NAME
from attnserve._commands.endpoint import Endpoint
from attnserve._commands.reading import Reading
from attnserve._commands.top_figures import figures
from attnserve_server.access.tokens import digest, format_hash, new_token

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


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "the page has no end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n", "bytes too soon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 31\r\n\r\n<html>not metrics</html> at all", "attnserve: no metrics at "),
        (b"HTTP/1.1 500 \x1b[31m\r\nContent-Length: 12\r\n\r\n\x1b]0;title\x07\r\n", "500 ]0;title\n"),
    ],
    ids=["endless", "cut off", "another page", "escape sequences"],
)
def test_a_port_that_has_something_else(head: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its reply may never end: it goes on for as long as somebody reads."""

    def speak(listening: socket.socket) -> None:
        peer, _ = listening.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(65536)
            peer.sendall(head)
            while "no end" in said:
                peer.sendall(b"attnserve_x 1\n")
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        speaking = threading.Thread(target=speak, args=(listening,))
        speaking.start()
        assert cli.main(["top", "127.0.0.1:{1}".format(*listening.getsockname()), "--once", "--timeout", "1"]) == 1
        speaking.join()
    assert said in capsys.readouterr().err


def test_a_server_with_tls_tells_those_who_have_a_token(
    start_server: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = certificates.Authority(tmp_path)
    files = authority.issue_for_server(name="attnserve.example")
    tokens = {role: new_token() for role in ("metrics", "use")}
    entries = (
        f'[[tokens]]\nname = "of-{role}"\nroles = ["{role}"]\nhash = "{format_hash(digest(token))}"\n'
        for role, token in tokens.items()
    )
    (tmp_path / "callers.toml").write_text("\n".join(entries))
    server = start_server(
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--http-tls", "true"),
        *("--callers", str(tmp_path / "callers.toml")),
    )
    query = np.ones((2, 3, 16), np.float32)
    with Client(server.address, tls=TLS(authority.ca), token=tokens["use"]) as client:
        client.attend(query, query, query)
    (tmp_path / "token").write_text(tokens["metrics"])

    def top(address: str, *flags: str) -> int:
        return cli.main(["top", address, "--once", "--interval", "0.1", *flags])

    trusted = ("--ca", str(authority.ca))
    assert top(server.http_address, *trusted, "--token-file", str(tmp_path / "token")) == 0
    assert "of-use" not in capsys.readouterr().out, "it has had nothing in the meantime"
    monkeypatch.setenv("ATTNSERVE_TOKEN", tokens["metrics"])
    assert top(f"https://{server.http_address}", *trusted, "--server-name", "attnserve.example") == 0
    reading = Reading.of(
        Endpoint(server.http_address, tls=TLS(authority.ca), token=Token(tokens["metrics"]), timeout=60.0)
    )
    assert reading.total("attnserve_caller_query_tokens_total", caller="of-use") == 3
    assert reading.total("attnserve_caller_requests_total", caller="anonymous") == 0
    capsys.readouterr()
    for another in ("another.example", "127.0.0.9"):
        assert top(server.http_address, *trusted, "--server-name", another) == 1
        assert capsys.readouterr().err.endswith(f"{ASK_FOR_NAME}\n")
    assert top(f"https://{server.http_address}") == 1
    assert capsys.readouterr().err.endswith(f"{ASK_FOR_CA}\n")
    assert top(server.address, *trusted) == 1  # the gRPC port
    assert capsys.readouterr().err.endswith("; metrics are on the HTTP port, by default 8002\n")
    assert top(server.http_address) == 1
    assert capsys.readouterr().err.endswith("; if it speaks TLS: https://\n")
    monkeypatch.setenv("ATTNSERVE_TOKEN", tokens["use"])
    assert top(server.http_address, *trusted) == 1
    assert "403" in capsys.readouterr().err
    monkeypatch.delenv("ATTNSERVE_TOKEN")
    assert top(server.http_address, *trusted) == 1
    assert "401" in capsys.readouterr().err


def test_a_server_without_tls_is_not_asked_for_it(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It may wait for the end of a request, or say in its own words that this is none."""
    hint = "; if it speaks no TLS: http://, and none of the flags and variables for TLS\n"
    assert cli.main(["top", f"https://{server.http_address}", "--once", "--timeout", "0.3"]) == 1
    assert capsys.readouterr().err.endswith(f"timed out{hint}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = "127.0.0.1:{1}".format(*listening.getsockname())

        def speak() -> None:
            peer, _ = listening.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                while peer.recv(65536):
                    pass

        speaking = threading.Thread(target=speak)
        speaking.start()
        assert cli.main(["top", address, "--tls", "--once"]) == 1
        speaking.join()
    assert capsys.readouterr().err.endswith(hint)


def test_a_token_does_not_travel_in_the_clear(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSERVE_TOKEN", "secret-token")
    assert cli.main(["top", "attnserve.example:8002", "--once"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("attnserve: token: attnserve.example:8002 would get it unencrypted")
    assert "secret" not in said
    for address, token in (
        ("https://attnserve.example", Token("secret-token")),
        ("attnserve.example", Token("secret-token", plaintext=True)),
        ("127.0.0.1", Token("secret-token")),
    ):
        Endpoint(address, token=token)


@pytest.mark.parametrize(
    "address",
    [
        *("", "ftp://host:1", "host:port", "host:65536", "http://", "http://[::1", "a..name:1", "\u00e4..name:1"),
        *("host:1/\u00e4", "a name:1", "host:1/a path", "host\x7f:1", f"{'name' * 16}:1"),
    ],
)
def test_what_is_no_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", address, "--once"]) == 2
    expected = "attnserve: address: expected host:port or http://host:port, found "
    assert capsys.readouterr().err == f"{expected}{address!r}\n"


def test_an_address_without_tls_contradicts_flags_that_ask_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "http://host:8002", "--tls", "--once"]) == 2
    expected = "expected https://, as flags or variables ask for TLS, found 'http://host:8002'"
    assert capsys.readouterr().err == f"attnserve: address: {expected}\n"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host", "http://host:8002/metrics"),
        ("[::1]", "http://[::1]:8002/metrics"),
        ("host:80", "http://host:80/metrics"),
        ("http://host", "http://host/metrics"),
        ("host:", "http://host:8002/metrics"),
        ("user:secret@host:80", "http://host:80/metrics"),
        ("http://host:80/metrics", "http://host:80/metrics"),
        ("https://host/some/metrics/", "https://host/some/metrics"),
        ("host/some/proxy", "http://host:8002/some/proxy/metrics"),
    ],
)
def test_a_host_by_itself_has_the_port_of_a_server(address: str, url: str) -> None:
    assert Endpoint(address).url == url


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
