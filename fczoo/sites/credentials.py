"""Folders of a federation's server and sites, with the keys and certificates that identify them."""

import re
import shutil
import ssl
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote as quote_uri

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import convert_json, read_json, write_json
from fczoo.core.options import quote
from fczoo.sites.federation_config import CLASSES, RUN, SCHEDULE, FederationConfig, read_agreement

CA = "ca.crt"
AGREEMENT_FOLDER, IDENTITY_FILE = "agreed", "place.json"
SERVER = "server"  # name of the server's folder; no site can have it
SITE_URI = "fczoo-site:"  # prefix of a site's name in its certificate
DAYS = 365  # validity of certificates
# hosts that a certificate can name; a server listens on IPv4
HOST = r"(?=.{1,253}$)[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?"


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address into host and port.

    Args:
        address: HOST:PORT.

    Returns:
        Host and port.

    Raises:
        ValueError: The address is malformed, or a certificate cannot name the host.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch(HOST, host, re.ASCII):
        requirement = "HOST is a name (non-ASCII ones in their xn-- form) or an IPv4 address"
    elif not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:
        requirement = "PORT is a number from 1 to 65535"
    else:
        return host, int(port)
    raise ValueError(
        f"{quote(address)} is not a HOST:PORT such as server.example.org:9443; {requirement}"
    )


def write_federation(out: Path, agreement_folder: Path, host: str, port: int) -> FederationConfig:
    """Write a folder for the server and one for each site of an agreement.

    Args:
        out: Parent of these folders, which must not exist.
        agreement_folder: Folder of the agreement.
        host: Name or IPv4 address of the server.
        port: Port of the server.

    Returns:
        The agreement.

    Raises:
        FczooError: ``out`` exists already, a site's name cannot name a folder, or the agreement is
            invalid.
    """
    agreement = read_agreement(agreement_folder)
    if out.exists():
        raise FczooError(f"{out} exists already; choose another folder")
    for name in agreement.sites:
        if Path(name).name != name or name in ("", "..", SERVER):
            raise FczooError(
                f"{agreement_folder / RUN}: a site is called {name!r}; its name must be a valid "
                f"folder name, and not {SERVER!r}"
            )
    for name in (SERVER, *agreement.sites):
        (out / name / AGREEMENT_FOLDER).mkdir(parents=True)
        for file in (CLASSES, SCHEDULE, RUN):
            shutil.copy(agreement_folder / file, out / name / AGREEMENT_FOLDER)
        write_json(out / name / IDENTITY_FILE, {"name": name, "address": f"{host}:{port}"})
    _write_credentials(out, host, agreement.sites)
    return agreement


def read_identity(folder: Path) -> tuple[str, tuple[str, int]]:
    """Read the name of a folder's owner, and host and port of the server.

    Args:
        folder: Folder of a site or of the server, from ``write_federation``.

    Raises:
        FczooError: The folder is invalid, or was written by an older version.
    """
    path = folder / IDENTITY_FILE
    try:
        owner = convert_json(read_json(path, "folder of a site"), dict[str, str])
        name, address = owner["name"], host_and_port(owner["address"])
    except (ValueError, KeyError) as error:
        raise FczooError(
            f"{path} is not valid: {first_line(error)}; write it with fczoo site init"
        ) from error
    if (folder / "node.key").exists() or (folder / "keys").exists():
        raise FczooError(
            f"{folder} is from an older version of fczoo, which used Flower; write the folders "
            "of the federation again with fczoo site init, and replace those of all sites"
        )
    return name, address


def site_uri(name: str) -> str:
    """Return the URI that names a site in its certificate.

    Args:
        name: Name of the site.
    """
    return SITE_URI + quote_uri(name, safe="")


def _write_credentials(out: Path, host: str, sites: tuple[str, ...]) -> None:
    """Write a key and a certificate into the folders of the server and of each site.

    One certificate authority signs all of them. Its key is discarded, so it signs nothing else.

    Args:
        out: Parent of these folders, which are named ``server`` and after the sites.
        host: Name or IPv4 address of the server.
        sites: Names of the sites.
    """
    authority = ec.generate_private_key(ec.SECP256R1())
    root = _certificate(authority, authority, None, []).public_bytes(Encoding.PEM)
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1"])
    names: dict[str, list[x509.GeneralName]] = {SERVER: [_host(name) for name in hosts]}
    names |= {site: [x509.UniformResourceIdentifier(site_uri(site))] for site in sites}
    for folder, subjects in names.items():
        is_server = folder == SERVER
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(key, authority, usage, subjects)
        name = SERVER if is_server else "site"
        (out / folder / CA).write_bytes(root)
        (out / folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        secret = out / folder / f"{name}.key"
        secret.touch(mode=0o600)
        secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    usage: x509.ObjectIdentifier | None,
    names: list[x509.GeneralName],
) -> x509.Certificate:
    """Create the certificate of a key; without ``usage``, the authority's own certificate."""
    is_authority, current_time = usage is None, datetime.now(UTC)
    issuer = _name("fczoo federation")
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    uses = dict.fromkeys(
        [
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("crl_sign", "encipher_only", "decipher_only"),
        ],
        False,
    )
    signs = x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **uses)
    builder = (
        x509.CertificateBuilder()
        .subject_name(issuer if is_authority else _name("fczoo"))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(current_time - timedelta(days=1))
        .not_valid_after(current_time + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer, critical=False)
    )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority, SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def tls_context(folder: Path, is_server: bool) -> ssl.SSLContext:
    """Load the credentials of a folder; the peer must have a certificate of the same federation.

    Args:
        folder: Folder of the server or of a site, from ``write_federation``.
        is_server: Whether the folder is the server's.

    Returns:
        A context for TLS 1.3.

    Raises:
        FczooError: A file is missing or invalid, or the certificates have expired.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if is_server:
        context.num_tickets = 0  # no session is resumed, so each connection verifies a certificate
    name = SERVER if is_server else "site"
    try:
        context.load_verify_locations(folder / CA)
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key", password="")
        end = ssl.cert_time_to_seconds(str(context.get_ca_certs()[0]["notAfter"]))
    except (OSError, IndexError, KeyError) as error:  # SSLError is an OSError
        raise FczooError(
            f"the certificates in {folder} are missing or damaged: {first_line(error)}; write the "
            "folders of the federation again with fczoo site init"
        ) from error
    if end < time.time():
        date = time.strftime("%Y-%m-%d", time.gmtime(end))
        raise FczooError(
            f"the certificates in {folder} expired on {date}; write the folders of the federation "
            "again with fczoo site init"
        )
    return context
