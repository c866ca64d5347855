"""The shell command against the real server, and where there is none: what it prints, and its exit status."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from typing import Any

import pytest

from attnserve import Client, UnavailableError
from attnserve._commands import cli


def test_the_command_says_what_a_server_is(server: Any, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    info = client.server_info()
    assert cli.main(["info", server.address]) == 0
    text = capsys.readouterr().out
    assert info.version in text
    assert info.device in text
    assert cli.main(["info", server.address, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["limits"]["max_requests"] == info.limits.max_requests
    assert [kernel["name"] for kernel in printed["kernels"]] == [kernel.name for kernel in info.kernels]
    assert re.search(rf"^--max-requests +{info.limits.max_requests} \(default\)$", text, re.MULTILINE)
    assert re.search(r"^--listen +not told to callers \(flag\)$", text, re.MULTILINE)
    assert len(printed["settings"]) == len(info.settings) > 10


def test_the_command_says_where_a_server_is_that_says_so(
    server: Any, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["info", server.address]) == 0
    assert not re.search("^address ", capsys.readouterr().out, re.MULTILINE)
    info = dataclasses.replace(client.server_info(), address="here.example:8001", threads=None)
    monkeypatch.setattr(Client, "server_info", lambda self, timeout: info)
    assert cli.main(["info", server.address]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^address +here\.example:8001$", text, re.MULTILINE)
    assert not re.search("^threads ", text, re.MULTILINE), "they do not compute"


def test_the_command_is_cut_short(server: Any) -> None:
    """By `head`, say, which closes its end of the pipe."""
    nobody_reads, out = os.pipe()
    os.close(nobody_reads)
    command = [sys.executable, "-m", "attnserve", "info", server.address]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(out)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("command", [("info",), ("health",), ("top", "--json", "--interval", "0.1")], ids=" ".join)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_status_1(server: Any, command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = _run(server, command, stdout=full, stderr=subprocess.PIPE)
    line = "attnserve: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_command_without_standard_output_tells_by_its_status(server: Any) -> None:
    done = _run(server, ("health",), ("sh", "-c", 'exec "$@" >&-', "sh"), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command", [("top", "--once", "--interval", "0.1"), ("bench", "--seconds", "0.1")], ids=" ".join
)
def test_a_terminal_that_has_only_ascii_is_enough(
    server: Any, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = _run(server, command, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def _run(
    server: Any, command: tuple[str, ...], by: tuple[str, ...] = (), **how: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command for a server in a process of its own, which something else may start."""
    address = server.http_address if command[0] == "top" else server.address
    arguments = [*by, sys.executable, "-m", "attnserve", *command, address]
    return subprocess.run(arguments, text=True, timeout=60, check=False, **how)


@pytest.mark.parametrize("flags", [[], ["--tls"]])
@pytest.mark.parametrize(
    "address",
    ["unix:/nowhere/at/all", "a port where nobody is", "nobody.has.this.name.invalid:1", "dns:///name.invalid:1"],
)
def test_the_command_says_what_went_wrong(address: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is nobody, it asks nobody to look for flags that somebody may want."""
    with socket.socket() as taken:
        if address == "a port where nobody is":
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["info", address, "--timeout", "5", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"attnserve: {address}: ")
    assert not captured.err.startswith(f"attnserve: {address}: {address}")
    assert "; if it " not in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "tried", "hint"),
    [
        ("localhost:8001", "ipv6:%5B::1%5D:8001", "; 127.0.0.1:8001 may say more"),
        ("localhost:8001", "ipv4:127.0.0.1:8001", ""),
        ("[::1]:8001", "ipv6:%5B::1%5D:8001", ""),
    ],
)
def test_the_command_says_that_localhost_has_another_address(
    address: str, tried: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why one of them failed is all that gRPC says, and which one that is differs."""
    said = f"last error: UNKNOWN: {tried}: Failed to connect to remote host: Connection refused (attempt 4)"

    def fail(self: Client, timeout: float) -> None:
        raise UnavailableError(said)

    monkeypatch.setattr(Client, "server_info", fail)
    assert cli.main(["info", address]) == 1
    assert capsys.readouterr().err == f"attnserve: {address}: {said}{hint}\n"


@pytest.mark.parametrize("command", ["info", "health"])
def test_a_server_that_does_not_answer_is_named_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert cli.main([command, address, "--timeout", "0.2"]) == 1
    assert capsys.readouterr() == ("", f"attnserve: no reply from {address} within 0.2 s\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["info", "--timeout", "0"],
        ["info", "--timeout", "soon"],
        ["info", "--time", "1"],  # an abbreviation, which another flag would make ambiguous
        ["top", "--interval", "1e300"],
        ["caches", "--delete", ""],
    ],
)
def test_the_command_refuses_what_makes_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: attnserve" in capsys.readouterr().err


def test_help_says_what_an_exit_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "Exit status: 0; 1 if" in capsys.readouterr().out
