"""The tls component as in its pods: a real server with its settings, and a certificate with its names."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import PurePosixPath

import certificates
import numpy as np
import pytest
from conftest import Server
from cryptography import x509
from manifests import DEPLOY, Rendered, combine, needs_kubectl

from attnserve import TLS, Client, UnavailableError
from attnserve._commands import cli
from attnserve_server.settings.units import parse_address

pytestmark = needs_kubectl


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    return combine("monitoring", "stateful", "tls")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> certificates.Authority:
    return certificates.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def deployed(
    rendered: Rendered, authority: certificates.Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with the pods' environment, with a directory of the test as the Secret."""
    names = rendered.named("Certificate", "attnserve")["spec"]["dnsNames"]
    issued = authority.issue("issued", names=tuple(map(x509.DNSName, names)))
    secret = tmp_path_factory.mktemp("secret")
    # What cert-manager writes into a Secret, under its names.
    for name, source in (("tls.crt", issued.certificate), ("tls.key", issued.key), ("ca.crt", authority.ca)):
        (secret / name).write_bytes(source.read_bytes())
    (volume,) = (volume["name"] for volume in rendered.pod["volumes"] if "secret" in volume)
    (mount,) = (mount for mount in rendered.container["volumeMounts"] if mount["name"] == volume)
    assert mount["readOnly"] is True
    assert "subPath" not in mount
    with pytest.MonkeyPatch.context() as patched:
        for name, value in rendered.environment.items():
            inside = PurePosixPath(value)
            there = inside.is_relative_to(mount["mountPath"])
            patched.setenv(name, str(secret / inside.relative_to(mount["mountPath"])) if there else value)
        # No caller needs notice of its shutdown.
        server = Server(("--drain-delay", "0"), tmp_path_factory.mktemp("deployed") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


def test_callers_with_a_certificate_are_served_by_every_name(
    deployed: Server, authority: certificates.Authority, rendered: Rendered
) -> None:
    mine = authority.issue("caller", common_name="caller")
    query = np.ones((1, 2, 4), np.float32)
    for service in (manifest["metadata"]["name"] for manifest in rendered.of_kind("Service")):
        host = f"attnserve-0.{service}" if service == "attnserve-owners" else service
        for name in (f"{host}.attnserve", f"{host}.attnserve.svc", f"{host}.attnserve.svc.cluster.local"):
            tls = TLS(ca=authority.ca, certificate=mine.certificate, key=mine.key, server_name=name)
            with Client(deployed.address, tls=tls) as client:
                np.testing.assert_allclose(client.attend(query, query, query).output, query)
    with (
        Client(deployed.address, tls=TLS(ca=authority.ca, server_name="attnserve.attnserve"), retries=0) as client,
        pytest.raises(UnavailableError),
    ):
        client.attend(query, query, query)


def test_probes_and_prometheus_are_answered(
    deployed: Server, authority: certificates.Authority, rendered: Rendered
) -> None:
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    for probe in ("startup", "liveness", "readiness"):
        spec = rendered.container[f"{probe}Probe"]
        assert "grpc" not in spec
        assert spec["httpGet"]["scheme"] == "HTTPS"
        assert fetch(deployed, spec["httpGet"]["path"], unverified) == 200

    (endpoint,) = rendered.named("PodMonitor", "attnserve")["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert (
        endpoint["tlsConfig"]["ca"]["secret"]["name"]
        == rendered.named("Certificate", "attnserve")["spec"]["secretName"]
    )
    verified = ssl.create_default_context(cafile=str(authority.ca))
    assert fetch(deployed, endpoint["path"], verified, endpoint["tlsConfig"]["serverName"]) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        fetch(deployed, endpoint["path"], verified, "attnserve.elsewhere.svc")


def test_operators_look_at_it_as_the_document_says(
    deployed: Server, authority: certificates.Authority, rendered: Rendered, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (DEPLOY.parent / "docs" / "operations.md").read_text()
    (found,) = re.findall(r"`attnserve top --ca (\S+) --server-name (\S+)`", said)
    (mount,) = (mount for mount in rendered.container["volumeMounts"] if mount["name"] == "tls")
    # Which Secret this is, and that cert-manager writes ca.crt into it, is tested above.
    assert found == (f"{mount['mountPath']}/ca.crt", "attnserve.attnserve.svc")
    flags = ("--ca", str(authority.ca), "--server-name", found[1], "--once", "--interval", "0.1", "--timeout", "60")
    assert cli.main(["top", deployed.http_address, *flags]) == 0
    assert "serving" in capsys.readouterr().out
    # Without an address, it queries the port on which the pods listen.
    assert parse_address(rendered.config.http_listen).port == 8002
    assert f"`kubectl -n {rendered.workload['metadata']['namespace']} exec -it POD -- attnserve top`" in said


def fetch(server: Server, path: str, context: ssl.SSLContext, server_name: str | None = None) -> int:
    """The status of a page over HTTPS, from a server verified under a name."""
    address = parse_address(server.http_address)
    with (
        socket.create_connection(address, timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=server_name) as encrypted,
    ):
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.sock = encrypted
        connection.request("GET", path)
        return connection.getresponse().status
