"""Addresses of servers, which sites read without the packages of credentials."""

import re

from fczoo.core.options import quote

# what a certificate can name; a server listens on IPv4
HOST = r"(?=.{1,253}$)[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?"


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address into host and port.

    Args:
        address: HOST:PORT.

    Returns:
        Host and port.

    Raises:
        ValueError: The address is malformed, or no certificate could name the host.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch(HOST, host, re.ASCII):
        requirement = "HOST is a name (of other letters its xn-- form) or an IPv4 address"
    elif not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:
        requirement = "PORT is a number from 1 to 65535"
    else:
        return host, int(port)
    raise ValueError(
        f"{quote(address)} is not a HOST:PORT such as server.example.org:9443; {requirement}"
    )
