"""Server and nodes of a Flower federation: what they need on disk, and how they are run."""

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
from fczoo.core.files import encode_json, read_json, typed, write_json
from fczoo.federation.result import Result, read_result
from fczoo.sites.address import host_and_port
from fczoo.sites.agreement import CLASSES, RUN, SCHEDULE, Agreement, read_agreement
from fczoo.sites.folders import open_site
from fczoo.sites.processes import HOME, LOG, flwr, for_owner_alone, running

AGREED, PLACE, KEYS, APP = "agreed", "place.json", "keys", "app"
SERVER = "server"  # name of the server's folder; no site can have it
LINK = "fczoo"  # what the commands of Flower call the federation
BEGUN, LOOK = 120.0, 2.0  # seconds until a server must have begun, and between two looks at a run
TRIES, PAUSE = 1000, 5.0  # of a node to reach its server, and seconds between them
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


# two lines, which Flower's own check can read
APPS = """from fczoo.sites import on_flower

client = on_flower.client
server = on_flower.server
"""


class Place(msgspec.Struct, forbid_unknown_fields=True):
    """Who has a folder, and where the server is."""

    name: str
    address: str  # HOST:PORT of the server


def write_federation(out: Path, agreed: Path, host: str, port: int) -> Agreement:
    """Write a folder for the server and one for each site of an agreement, to be handed to them.

    Raises FczooError where Flower is not installed, and where ``out`` exists already.
    """
    need_flower()
    from fczoo.sites.credentials import CA, write_node_key, write_server_credentials

    agreement = read_agreement(agreed)
    if out.exists():
        raise FczooError(f"{out} exists already; choose another folder")
    if any(Path(name).name != name or name in ("", "..", SERVER) for name in agreement.sites):
        raise FczooError(f"{agreed / RUN}: a site's name must be that of a folder, and not {SERVER!r}")
    for name in (SERVER, *agreement.sites):
        (out / name / AGREED).mkdir(parents=True)
        for file in (CLASSES, SCHEDULE, RUN):
            shutil.copy(agreed / file, out / name / AGREED)
        write_json(out / name / PLACE, {"name": name, "address": f"{host}:{port}"})
    write_server_credentials(out / SERVER, host)
    (out / SERVER / KEYS).mkdir()
    for name in agreement.sites:
        shutil.copy(out / SERVER / CA, out / name)
        write_node_key(out / name / "node.key", out / SERVER / KEYS / f"{name}.pub")
    app = out / SERVER / APP  # a folder of its own, since all of it goes to the nodes
    (app / "fczoo_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (app / "fczoo_app" / "__init__.py").touch()
    (app / "fczoo_app" / "apps.py").write_text(APPS, encoding="utf-8")
    return agreement


class Ended(NamedTuple):
    """A run that is over."""

    result: Result
    wire: int  # bytes of all that has passed between server and nodes, as Flower counts them
    seconds: float


def start(folder: Path, images: Path, patience: float) -> Ended | None:
    """Be the node whose folder it is, until stopped; or the server, until the run is over.

    Raises FczooError where that cannot be, or the run has failed.
    """
    need_flower()
    place = _place(folder)
    if not images.is_dir():
        raise FczooError(f"no folder {images}; give the one that holds the class folders with --images")
    with for_owner_alone():  # what is kept and logged may say something of images
        if place.name != SERVER:
            _node(folder.resolve(), images.resolve(), place)
            return None
        return _serve(folder.resolve(), images.resolve(), place, patience)


def status(folder: Path) -> list[dict[str, Any]]:
    """Runs of a server that is up, the newest first: ``run-id``, ``status`` and others.

    Raises FczooError where none is.
    """
    need_flower()
    if _place(folder).name != SERVER or not (folder / HOME / "config.toml").exists():
        raise FczooError(f"{folder} is not that of a server that has begun; see fczoo site start")
    runs: list[dict[str, Any]] = flwr(folder.resolve(), "ls", LINK)["runs"]
    return runs


def need_flower() -> None:
    """Raise FczooError where Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FczooError("Flower is not installed; run pip install 'fczoo[flower]'") from None


def _place(folder: Path) -> Place:
    try:
        place = typed(read_json(folder / PLACE, "folder of a site"), Place)
        host_and_port(place.address)
        return place
    except ValueError as error:
        raise FczooError(f"{folder / PLACE} is not valid: {error}; write it with fczoo site init") from error


def _node(folder: Path, images: Path, place: Place) -> None:
    # here, not in a process of Flower's, it says what is wrong
    open_site(read_agreement(folder / AGREED), place.name, images, folder / "kept")
    told = {
        "site": place.name,
        "agreement": str(folder / AGREED),
        "images": str(images),
        "folder": str(folder / "kept"),
    }
    command = ["flower-supernode", "--superlink", place.address, "--node-config", _words(told)]
    command += ["--root-certificates", str(folder / "ca.crt")]
    command += ["--auth-supernode-private-key", str(folder / "node.key")]
    waiting: str | None = None
    for _ in range(TRIES):  # a node ends where the server is not up, or does not know its key yet
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
    raise FczooError(f"site {place.name} cannot reach the server at {place.address}; see {folder / LOG}")


def _check_server(address: str, authority: Path) -> str | None:
    """Why no server answers, if none does. Raises FczooError where one is up that is not the folder's."""
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


def _serve(folder: Path, images: Path, place: Place, patience: float) -> Ended:
    agreement, outcome = read_agreement(folder / AGREED), folder / "result.json"
    _check_free(host_and_port(place.address)[1])
    for old in (outcome, folder / "failed.json"):
        old.unlink(missing_ok=True)
    with _superlink(folder, place):
        nodes = {name: _registered(folder, name) for name in agreement.sites}
        write_json(folder / "nodes.json", nodes)
        told = {"agreement": str(folder / AGREED), "images": str(images), "folder": str(folder)}
        words = _words({**told, "patience": str(patience)})
        run = flwr(folder, "run", str(folder / APP), LINK, "--run-config", words)["run-id"]
        while not (about := _about(folder, run))["status"].startswith("finished"):
            time.sleep(LOOK)
    if about["status"] != "finished:completed" or not outcome.exists():
        failed = folder / "failed.json"
        reason = read_json(failed, "reason")["reason"] if failed.exists() else f"see {folder / LOG}"
        raise FczooError(f"the run has {about['status'].replace(':', ' as ')}: {reason}")
    return Ended(read_result(outcome), about["network-traffic"]["total-bytes"], about["elapsed"])


def _check_free(port: int) -> None:
    """Raise FczooError where a server cannot listen."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Flower does after a server has ended
        try:
            trial.bind(("0.0.0.0", port))
        except OSError as error:
            problem = f"the server cannot have port {port}: {error.strerror}"
            raise FczooError(f"{problem}; end what is there, which may be this server") from error


@contextmanager
def _superlink(folder: Path, place: Place) -> Iterator[None]:
    """A server that is up. Raises FczooError where it does not begin."""
    _, port = host_and_port(place.address)
    command = ["flower-superlink", "--host", "0.0.0.0", "--port", str(port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
    command += ["--ssl-keyfile", str(folder / "server.key"), "--disable-runtime-dependency-installation"]
    home = folder / HOME
    home.mkdir(exist_ok=True)
    link = {"address": f"127.0.0.1:{port}", "root-certificates": str(folder / "ca.crt")}
    lines = [f"[superlink.{LINK}]", *(f"{name} = {encode_json(value)}" for name, value in link.items())]
    (home / "config.toml").write_text("\n".join(["[superlink]", f'default = "{LINK}"', *lines, ""]))
    with running(command, folder) as process:
        begun = time.monotonic()
        while not _answers(folder):
            if process.poll() is not None or time.monotonic() - begun > BEGUN:
                raise FczooError(f"the server does not begin at port {port}; see {folder / LOG}")
            time.sleep(LOOK)
        yield


def _answers(folder: Path) -> bool:
    try:
        flwr(folder, "ls", LINK)
        return True
    except FczooError:
        return False


def _registered(folder: Path, name: str) -> int:
    key = folder / KEYS / f"{name}.pub"
    return int(flwr(folder, "supernode", "register", str(key), LINK, "--name", name)["node-id"])


def _about(folder: Path, run: str) -> dict[str, Any]:
    about: dict[str, Any] = flwr(folder, "ls", LINK, "--run-id", run)["runs"][0]
    return about


def _words(told: dict[str, str]) -> str:
    """Settings as Flower's commands take them. Raises FczooError for what they cannot."""
    if bad := [value for value in told.values() if '"' in value or "'" in value or "\n" in value]:
        raise FczooError(f"Flower takes no quotes in a path: {bad[0]!r}; use another folder")
    return " ".join(f'{name}="{value}"' for name, value in told.items())
