"""TLS and mutual TLS: the real server, real sockets, certificates made for the tests."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import certificates
import numpy as np
import pytest
from calls import until
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from loopback import loopback

from attnserve import TLS, AsyncClient, Client, NotFoundError, PermissionDeniedError, UnavailableError
from attnserve._servers import replicas
from attnserve._settings import credentials
from attnserve_server.access.tls import ServerTls, TlsError
from attnserve_server.access.tokens import digest, format_hash, new_token
from attnserve_server.settings.units import Address

if TYPE_CHECKING:
    from conftest import Server

PATIENCE_S = 60.0
QUERY = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)


def attend(client: Client) -> None:
    """One attention over a stream, with the query as keys."""
    output = client.attend(QUERY, QUERY, QUERY).output
    scores = QUERY @ QUERY.transpose(0, 2, 1) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(output, weights @ QUERY, atol=1e-5)


def refused(server: Server, tls: TLS | None) -> str:
    """The error that a rejected client gets."""
    with (
        Client(server.address, tls=tls, retries=0, timeout=PATIENCE_S) as client,
        pytest.raises(UnavailableError) as caught,
    ):
        client.server_info()
    return str(caught.value)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> certificates.Authority:
    return certificates.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def mutual(authority: certificates.Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with mutual TLS and an HTTP port over TLS."""
    from conftest import Server

    files = authority.issue_for_server("mutual")
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    flags += ("--tls-client-ca", str(authority.ca), "--http-tls", "true")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRPC_VERBOSITY", raising=False)  # which is set in this process, too
        server = Server(flags, tmp_path_factory.mktemp("mutual") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()
    # The refused clients left only the server's own log lines.
    assert all(line.split(" ")[1] in ("info", "warning") for line in server.stderr().splitlines()), server.stderr()


def test_who_has_a_certificate_uses_the_service(mutual: Server, authority: certificates.Authority) -> None:
    files = authority.issue("caller", common_name="caller")
    with Client(mutual.address, tls=TLS(authority.ca, files.certificate, files.key)) as client:
        attend(client)


async def test_so_does_the_client_for_asyncio(mutual: Server, authority: certificates.Authority) -> None:
    files = authority.issue("asyncio", common_name="asyncio")
    async with AsyncClient(mutual.address, tls=TLS(authority.ca, files.certificate, files.key)) as client:
        result = await client.attend(QUERY, QUERY, QUERY)
    assert result.output.shape == QUERY.shape


def test_who_has_none_does_not(mutual: Server, authority: certificates.Authority) -> None:
    refused(mutual, TLS(authority.ca))


def test_nor_who_has_one_of_another_authority(
    mutual: Server, authority: certificates.Authority, tmp_path: Path
) -> None:
    files = certificates.Authority(tmp_path, "stranger").issue("caller", common_name="caller")
    refused(mutual, TLS(authority.ca, files.certificate, files.key))


def test_nor_who_has_one_that_has_expired(mutual: Server, authority: certificates.Authority) -> None:
    files = authority.issue("expired", common_name="caller", lifetime=-certificates.DAY)
    refused(mutual, TLS(authority.ca, files.certificate, files.key))


def test_nor_who_speaks_in_the_clear(mutual: Server) -> None:
    refused(mutual, None)


def test_a_server_of_another_authority_is_not_spoken_to(
    mutual: Server, authority: certificates.Authority, tmp_path: Path
) -> None:
    stranger = certificates.Authority(tmp_path, "stranger")
    files = authority.issue("careful", common_name="careful")
    assert "CERTIFICATE_VERIFY_FAILED" in refused(mutual, TLS(stranger.ca, files.certificate, files.key))


def test_nor_is_one_of_another_name(mutual: Server, authority: certificates.Authority) -> None:
    files = authority.issue("careful", common_name="careful")
    refused(mutual, TLS(authority.ca, files.certificate, files.key, server_name="elsewhere"))
    with Client(mutual.address, tls=TLS(authority.ca, files.certificate, files.key, "localhost")) as client:
        attend(client)


def test_a_name_that_is_looked_up_is_the_one_that_the_certificate_must_have(
    mutual: Server, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the address, which the certificate has too: a name server may have given any address."""
    port = int(mutual.address.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    files = authority.issue("careful", common_name="careful")
    tls = TLS(authority.ca, files.certificate, files.key)
    with Client(f"dns:///localhost:{port}", tls=tls) as client:
        attend(client)
    with (
        Client(f"dns:///attnserve.test:{port}", tls=tls, retries=0, timeout=PATIENCE_S) as client,
        pytest.raises(UnavailableError),
    ):
        client.server_info()


def test_caches_belong_to_the_name_in_the_certificate(mutual: Server, authority: certificates.Authority) -> None:
    ann = authority.issue("ann", common_name="whoever", names=(x509.DNSName("ann.example"),))
    ann_again = authority.issue("ann-again", names=(x509.DNSName("ann.example"),))
    bob = authority.issue("bob", common_name="bob")
    with (
        Client(mutual.address, tls=TLS(authority.ca, ann.certificate, ann.key)) as first,
        Client(mutual.address, tls=TLS(authority.ca, ann_again.certificate, ann_again.key)) as second,
        Client(mutual.address, tls=TLS(authority.ca, bob.certificate, bob.key)) as other,
        first.create_cache(2, 8) as cache,
    ):
        assert [each.name for each in second.caches.list()] == [cache.name]
        assert not other.caches.list()


def test_a_certificate_without_a_name_is_nobodys(mutual: Server, authority: certificates.Authority) -> None:
    files = authority.issue("nameless")
    with (
        Client(mutual.address, tls=TLS(authority.ca, files.certificate, files.key)) as client,
        pytest.raises(PermissionDeniedError) as caught,
    ):
        client.server_info()
    assert caught.value.reason == "NO_NAME"


def test_a_certificate_alone_is_not_for_administration(mutual: Server, authority: certificates.Authority) -> None:
    files = authority.issue("caller", common_name="caller")
    with (
        Client(mutual.address, tls=TLS(authority.ca, files.certificate, files.key)) as client,
        pytest.raises(PermissionDeniedError) as caught,
    ):
        client.layers.unload("some")
    assert caught.value.reason == "ROLE_MISSING"


def test_what_certificates_may_do_where_a_file_says_it(
    start_server: Callable[..., Server], authority: certificates.Authority, tmp_path: Path
) -> None:
    """Certificates listed there, by any of their names, have roles; others have none. A token takes precedence."""
    token, callers = new_token(), tmp_path / "callers.toml"
    callers.write_text(
        '[[certificates]]\nname = "deployer.example"\nroles = ["layers"]\n'
        f'[[tokens]]\nname = "ann"\nroles = ["use"]\nhash = "{format_hash(digest(token))}"\n'
    )
    files = authority.issue_for_server("knowing")
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    flags += ("--tls-client-ca", str(authority.ca), "--callers", str(callers), "--model-directory", str(tmp_path))
    server = start_server(*flags)
    names = (x509.DNSName("other.example"), x509.DNSName("deployer.example"))
    known, unknown = authority.issue("known", names=names), authority.issue("unknown", common_name="unknown")
    with Client(server.address, tls=TLS(authority.ca, known.certificate, known.key)) as client:
        with pytest.raises(NotFoundError):
            client.layers.unload("some")
        with pytest.raises(PermissionDeniedError) as caught:
            attend(client)
        assert caught.value.reason == "ROLE_MISSING"
    tls = TLS(authority.ca, unknown.certificate, unknown.key)
    with Client(server.address, tls=tls) as client:
        with pytest.raises(PermissionDeniedError) as caught:
            client.server_info()
        assert (caught.value.reason, "'unknown'" in str(caught.value)) == ("UNKNOWN_CERTIFICATE", True)
    with Client(server.address, tls=tls, token=token) as client:
        attend(client)
    with Client(server.address, tls=tls, token=new_token()) as client, pytest.raises(PermissionDeniedError) as caught:
        attend(client)
    assert caught.value.reason == "UNKNOWN_TOKEN"


def test_health_and_metrics_over_tls_ask_for_no_certificate(mutual: Server, authority: certificates.Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 and later do anyway
    for path in ("healthz", "readyz", "metrics"):
        with urllib.request.urlopen(
            f"https://{mutual.http_address}/{path}", context=context, timeout=PATIENCE_S
        ) as answer:
            assert answer.status == 200
            assert answer.read()
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"http://{mutual.http_address}/healthz", timeout=PATIENCE_S)
    assert "Traceback" not in mutual.stderr()


def serial_number(http_address: str, authority: certificates.Authority) -> str:
    """The serial number of the HTTP port's certificate."""
    host, _, port = http_address.rpartition(":")
    pem = ssl.get_server_certificate((host, int(port)), ca_certs=str(authority.ca), timeout=PATIENCE_S)
    return f"{x509.load_pem_x509_certificate(pem.encode()).serial_number}"


def test_rotated_files_are_picked_up_without_a_restart(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """New authorities, for the server and its callers, while a connection made under the old ones lives on."""
    old, new = certificates.Authority(tmp_path, "old"), certificates.Authority(tmp_path, "new")
    files, client_ca = old.issue_for_server(), tmp_path / "client-ca.pem"
    client_ca.write_bytes(old.ca.read_bytes())
    flags = ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key)]
    server = start_server(*flags, "--tls-client-ca", str(client_ca), "--http-tls=true")
    before, after = old.issue("before", common_name="caller"), new.issue("after", common_name="caller")
    as_before = TLS(old.ca, before.certificate, before.key)
    with Client(server.address, tls=as_before) as connected:
        attend(connected)
        shown = serial_number(server.http_address, old)

        key = files.key.read_bytes()
        successor = new.issue_for_server("successor")
        files.certificate.write_bytes(successor.certificate.read_bytes())  # its key is not there yet
        with Client(server.address, tls=as_before) as client:
            attend(client)
        assert serial_number(server.http_address, old) == shown
        until(
            lambda: "the certificate was not reloaded: the previous one stays in use" in server.stderr(),
            "the log says so",
        )
        assert key.decode() not in server.stderr()

        files.key.write_bytes(successor.key.read_bytes())
        client_ca.write_bytes(new.ca.read_bytes())
        with Client(server.address, tls=TLS(new.ca, after.certificate, after.key)) as client:
            attend(client)
        assert serial_number(server.http_address, new) != shown
        refused(server, TLS(new.ca, before.certificate, before.key))
        refused(server, as_before)
        attend(connected)


def test_every_address_of_a_name_has_the_certificate_and_its_successor(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """For those addresses of localhost that this machine has."""
    old, new = certificates.Authority(tmp_path, "old"), certificates.Authority(tmp_path, "new")
    files = old.issue_for_server()
    flags = ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--listen=localhost:0"]
    port = int(start_server(*flags).address.rpartition(":")[2])
    addresses = [str(Address(host, port)) for host in loopback()]
    for authority in (old, new):
        for address in addresses:
            with Client(address, tls=TLS(authority.ca, server_name="localhost")) as client:
                attend(client)
        put(new.issue_for_server("successor"), files)


def put(files: certificates.Files, into: certificates.Files) -> None:
    """Replaces the files of a certificate, one after the other."""
    into.certificate.write_bytes(files.certificate.read_bytes())
    into.key.write_bytes(files.key.read_bytes())


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_client_shows_its_new_certificate_without_being_made_anew(
    mutual: Server,
    authority: certificates.Authority,
    transport: Literal["stream", "unary"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the client created under the old name belongs to another caller under the new one. The old connection is
    closed, whether or not the client calls again.
    """
    monkeypatch.setattr(replicas, "FORGET_AFTER", 0.2)
    monkeypatch.setattr(credentials, "LOOK_INTERVAL_S", 0.0)
    files, successor = authority.issue("files", common_name="old"), authority.issue("successor", common_name="new")
    tls = TLS(authority.ca, files.certificate, files.key)
    with Client(mutual.address, tls=tls, transport=transport, retries=0) as client:
        attend(client)
        client.create_cache(2, 8)
        key = files.key.read_bytes()
        files.key.write_bytes(successor.key.read_bytes())  # its certificate is not there yet
        attend(client)
        assert client.caches.list()
        files.key.write_bytes(key)
        put(successor, into=files)

        def is_another() -> bool:
            attend(client)
            return not client.caches.list()

        until(is_another, "its new name is shown")
        until(lambda: len(client._calls.servers._replicas.all()) == 1, "the old connection is closed")
        attend(client)


async def test_so_does_the_client_for_asyncio_show_its_new_one(
    mutual: Server, authority: certificates.Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "FORGET_AFTER", 0.2)
    files = authority.issue("files", common_name="old")
    async with AsyncClient(mutual.address, tls=TLS(authority.ca, files.certificate, files.key), retries=0) as client:
        await client.create_cache(2, 8)
        put(authority.issue("successor", common_name="new"), into=files)
        deadline = time.monotonic() + PATIENCE_S
        while await client.caches.list():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        while len(client._calls.servers._replicas.all()) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await client.attend(*np.ones((3, 2, 4, 8), np.float32))


def test_files_that_are_not_in_order_keep_the_server_from_starting(
    tmp_path: Path, authority: certificates.Authority
) -> None:
    files, others = authority.issue_for_server("right"), authority.issue_for_server("others")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("-----BEGIN nothing")
    none = tmp_path / "none"
    pair = "not a certificate and its key, both PEM and not encrypted"
    for certificate, key, client_ca, words in (
        (
            files.certificate,
            others.key,
            None,
            f"tls_certificate and tls_key ({files.certificate}, {others.key}): {pair}",
        ),
        (nonsense, files.key, None, f"tls_certificate and tls_key ({nonsense}, {files.key}): {pair}"),
        (files.certificate, none, None, f"tls_key ({none}): No such file or directory"),
        (none, files.key, None, f"tls_certificate ({none}): No such file or directory"),
        (tmp_path, files.key, None, f"tls_certificate ({tmp_path}): Is a directory"),
        (files.certificate, files.key, nonsense, f"tls_client_ca ({nonsense}): not certificates in PEM"),
        (files.certificate, files.key, none, f"tls_client_ca ({none}): No such file or directory"),
    ):
        with pytest.raises(TlsError) as caught:
            ServerTls(certificate, key, client_ca)
        assert str(caught.value).startswith(words)
        assert "None" not in str(caught.value)


def test_nobody_is_asked_for_the_password_of_a_key(tmp_path: Path) -> None:
    """A server that waits for an answer would neither start nor say why. Here the right one would be read."""
    files = certificates.Authority(tmp_path).issue_for_server()
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    encrypted = serialization.BestAvailableEncryption(b"password")
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    files.key.write_bytes(key.private_bytes(*pem, encrypted))
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--listen", "127.0.0.1:0")
    ended = subprocess.run(
        [sys.executable, "-m", "attnserve_server", "--http-listen", "127.0.0.1:0", "--device", "cpu", *flags],
        input="password\n",
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        start_new_session=True,  # without a terminal the question would be put to standard input
    )
    assert ended.returncode == TlsError.exit_status, ended.stderr
    assert "not a certificate and its key, both PEM and not encrypted" in ended.stderr
