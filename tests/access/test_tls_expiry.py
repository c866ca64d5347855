"""When the server's certificate expires: the metric that says so, and the warning when it has."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import certificates
import pytest
from calls import metric, until
from conftest import Server
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from attnserve_server.access.tls import ServerTls

METRIC = "attnserve_tls_certificate_expiry_timestamp_seconds"


def expiry(certificate: Path) -> float:
    return x509.load_pem_x509_certificates(certificate.read_bytes())[0].not_valid_after_utc.timestamp()


@pytest.mark.parametrize("days", [-1, 1, 90])
def test_it_is_known_whether_or_not_it_is_over(tmp_path: Path, days: int, caplog: pytest.LogCaptureFixture) -> None:
    files = certificates.Authority(tmp_path).issue_for_server(lifetime=timedelta(days=days))
    with caplog.at_level(logging.WARNING):
        assert ServerTls(*files, None).expiry() == expiry(files.certificate)
    assert ("the certificate has expired" in caplog.text) == (days < 0)


def test_of_a_chain_it_is_the_servers_own(tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path)
    files = authority.issue_for_server(lifetime=timedelta(days=30))
    own = files.certificate.read_bytes()
    files.certificate.write_bytes(own + authority.ca.read_bytes())
    assert expiry(files.certificate) != expiry(authority.ca)
    assert ServerTls(*files, None).expiry() == expiry(files.certificate)


def test_of_one_that_is_not_for_servers_it_is_not_known(tmp_path: Path) -> None:
    """Here, an authority's own. That keeps no server from starting."""
    authority = certificates.Authority(tmp_path)
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (key := tmp_path / "key.pem").write_bytes(authority._key.private_bytes(*pem))
    assert math.isnan(ServerTls(authority.ca, key, None).expiry())


def test_it_is_that_of_the_files_in_use(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Renewed while the server runs, though nobody connects to the gRPC port."""
    authority = certificates.Authority(tmp_path)
    files = authority.issue_for_server()
    server = start_server("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    assert metric(server.http_address, METRIC) == expiry(files.certificate)
    renewed = authority.issue_for_server("renewed", lifetime=timedelta(days=90))
    for old, new in zip(files, renewed, strict=True):
        old.write_bytes(new.read_bytes())
    until(lambda: metric(server.http_address, METRIC) == expiry(renewed.certificate), "it is the new one's")
