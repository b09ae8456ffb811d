"""Where a server is reached."""

import re

from fczoo.core.options import quoted

HOST = (
    r"(?=.{1,253}$)[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?"  # what a certificate can name; a server listens on IPv4
)


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of HOST:PORT. Raises ValueError where it is none, or no certificate could name the host."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(HOST, host, re.ASCII):
        whole = "HOST is a name (of other letters its xn-- form) or an IPv4 address"
    elif not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:
        whole = "PORT is a number from 1 to 65535"
    else:
        return host, int(port)
    raise ValueError(f"{quoted(address)} is no HOST:PORT such as server.example.org:9443; {whole}")
