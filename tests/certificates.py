"""Authorities and certificates, made as tests need them, with the extensions that RFC 5280 requires of authorities.

Python 3.13 and later reject by default certificates without them: the key that issued a certificate, an authority's own
key, and what that key is for.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
ISSUES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
"""What an authority's key is for."""


class Files(NamedTuple):
    """The PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates. `ca` is the file of its own."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key, DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(ISSUES, critical=True)
        self.ca = directory / f"{name}.pem"
        self.ca.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self, file: str, *, common_name: str = "", names: tuple[x509.GeneralName, ...] = (), lifetime: timedelta = DAY
    ) -> Files:
        """A certificate that expires `lifetime` from now (before now if negative), in `file`.pem and `file`-key.pem."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(common_name), self._name, key, lifetime)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(authority, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not common_name)
        certificate = builder.sign(self._key, hashes.SHA256())
        files = Files(self._directory / f"{file}.pem", self._directory / f"{file}-key.pem")
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return files

    def issue_for_server(self, file: str = "server", *, name: str = "localhost", lifetime: timedelta = DAY) -> Files:
        """A certificate for a server on 127.0.0.1 that is also called `name`."""
        names = (x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        return self.issue(file, common_name="server", names=names, lifetime=lifetime)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * DAY)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
