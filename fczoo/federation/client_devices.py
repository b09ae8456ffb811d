"""Devices of clients: speed, link and availability, from a table of fczoo or a CSV file."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import content_sha256
from fczoo.core.options import nearest
from fczoo.core.seeds import numpy_stream
from fczoo.federation.batches import Client

NUMBERS = ("gflops", "down_mbps", "up_mbps")
"""Columns of a table of devices that every row has."""
COLUMNS = ("device", "client", "share", *NUMBERS, "availability", "source")


class Device(NamedTuple):
    """Device of a client, with its link to the server."""

    gflops: float  # 10^9 floating-point operations per second
    down_mbps: float  # 10^6 bits per second from the server
    up_mbps: float  # 10^6 bits per second to the server
    availability: float = 1.0  # probability that a round can ask the client

    def seconds(self, flops: float, down: int, up: int) -> float:
        """Return the seconds of an exchange: bytes down, then operations, then bytes up.

        Args:
            flops: Floating-point operations.
            down: Bytes from the server.
            up: Bytes to the server.
        """
        transfer = 8e-6 * (down / self.down_mbps + up / self.up_mbps)
        return transfer + 1e-9 * flops / self.gflops


@dataclass(frozen=True)
class ClientDevices:
    """The devices of all clients, given by number or drawn from a table.

    Attributes:
        table: Name or path of the table.
        devices: Its devices.
        keys: The number of each device's client, or its share of the clients.
        by_client: Whether ``keys`` are numbers of clients.
        seed: Seed of the draw of devices.
    """

    table: str
    devices: tuple[Device, ...]
    keys: tuple[float, ...]
    by_client: bool
    seed: int

    def device_of(self, client: int) -> Device:
        """Return the device of a client.

        Args:
            client: Number of the client.

        Raises:
            FczooError: The table has rows by client number, and none for this client.
        """
        if self.by_client:
            if client not in self.keys:
                problem = f"{self.table} has no row for client {client}"
                raise FczooError(
                    f"{problem}; add one, or replace the column of client numbers by a column "
                    "'share', the share of clients with each device"
                )
            return self.devices[self.keys.index(client)]
        limits = np.cumsum(self.keys) / sum(self.keys)
        draw = numpy_stream("device", self.seed, client).random()
        return self.devices[int(np.searchsorted(limits, draw, side="right"))]

    def check(self, clients: int) -> None:
        """Raise FczooError if one of the clients has no device.

        Args:
            clients: Number of clients.
        """
        for client in range(clients) if self.by_client else ():
            self.device_of(client)

    def available_clients(self, clients: Sequence[Client], *key: int) -> list[Client]:
        """Return the clients that are available in a round; if none is, the one closest to it.

        Args:
            clients: Candidates of the round.
            *key: Seed of the run, task and round, on which the draws depend.
        """
        margins = [
            self.device_of(c.number).availability
            - numpy_stream("available", *key, c.number).random()
            for c in clients
        ]
        best = max(margins, default=0.0)
        return [c for c, margin in zip(clients, margins, strict=True) if margin >= min(best, 0)]

    @property
    def sha256(self) -> str:
        """Return the hash of the devices, which results depend on."""
        return content_sha256({"devices": repr((self.devices, self.keys, self.by_client))})


def read_devices(spec: str, seed: int) -> ClientDevices:
    """Read a table of devices.

    Args:
        spec: Name of a table of fczoo, or a CSV file with the columns ``gflops``, ``down_mbps``
            and ``up_mbps``, with ``share`` or ``client``, and optionally ``availability``.
        seed: Seed of the draw of devices, that of the partition.

    Raises:
        FczooError: The table is unknown, or a row is not valid.
    """
    rows = _rows(spec)
    columns = set(rows[0]) if rows else set()
    by_client = "client" in columns
    key = "client" if by_client else "share"
    if missing := [name for name in (*NUMBERS, key) if name not in columns]:
        raise FczooError(f"{spec} has no column {missing[0]}; columns are {', '.join(COLUMNS)}")
    if unknown := sorted(map(str, columns - set(COLUMNS))):
        advice = nearest(unknown[0], COLUMNS)
        raise FczooError(f"{spec}: no column is called {unknown[0]!r}; {advice}")
    devices, keys = [], []
    for line, row in enumerate(rows, 2):
        try:
            keys.append(float(row[key]))
            rates = [float(row[name]) for name in NUMBERS]
            availability = float(row.get("availability") or 1)
            devices.append(Device(rates[0], rates[1], rates[2], availability))
        except (TypeError, ValueError) as error:
            raise FczooError(f"{spec}, line {line}: {error}; give numbers") from error
        if not all(0 < rate < math.inf for rate in rates) or not 0 < availability <= 1:
            problem = "speeds must be above 0 and finite, availability above 0 and at most 1"
            raise FczooError(f"{spec}, line {line}: {problem}")
        if not 0 <= keys[-1] < math.inf or (by_client and keys[-1] % 1):
            raise FczooError(f"{spec}, line {line}: {row[key]} is not a valid {key}")
    if by_client and len(set(keys)) < len(keys):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise FczooError(f"{spec}: client {repeated:g} has two rows; leave one out")
    if not by_client and not sum(keys):
        raise FczooError(f"{spec}: all shares are 0; give one device a share")
    return ClientDevices(spec, tuple(devices), tuple(keys), by_client, seed)


def _rows(spec: str) -> list[dict[str, str]]:
    """Return the rows of a table of fczoo, or of a file."""
    text = (files("fczoo.assets") / "client_devices.csv").read_text(encoding="utf-8")
    bundled = list(csv.DictReader(StringIO(text)))
    rows = [
        {k: v for k, v in row.items() if k != "table"} for row in bundled if row["table"] == spec
    ]
    if rows:
        return rows
    path = Path(spec).expanduser()
    if not path.is_file():
        advice = nearest(spec, {row["table"] for row in bundled})
        raise FczooError(f"no table or CSV file of client devices is called {spec!r}; {advice}")
    try:
        return list(csv.DictReader(StringIO(path.read_text(encoding="utf-8")), strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise FczooError(f"{path} is not a CSV file: {first_line(error)}") from error
