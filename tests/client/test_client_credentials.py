"""Which credentials a client presents, and to whom; the commands' flags and environment variables for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certificates
import numpy as np
import pytest

from attnserve import TLS, AsyncClient, Client, PermissionDeniedError, Token
from attnserve._commands.cli import main
from attnserve._commands.connection_flags import FLAGS
from attnserve._settings.credentials import Bearer, Identity, is_local
from attnserve_server.access.tokens import digest, format_hash

if TYPE_CHECKING:
    from conftest import Server

SECRET = "attnserve_of-the-tests"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "127.9.9.9", "localhost:1", "LOCALHOST", "[::1]:1", "::1", "unix:/s", "dns:///localhost:1"],
)
def test_addresses_of_this_machine(address: str) -> None:
    assert is_local(address)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:1",
        "example.org:1",
        "dns:///attnserve:1",
        "dns://127.0.0.1/attnserve:1",
        "[2001:db8::1]:1",
        "ipv4:10.0.0.1:1",
    ],
)
def test_addresses_of_others(address: str) -> None:
    assert not is_local(address)


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_a_token_is_not_sent_in_the_clear_to_other_machines(client_class: Any) -> None:
    for token in (SECRET, Token(SECRET)):
        with pytest.raises(ValueError, match=r"^token: example\.org:1 would get it unencrypted") as caught:
            client_class("example.org:1", token=token)
        assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match=r"^token: dns:///example\.org:1 would get it unencrypted"):
        client_class("dns:///example.org:1", token=SECRET)
    client_class("example.org:1", token=SECRET, tls=TLS())
    client_class("example.org:1", token=Token(SECRET, plaintext=True))


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_token_is_not_sent_in_the_clear_to_a_server_that_was_looked_up(transport: Any) -> None:
    def look_up() -> list[str]:
        return ["attnserve.invalid:1"]

    array = np.ones((1, 1), np.float32)
    refused = pytest.raises(PermissionDeniedError, match=r"^token: attnserve\.invalid:1 would get it unencrypted")
    with Client(look_up, token=SECRET, transport=transport) as client, refused:
        client.attend(array, array, array)
    with refused:
        async with AsyncClient(look_up, token=SECRET, transport=transport):
            pass


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"tls": True}, "tls: expected attnserve.TLS"),
        ({"tls": TLS(ca="/nowhere/ca.pem")}, "tls: cannot read /nowhere/ca.pem"),
        ({"token": ""}, "token: expected visible"),
        ({"token": b"text"}, "token: expected visible"),
        ({"token": "two words"}, "token: expected visible"),
        ({"token": "ümlaut"}, "token: expected visible"),
        ({"token": "two\nlines"}, "token: expected visible ASCII characters, found others"),
        ({"token": f"{SECRET}\n"}, "token: .*, found a line break at its end; Token\\(file=...\\) reads files$"),
        ({"token": f"{SECRET}\r\n"}, "token: .*, found a line break at its end; Token\\(file=...\\) reads files$"),
        ({"token": Token(file="/nowhere/token")}, "token: cannot read /nowhere/token"),
    ],
)
def test_credentials_that_make_no_sense_are_refused(client_class: Any, argument: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        client_class(**argument)


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
@pytest.mark.parametrize("contents", [b"", b"no certificate", None])
def test_authorities_that_are_none_are_refused(client_class: Any, contents: bytes | None, tmp_path: Path) -> None:
    """GRPC would trust all that it knows, if the file is empty."""
    files = certificates.Authority(tmp_path).issue("client")
    ca = tmp_path / "mine.pem"
    ca.write_bytes(files.key.read_bytes() if contents is None else contents)
    with pytest.raises(ValueError, match=f"^tls: cannot use {ca} as ca: .*no certificate"):
        client_class(tls=TLS(ca=ca))


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_a_key_that_is_not_that_of_the_certificate_is_refused(client_class: Any, tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path)
    one, another = authority.issue("one"), authority.issue("another")
    words = f"^tls: cannot use {one.certificate}, {another.key} as certificate and key: .*KEY_VALUES_MISMATCH"
    with pytest.raises(ValueError, match=words):
        client_class(tls=TLS(ca=authority.ca, certificate=one.certificate, key=another.key))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TLS(certificate="c"), "tls: expected both a certificate and its key, or neither, found a certificate"),
        (lambda: TLS(key="k"), "tls: expected both a certificate and its key, or neither, found a key"),
        (lambda: Token(), "token: expected either the token or a file, found neither"),
        (lambda: Token(SECRET, file="f"), "token: expected either the token or a file, found both"),
        (lambda: Token(SECRET, plaintext="no"), "token: expected True or False as plaintext, found 'no'"),  # type: ignore[arg-type]
    ],
)
def test_values_that_are_not_complete_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}") as caught:
        make()
    assert SECRET not in str(caught.value)


def test_a_token_is_not_shown() -> None:
    assert SECRET not in repr(Token(SECRET))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TLS(ca=SECRET.encode()), "tls: expected the path of a file as ca, found bytes"),  # type: ignore[arg-type]
        (lambda: TLS(ca=5), "tls: expected the path of a file as ca, found int"),  # type: ignore[arg-type]
        (lambda: TLS(certificate="c", key=""), "tls: expected the path of a file as key, found an empty one"),
        (lambda: TLS(server_name=5), "tls: expected a name as server_name, found 5"),  # type: ignore[arg-type]
        (lambda: TLS(server_name=""), "tls: expected a name as server_name, found ''"),
        (lambda: TLS(server_name="a..name"), r"tls: expected a name as server_name, found 'a\.\.name'"),
        (lambda: TLS(server_name="name\0"), r"tls: expected a name as server_name, found 'name\\x00'"),
        (lambda: Token(file=5), "token: expected the path of a file as file, found int"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_path_is_refused_without_quoting_it(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        make()


def test_a_token_in_a_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    bearer = Bearer(Token(file=file))
    assert bearer.metadata == (("authorization", "Bearer first"),)
    file.write_text("")
    assert bearer.metadata == (("authorization", "Bearer first"),)
    file.write_text("the-second\n")
    assert bearer.metadata == (("authorization", "Bearer the-second"),)
    file.unlink()
    assert bearer.metadata == (("authorization", "Bearer the-second"),)
    assert Bearer(None).metadata == ()


def test_a_file_of_which_no_token_can_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for contents in ("ümlaut", "two words", ""):
        file.write_text(contents, "utf-8")
        with pytest.raises(ValueError, match=r"^token: expected visible ASCII characters, found "):
            Bearer(Token(file=file))


def test_certificates_are_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    authority = certificates.Authority(tmp_path)
    files, successor = authority.issue("files"), authority.issue("successor")
    identity = Identity(TLS(authority.ca, files.certificate, files.key))
    old = identity.credentials

    def changed(at: float) -> bool:
        now[0] = at
        return identity.changed()

    key, certificate = files.key.read_bytes(), files.certificate.read_bytes()
    files.key.write_bytes(successor.key.read_bytes())
    files.certificate.write_bytes(successor.certificate.read_bytes())
    assert not changed(100.9)
    assert identity.credentials is old
    assert changed(101.0)
    new = identity.credentials
    assert new is not old
    assert not changed(102.0), "it is told once"
    files.key.write_bytes(key)
    assert not changed(103.0), "its certificate is not there yet"
    files.key.unlink()
    assert not changed(104.0)
    assert identity.credentials is new
    files.key.write_bytes(key)
    files.certificate.write_bytes(certificate)
    assert not changed(104.9)
    assert changed(105.0)
    assert identity.credentials is not new


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> certificates.Authority:
    return certificates.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def guarded(authority: certificates.Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with TLS on both ports that knows one token, which may do everything."""
    from conftest import Server

    directory = tmp_path_factory.mktemp("guarded")
    (directory / "callers.toml").write_text(
        f'[[tokens]]\nname = "ann"\nroles = ["use", "metrics"]\nhash = "{format_hash(digest(SECRET))}"\n'
    )
    (directory / "token").write_text(SECRET)
    files = authority.issue_for_server("guarded")
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--http-tls=true")
    server = Server((*flags, "--callers", str(directory / "callers.toml")), directory / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


@pytest.fixture
def variables(authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_CA", str(authority.ca))
    monkeypatch.setenv("ATTNSERVE_TOKEN", SECRET)


def test_commands_take_credentials_from_flags(
    guarded: Server, authority: certificates.Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    assert main(["info", guarded.address, "--ca", str(authority.ca), "--token-file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"]
    assert main(["info", guarded.address, "--ca", str(authority.ca)]) == 1
    said = capsys.readouterr().err
    assert "there is no token" in said
    assert said.endswith("; --token-file shows a token\n")
    assert main(["info", guarded.address, "--ca", str(authority.ca), "--token-file", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["caches", guarded.address, "--ca", str(authority.ca), "--certificate", "c"]) == 2
    assert "tls: expected both" in capsys.readouterr().err
    (tmp_path / "unknown").write_text("of-nobody")
    assert main(["info", guarded.address, "--ca", str(authority.ca), "--token-file", str(tmp_path / "unknown")]) == 1
    assert capsys.readouterr().err.endswith("the token is not known\n")


def test_commands_say_that_a_certificate_may_be_wanted(
    authority: certificates.Authority, start_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutual TLS gives no reason when it rejects a connection without one: it just closes it."""
    files = authority.issue_for_server("mutual")
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    server = start_server(*flags, "--tls-client-ca", str(authority.ca))
    shown = ("--certificate", str(files.certificate), "--key", str(files.key))
    assert main(["health", server.address, "--ca", str(authority.ca)]) == 1
    assert capsys.readouterr().err.endswith("; if it wants a certificate: --certificate and --key\n")
    assert main(["health", server.address, "--ca", str(authority.ca), *shown]) == 0


def test_commands_say_that_a_server_speaks_no_tls(
    server: Server, authority: certificates.Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("info", "layers", "caches", "health"):
        for flags, named in (
            (["--tls"], "--tls"),
            (["--ca", str(authority.ca)], "--ca"),
            (["--server-name", "x"], "--server-name"),
            (["--tls", "--ca", str(authority.ca), "--server-name", "x"], "--tls, --ca and --server-name"),
        ):
            assert main([command, server.address, *flags]) == 1
            assert capsys.readouterr().err.endswith(f"; it speaks no TLS: leave out {named}\n")
    for address, flags in ((server.http_address, ["--tls"]), (f"https://{server.http_address}", [])):
        assert main(["top", address, "--once", "--timeout", "1", *flags]) == 1
        assert capsys.readouterr().err.endswith(
            "; if it speaks no TLS: http://, and none of the flags and variables for TLS\n"
        )


@pytest.mark.parametrize("flag", FLAGS)
def test_commands_take_no_flag_without_a_value(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as `--ca "$CA"` where the variable is not set: they would connect without TLS."""
    with pytest.raises(SystemExit) as ended:
        main(["info", "127.0.0.1:1", flag, ""])
    assert ended.value.code == 2
    assert f"argument {flag}: expected a value, found an empty one\n" in capsys.readouterr().err


def test_commands_name_the_variables_that_ask_for_tls(
    server: Server,
    authority: certificates.Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ATTNSERVE_CA", str(authority.ca))
    assert main(["health", server.address]) == 1
    assert capsys.readouterr().err.endswith("; it speaks no TLS: leave out ATTNSERVE_CA\n")
    assert main(["health", server.address, "--ca", str(authority.ca)]) == 1
    assert capsys.readouterr().err.endswith("; it speaks no TLS: leave out --ca and ATTNSERVE_CA\n")


def test_commands_say_that_a_certificate_has_another_name(
    guarded: Server, authority: certificates.Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["health", guarded.address], ["top", guarded.http_address, "--once"]):
        assert main([*command, "--ca", str(authority.ca), "--server-name", "elsewhere"]) == 1
        said = capsys.readouterr().err
        assert said.endswith("; its certificate has another name: --server-name says which one to accept\n")


def test_commands_say_that_a_port_is_that_of_http(
    server: Server, guarded: Server, authority: certificates.Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("info", "health"):
        assert main([command, server.http_address]) == 1
        assert capsys.readouterr().err.endswith(
            "; no gRPC is spoken there: if it is the HTTP port, gRPC is on another, by default 8001\n"
        )
        assert main([command, guarded.http_address, "--ca", str(authority.ca)]) == 1
        said = capsys.readouterr().err
        assert "; that is an HTTP port (gRPC is on another, by default 8001), or a proxy" in said
    assert main(["top", guarded.address, "--once", "--ca", str(authority.ca)]) == 1
    assert capsys.readouterr().err.endswith("; metrics are on the HTTP port, by default 8002\n")


def test_commands_say_that_an_authority_is_not_known(
    guarded: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = certificates.Authority(tmp_path, "other")
    for flags in (["--tls"], ["--ca", str(other.ca)]):
        for command in (["health", guarded.address], ["top", guarded.http_address, "--once"]):
            assert main([*command, *flags]) == 1
            hint = "; its certificate is of an authority that is not known here, or has expired: --ca FILE\n"
            assert capsys.readouterr().err.endswith(hint)


@pytest.mark.usefixtures("variables")
def test_commands_take_credentials_from_variables(guarded: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caches", guarded.address]) == 0
    assert "no caches are open" in capsys.readouterr().out
    assert main(["top", f"https://{guarded.http_address}", "--json", "--interval", "0.01"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_health_from_the_command_line(
    guarded: Server, authority: certificates.Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs the CA certificates, but no token."""
    assert main(["health", guarded.address, "--ca", str(authority.ca)]) == 0
    assert main(["health", guarded.address, "--ca", str(authority.ca), "--live"]) == 0
    assert capsys.readouterr().out == "ready\nalive\n"
    assert main(["health", guarded.address]) == 1
    said = capsys.readouterr().err
    assert guarded.address in said
    assert said.endswith("; if it speaks TLS: --tls or --ca\n")


async def test_health_from_the_client_for_asyncio(guarded: Server, authority: certificates.Authority) -> None:
    async with AsyncClient(guarded.address, tls=TLS(authority.ca)) as client:
        assert (await client.is_ready(), await client.is_alive()) == (True, True)
