"""Server and nodes of a Flower federation: their files and their processes."""

import shutil
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import convert_json, encode_json, read_json, write_json
from fczoo.federation.result import Result, read_result
from fczoo.sites.address import host_and_port
from fczoo.sites.federation_config import CLASSES, RUN, SCHEDULE, FederationConfig, read_agreement
from fczoo.sites.folders import HOME, LOG, flwr, open_site, private_files, running

AGREEMENT_FOLDER, NODE_FILE, KEYS, APP = "agreed", "place.json", "keys", "app"
SERVER = "server"  # name of the server's folder; no site can have it
LINK = "fczoo"  # name of the federation in Flower's commands
START_TIMEOUT, STATUS_INTERVAL = (
    120.0,
    2.0,
)  # seconds until a server must be up, and between two status requests
TRIES, PAUSE = 1000, 5.0  # attempts of a node to reach its server, and seconds between them
PROJECT = """[project]
name = "fczoo-sites"
version = "1.0.0"
description = "A run of fczoo between sites"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fczoo"

[tool.flwr.app.components]
serverapp = "fczoo_app.apps:server"
clientapp = "fczoo_app.apps:client"

[tool.flwr.app.config]
agreement = ""
images = ""
folder = ""
patience = ""
"""


# two assignments, which Flower's static check can read
APPS = """from fczoo.sites import on_flower

client = on_flower.client
server = on_flower.server
"""


class NodeInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Content of ``place.json``: owner of a folder, and the server's address."""

    name: str
    address: str  # HOST:PORT of the server


