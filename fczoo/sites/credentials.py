"""Keys and certificates of a federation.

They prove who its server is and which sites may take part.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"
DAYS = 365  # validity of certificates


def write_server_credentials(folder: Path, host: str) -> None:
    """Write the federation's certificate authority and the server's certificate for ``host``.

    The authority's key is thrown away, so that it signs nothing else.

    Args:
        folder: Folder of the server.
        host: Name or IPv4 address of the server.
    """
    authority, key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    root = _certificate("fczoo federation", authority, "fczoo federation", authority, [])
    certificate = _certificate(
        "fczoo server", key, "fczoo federation", authority, [host, "localhost", "127.0.0.1"]
    )
    (folder / CA).write_bytes(root.public_bytes(Encoding.PEM))
    (folder / CERTIFICATE).write_bytes(certificate.public_bytes(Encoding.PEM))
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_secret(folder / KEY, secret)


def write_node_key(secret: Path, public: Path) -> None:
    """Write a site's key pair, by which the server recognises it.

    Args:
        secret: File of the private key, which only its owner can read.
        public: File of the public key, for the server.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(secret, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    """Create a certificate for some hosts; without hosts, that of an authority."""
    current_time = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(current_time - timedelta(days=1))
        .not_valid_after(current_time + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
