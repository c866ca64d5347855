"""Where `attnserve top` gets a server's metrics: addresses, TLS, tokens, and what else may answer there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certificates
import numpy as np
import pytest

from attnserve import TLS, Client, Token
from attnserve._commands import cli
from attnserve._commands.connection_flags import ASK_FOR_CA, ASK_FOR_NAME
from attnserve._commands.endpoint import Endpoint
from attnserve._commands.reading import Reading
from attnserve_server.access.tokens import digest, format_hash, new_token


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "the page has no end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n", "bytes too soon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 31\r\n\r\n<html>not metrics</html> at all", "attnserve: no metrics at "),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 999\r\n\r\n" + 999 * b"x", f": 500 {200 * 'x'}\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + 9999 * b"x", "the page has no end, after "),
        (b"HTTP/1.1 500 \x1b[31m\r\nContent-Length: 12\r\n\r\n\x1b]0;title\x07\r\n", "500 ]0;title\n"),
    ],
    ids=["endless", "cut off", "another page", "long refusal", "too long", "escape sequences"],
)
def test_a_port_that_has_something_else(
    head: bytes, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply may never end: it goes on for as long as somebody reads."""
    monkeypatch.setattr("attnserve._commands.endpoint._LARGEST", 9000)

    def speak(listening: socket.socket) -> None:
        peer, _ = listening.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(65536)
            peer.sendall(head)
            while said == "the page has no end":
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
    """It may say in its own words that this is no request, or wait for the end of one."""
    hint = "; if it speaks no TLS: http://, and none of the flags and variables for TLS\n"
    assert cli.main(["top", f"https://{server.http_address}", "--once"]) == 1
    told = capsys.readouterr().err
    assert "timed out" not in told
    assert told.endswith(hint)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "127.0.0.1:{1}".format(*silent.getsockname())
        assert cli.main(["top", address, "--tls", "--once", "--timeout", "0.3"]) == 1
    assert capsys.readouterr().err.endswith(f"timed out{hint}")


def test_files_that_are_no_certificates_are_told(tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path)
    one, another = (authority.issue_for_server(name) for name in ("one", "another"))
    with pytest.raises(ValueError, match=r"^tls: cannot use .*absent: No such file or directory$"):
        Endpoint("host", tls=TLS(tmp_path / "absent"))
    with pytest.raises(ValueError, match=f"^tls: cannot use {one.certificate}, {another.key}: .*KEY_VALUES_MISMATCH"):
        Endpoint("host", tls=TLS(certificate=one.certificate, key=another.key))


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