def write_federation(out: Path, agreed: Path, host: str, port: int) -> FederationConfig:
    """Write a folder for the server and one for each site of an agreement.

    Args:
        out: Folder of all of them, which must not exist.
        agreed: Folder of the agreement.
        host: Name or IPv4 address of the server.
        port: Port of the server.

    Returns:
        The agreement.

    Raises:
        FczooError: Flower is not installed, ``out`` exists already, a site's name cannot name a
            folder, or the agreement is invalid.
    """
    need_flower()
    from fczoo.sites.credentials import CA, write_node_key, write_server_credentials

    agreement = read_agreement(agreed)
    if out.exists():
        raise FczooError(f"{out} exists already; choose another folder")
    if any(Path(name).name != name or name in ("", "..", SERVER) for name in agreement.sites):
        raise FczooError(
            f"{agreed / RUN}: a site's name must be that of a folder, and not {SERVER!r}"
        )
    for name in (SERVER, *agreement.sites):
        (out / name / AGREEMENT_FOLDER).mkdir(parents=True)
        for file in (CLASSES, SCHEDULE, RUN):
            shutil.copy(agreed / file, out / name / AGREEMENT_FOLDER)
        write_json(out / name / NODE_FILE, {"name": name, "address": f"{host}:{port}"})
    write_server_credentials(out / SERVER, host)
    (out / SERVER / KEYS).mkdir()
    for name in agreement.sites:
        shutil.copy(out / SERVER / CA, out / name)
        write_node_key(out / name / "node.key", out / SERVER / KEYS / f"{name}.pub")
    app = out / SERVER / APP  # a separate folder, since Flower sends all of it to the nodes
    (app / "fczoo_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (app / "fczoo_app" / "__init__.py").touch()
    (app / "fczoo_app" / "apps.py").write_text(APPS, encoding="utf-8")
    return agreement


class RunOutcome(NamedTuple):
    """Outcome of a run that is over."""

    result: Result
    wire: int  # bytes between server and nodes, as Flower counts them
    seconds: float


def start(folder: Path, images: Path, patience: float) -> RunOutcome | None:
    """Run the node of a folder: a site until it is stopped, the server until the run ends.

    Args:
        folder: Folder of a site or of the server, from ``write_federation``.
        images: Folder of class folders.
        patience: Seconds that the server waits for a site; a site does not use it.

    Returns:
        Outcome of the run at the server.

    Raises:
        FczooError: Flower is not installed, a folder is missing or invalid, the server cannot be
            reached, or the run failed.
    """
    need_flower()
    site_info = _read_node_info(folder)
    if not images.is_dir():
        raise FczooError(
            f"no folder {images}; give the one that holds the class folders with --images"
        )
    with private_files():  # state and logs may describe images
        if site_info.name != SERVER:
            _node(folder.resolve(), images.resolve(), site_info)
            return None
        return _serve(folder.resolve(), images.resolve(), site_info, patience)


def status(folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a server that is up, the newest first.

    Args:
        folder: Folder of the server.

    Returns:
        ``run-id``, ``status`` and other values of each run.

    Raises:
        FczooError: No such server is up.
    """
    need_flower()
    if _read_node_info(folder).name != SERVER or not (folder / HOME / "config.toml").exists():
        raise FczooError(
            f"{folder} is not the folder of a server that was started; see fczoo site start"
        )
    runs: list[dict[str, Any]] = flwr(folder.resolve(), "ls", LINK)["runs"]
    return runs


def need_flower() -> None:
    """Raise FczooError where Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FczooError("Flower is not installed; run pip install 'fczoo[flower]'") from None


def _read_node_info(folder: Path) -> NodeInfo:
    try:
        site_info = convert_json(read_json(folder / NODE_FILE, "folder of a site"), NodeInfo)
        host_and_port(site_info.address)
        return site_info
    except ValueError as error:
        raise FczooError(
            f"{folder / NODE_FILE} is not valid: {error}; write it with fczoo site init"
        ) from error


def _node(folder: Path, images: Path, place: NodeInfo) -> None:
    # opened here first, so that errors are reported and not only in Flower's log
    open_site(read_agreement(folder / AGREEMENT_FOLDER), place.name, images, folder / "kept")
    node_config = {
        "site": place.name,
        "agreement": str(folder / AGREEMENT_FOLDER),
        "images": str(images),
        "folder": str(folder / "kept"),
    }
    command = [
        "flower-supernode",
        "--superlink",
        place.address,
        "--node-config",
        _words(node_config),
    ]
    command += ["--root-certificates", str(folder / "ca.crt")]
    command += ["--auth-supernode-private-key", str(folder / "node.key")]
    waiting: str | None = None
    for _ in range(TRIES):  # a node ends if the server is not up or does not know its key yet
        missing = _check_server(place.address, folder / "ca.crt")
        if missing and missing != waiting:
            print(f"waiting for {place.address} ({missing})", file=sys.stderr, flush=True)
            waiting = missing
        with socket.socket() as free:  # of the node's own processes
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with running([*command, "--host", "127.0.0.1", "--port", str(port)], folder) as node:
            node.wait()
        time.sleep(PAUSE)
    raise FczooError(
        f"site {place.name} cannot reach the server at {place.address}; see {folder / LOG}"
    )


def _check_server(address: str, authority: Path) -> str | None:
    """Return why no server responds, or None.

    Raises FczooError if another folder's server is up.
    """
    host, port = host_and_port(address)
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with (
            socket.create_connection((host, port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        problem = f"the server at {address} is not the one for which this folder was written"
        raise FczooError(f"{problem}: {error.verify_message}") from error
    except socket.gaierror:
        return "name not known"
    except OSError as error:  # it is not up yet
        return error.strerror or "no answer"


def _serve(folder: Path, images: Path, place: NodeInfo, patience: float) -> RunOutcome:
    agreement, outcome = read_agreement(folder / AGREEMENT_FOLDER), folder / "result.json"
    _check_free(host_and_port(place.address)[1])
    for old in (outcome, folder / "failed.json"):
        old.unlink(missing_ok=True)
    with _superlink(folder, place):
        nodes = {name: _register_node(folder, name) for name in agreement.sites}
        write_json(folder / "nodes.json", nodes)
        run_config = {
            "agreement": str(folder / AGREEMENT_FOLDER),
            "images": str(images),
            "folder": str(folder),
        }
        words = _words({**run_config, "patience": str(patience)})
        run = flwr(folder, "run", str(folder / APP), LINK, "--run-config", words)["run-id"]
        while not (about := _about(folder, run))["status"].startswith("finished"):
            time.sleep(STATUS_INTERVAL)
    if about["status"] != "finished:completed" or not outcome.exists():
        failure_file = folder / "failed.json"
        reason = (
            read_json(failure_file, "reason")["reason"]
            if failure_file.exists()
            else f"see {folder / LOG}"
        )
        raise FczooError(f"the run has {about['status'].replace(':', ' as ')}: {reason}")
    return RunOutcome(
        read_result(outcome), about["network-traffic"]["total-bytes"], about["elapsed"]
    )


def _check_free(port: int) -> None:
    """Raise FczooError where a server cannot listen."""
    with socket.socket() as trial:
        # as Flower does after a server has ended
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("0.0.0.0", port))
        except OSError as error:
            problem = f"the server cannot have port {port}: {error.strerror}"
            raise FczooError(
                f"{problem}; stop the program that uses it, which may be this server"
            ) from error


@contextmanager
def _superlink(folder: Path, place: NodeInfo) -> Iterator[None]:
    """Run a server inside the context.

    Raises FczooError if it does not start.
    """
    _, port = host_and_port(place.address)
    command = [
        "flower-superlink",
        "--host",
        "0.0.0.0",
        "--port",
        str(port),
        "--enable-supernode-auth",
    ]
    command += [
        "--ssl-ca-certfile",
        str(folder / "ca.crt"),
        "--ssl-certfile",
        str(folder / "server.crt"),
    ]
    command += [
        "--ssl-keyfile",
        str(folder / "server.key"),
        "--disable-runtime-dependency-installation",
    ]
    home = folder / HOME
    home.mkdir(exist_ok=True)
    link = {"address": f"127.0.0.1:{port}", "root-certificates": str(folder / "ca.crt")}
    lines = [
        f"[superlink.{LINK}]",
        *(f"{name} = {encode_json(value)}" for name, value in link.items()),
    ]
    (home / "config.toml").write_text("\n".join(["[superlink]", f'default = "{LINK}"', *lines, ""]))
    with running(command, folder) as process:
        start_time = time.monotonic()
        while not _answers(folder):
            if process.poll() is not None or time.monotonic() - start_time > START_TIMEOUT:
                raise FczooError(f"the server does not start at port {port}; see {folder / LOG}")
            time.sleep(STATUS_INTERVAL)
        yield


def _answers(folder: Path) -> bool:
    try:
        flwr(folder, "ls", LINK)
        return True
    except FczooError:
        return False


def _register_node(folder: Path, name: str) -> int:
    key = folder / KEYS / f"{name}.pub"
    return int(flwr(folder, "supernode", "register", str(key), LINK, "--name", name)["node-id"])


def _about(folder: Path, run: str) -> dict[str, Any]:
    about: dict[str, Any] = flwr(folder, "ls", LINK, "--run-id", run)["runs"][0]
    return about


def _words(told: dict[str, str]) -> str:
    """Format settings for Flower's commands.

    Raises FczooError for values that they cannot hold.
    """
    if invalid_values := [
        value for value in told.values() if '"' in value or "'" in value or "\n" in value
    ]:
        raise FczooError(
            f"Flower takes no quotes in a path: {invalid_values[0]!r}; use another folder"
        )
    return " ".join(f'{name}="{value}"' for name, value in told.items())
