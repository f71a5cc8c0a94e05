"""Creates a certificate authority and a server certificate for loopback. Servers and clients use them."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of test machines may differ, by less than a day.
_MARGIN = timedelta(days=1)


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority's certificate that clients trust, and the server's certificate and key."""

    ca_file: Path
    certificate_file: Path
    key_file: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate_file, self.key_file)
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _MARGIN)
        .not_valid_after(now + _MARGIN)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def make_certificates(directory: Path, base_domain: str) -> Certificates:
    """Writes a new authority and a certificate for 127.0.0.1, localhost, `base_domain` and its direct subdomains."""
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "torchobj tests authority")])
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "torchobj tests server")])
    authority_certificate = (
        _builder(authority, authority, authority_key.public_key(), authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    names = [
        x509.IPAddress(ipaddress.IPv4Address("127.0.0.1")),
        *(x509.DNSName(name) for name in ("localhost", base_domain, f"*.{base_domain}")),
    ]
    server_certificate = (
        _builder(server, authority, server_key.public_key(), authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    made = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server-key.pem")
    made.ca_file.write_bytes(authority_certificate.public_bytes(serialization.Encoding.PEM))
    made.certificate_file.write_bytes(server_certificate.public_bytes(serialization.Encoding.PEM))
    made.key_file.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made
