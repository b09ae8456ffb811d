"""Federations over real connections: equality with a simulation, failures and restarts."""

import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import socket

import numpy as np
import pytest
from click.testing import CliRunner, Result

import fczoo
from fczoo import FczooError, create_method
from fczoo.cli.app import main
from fczoo.federation.checkpoint import unpack
from fczoo.federation.result import read_result
from fczoo.sites import node, transport
from fczoo.sites.credentials import read_identity
from fczoo.sites.federation_config import read_agreement
from fczoo.sites.site import STATE_FORM
from fczoo.sites.site_data import CHECKPOINT, RUN_START_FILE
from helpers_site_folders import simulated_folders
from helpers_sites import NAMES, free_port

TIMEOUT = 240.0  # seconds
STACKS_AFTER = 45.0  # seconds, less than the patience of a server


def run_command(*words: object) -> Result:
    return CliRunner().invoke(main, ["site", *map(str, words)])


def init(out: Path, agreement_folder: Path, port: int) -> None:
    result = run_command(
        *("init", out, "--agreed", agreement_folder, "--address", f"localhost:{port}")
    )
    assert result.exit_code == 0, result.output


@pytest.fixture
def federation(agreement_folder, tmp_path) -> Path:
    """Write the folders of a federation."""
    init(tmp_path / "federation", agreement_folder, free_port())
    return tmp_path / "federation"


@contextmanager
def sites_in_threads(federation: Path, data: Path, *names: str) -> Iterator[dict[str, object]]:
    """Run sites during the block; yield the model folder or the error of each.

    A failed test shows the stacks of all threads after ``STACKS_AFTER`` seconds.
    """
    gc.collect()  # no finalizer of an earlier test may wait in the thread of a site
    faulthandler.dump_traceback_later(STACKS_AFTER, file=sys.__stderr__)
    outcomes: dict[str, object] = {}

    def run_site(name: str) -> None:
        folder, address = federation / name, read_identity(federation / name)[1]
        agreement = read_agreement(folder / "agreed")
        try:
            outcomes[name] = node._run_site(
                folder, data / name, agreement, name, address, patience=120.0
            )
        except FczooError as error:
            outcomes[name] = error

    threads = [threading.Thread(target=run_site, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
        for thread in threads:
            thread.join(TIMEOUT)
    finally:
        faulthandler.cancel_dump_traceback_later()


def serve(federation: Path, images: Path, patience: float = 60.0) -> Result:
    return run_command(
        *("start", federation / "server", "--images", images, "--patience", patience)
    )


def assert_result_equals_simulation(federation: Path, agreement_folder: Path, data: Path) -> None:
    """Compare the result of a server with that of a simulation."""
    result = read_result(federation / "server" / "result.json")
    simulation = simulated_folders(agreement_folder, data).run(create_method("hgp"))
    assert result.rejected == []
    np.testing.assert_allclose(
        np.concatenate(result.accuracy), np.concatenate(simulation.accuracy), atol=1e-5
    )
    assert (result.bytes_up, result.bytes_down) == (simulation.bytes_up, simulation.bytes_down)


def test_three_sites_match_simulation_and_get_model(federation, agreement_folder, data):
    with sites_in_threads(federation, data, *NAMES) as outcomes:
        result = serve(federation, data / "test")
    assert result.exit_code == 0, result.output
    assert_result_equals_simulation(federation, agreement_folder, data)
    assert "MB on the wire" in result.output and "A_N" in result.output
    model = federation / "server" / "model"
    for name in NAMES:
        assert outcomes[name] == federation / name / "model"
        files = {path.name: path.read_bytes() for path in outcomes[name].iterdir()}
        assert files == {f: (model / f).read_bytes() for f in ("model.json", "model.safetensors")}
    assert len(fczoo.load_model(federation / "paris").classes) == 6
    prediction = CliRunner().invoke(
        main, ["predict", str(federation / "rome" / "model"), str(data / "test" / "ant" / "0.png")]
    )
    assert prediction.exit_code == 0 and "0.png" in prediction.output
    state = run_command("status", federation / "server")
    assert state.stdout.startswith("completed, "), state.stdout
    tensor_bytes = read_result(federation / "server" / "result.json")
    wire_bytes = node.status(federation / "server")["wire_bytes"]
    assert wire_bytes > tensor_bytes.bytes_up + tensor_bytes.bytes_down > 0.9 * wire_bytes
    private = [*federation.glob("server/fczoo.log"), *federation.glob("*/kept/cache/**/*.u8")]
    private += [*federation.glob("*/kept/kept.safetensors"), *federation.glob("*/*.key")]
    assert len(private) == 1 + 3 + 3 + 4
    assert not any(path.stat().st_mode & 0o077 for path in private)


def copy_without_class(data: Path, folder: Path) -> Path:
    shutil.copytree(data / "test", folder)
    shutil.rmtree(folder / "eel")
    return folder


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no test image", "no test image of class eel in "),
        (
            "too large",
            "no site sends valid uploads in task 1, round 1; site paris: refused: its answer",
        ),
        ("an error", "ZeroDivisionError at the server: numbers; see fczoo.log of the server"),
        ("a full disk", "No space left on device: result.json"),
    ],
)
def test_failure_is_reported_at_server_and_sites(
    federation, data, tmp_path, monkeypatch, kind, reason
):
    monkeypatch.setattr(node, "RETRY_SECONDS", 0.1)
    images = data / "test"
    if kind == "no test image":
        images = copy_without_class(data, tmp_path / "test")
    elif kind == "too large":
        run = federation / "server" / "agreed" / "run.toml"
        run.write_text(f"answer_mb = 0\n{run.read_text()}")
    else:
        error = ZeroDivisionError("numbers\nand more")
        if kind == "a full disk":
            error = OSError(28, "No space left on device", "result.json")

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(node, "open_server", fail)
    with sites_in_threads(federation, data, *NAMES) as outcomes:
        result = serve(federation, images)
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error")]
    assert line.startswith(f"Error: the run has failed: {reason}")
    failure = json.loads((federation / "server" / "failed.json").read_text())["reason"]
    assert failure.startswith(reason)
    assert not (federation / "server" / "result.json").exists()
    message = f"the run has failed at the server: {failure}"
    assert {name: str(error) for name, error in outcomes.items()} == dict.fromkeys(NAMES, message)
    if kind == "too large":
        assert "but the limit is 16384; raise answer_mb in run.toml" in failure
    state = run_command("status", federation / "server").stdout
    assert state.startswith("failed, ") and reason in state


def test_stopped_server_reports_how_to_resume(federation, data, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(node, "open_server", interrupt)
    result = serve(federation, data / "test")
    assert result.exit_code == 130
    assert "Error: it was stopped; start it again to resume" in result.output
    assert "it was stopped" in (federation / "server" / "failed.json").read_text()
    assert run_command("status", federation / "server").stdout.startswith("failed, ")


def test_sites_report_missing_server_model(federation, data, monkeypatch):
    class RunWithoutModel:
        def run_to(self, outcome: Path) -> None:
            outcome.write_text("{}")

    monkeypatch.setattr(node, "open_server", lambda *_: RunWithoutModel())
    with sites_in_threads(federation, data, *NAMES) as outcomes:
        node.start(federation / "server", data / "test", 60.0)
    message = "the run is complete, but its model is not available: the server could not store it"
    assert all(str(error).startswith(message) for error in outcomes.values()), outcomes


def test_absent_site_is_reported(federation, data, monkeypatch):
    monkeypatch.setattr(transport, "GRACE_SECONDS", 0.0)
    with sites_in_threads(federation, data, "paris", "lyon") as outcomes:
        result = serve(federation, data / "test", patience=3)
    assert result.exit_code == 1
    assert "site rome did not answer; start all sites, then the server again" in result.output
    assert all("site rome did not answer" in str(error) for error in outcomes.values())


@contextmanager
def start_process(log: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``fczoo site start`` and kill it afterwards."""
    command = [sys.executable, "-m", "fczoo", "site", "start", *map(str, words)]
    with log.open("ab") as out:
        site_process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            yield site_process
        finally:
            site_process.kill()
            site_process.wait()


def wait(condition: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)


def has_answered(state: Path) -> bool:
    """Return whether a site has answered a question of the first task."""
    return state.exists() and unpack(STATE_FORM, state.read_bytes())[1]["moment"][0] == 0


def listening_ports(process_id: int) -> list[int]:
    """Return the TCP and UDP ports at which a process receives, as Linux lists them."""
    inodes = set()
    for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(descriptor))
    ports = []
    for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for row in Path(f"/proc/{process_id}/net/{kind}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sockets are those that Linux lists")
def test_killed_server_and_stopped_site_resume(agreement_folder, data, tmp_path):
    halves = [["fox", "bee", "ant"], ["eel", "dog", "cat"]]
    (agreement_folder / "schedule.json").write_text(json.dumps({"tasks": halves}))
    federation, port, log = tmp_path / "federation", free_port(), tmp_path / "log"
    init(federation, agreement_folder, port)
    server = federation / "server"

    def start(name: str, images: str):
        return start_process(log, federation / name, "--images", data / images, "--patience", 120)

    with ExitStack() as stack:
        outcomes = stack.enter_context(sites_in_threads(federation, data, "rome", "lyon"))
        paris = stack.enter_context(start("paris", "paris"))
        wait(lambda: f"waiting for localhost:{port} (Connection refused)" in log.read_text(), log)
        first = stack.enter_context(start("server", "test"))
        state = federation / "paris" / "kept" / "kept.safetensors"
        wait(lambda: has_answered(state) or first.poll() is not None, log)
        assert listening_ports(first.pid) == [port]
        assert listening_ports(paris.pid) == []
        paris.terminate()
        assert paris.wait(30) == 128 + signal.SIGTERM
        assert run_command("status", server).stdout.startswith("running, ")
        paris = stack.enter_context(start("paris", "paris"))
        wait(lambda: (server / CHECKPOINT).exists() or first.poll() is not None, log)
        first.kill()
        first.wait()
        assert (server / CHECKPOINT).exists(), log.read_text()[-3000:]
        state = run_command("status", server).stdout
        assert state.startswith("failed, ") and "ended unexpectedly; start it again" in state
        run_start = (server / RUN_START_FILE).stat().st_mtime_ns
        second = stack.enter_context(start("server", "test"))
        assert [p.wait(TIMEOUT) for p in (second, paris)] == [0, 0], log.read_text()
        assert (server / RUN_START_FILE).stat().st_mtime_ns == run_start  # it continued
    assert_result_equals_simulation(federation, agreement_folder, data)
    assert "Traceback" not in log.read_text()
    assert outcomes == {name: federation / name / "model" for name in ("rome", "lyon")}
    assert (federation / "paris" / "model" / "model.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["init", "OUT", "--agreed", "AGREED", "--address", "nowhere"],
            "--address 'nowhere' is not a HOST:PORT",
        ),
        (
            ["init", "OUT", "--agreed", "AGREED", "--address", "a:\u00b2"],
            "PORT is a number from 1 to 65535",
        ),
        (
            ["init", "OUT", "--agreed", "AGREED", "--address", "a:65536"],
            "PORT is a number from 1 to 65535",
        ),
        (["init", "OUT", "--agreed", "AGREED", "--address", "münchen.de:1"], "HOST is a name"),
        (["init", "OUT", "--agreed", "AGREED", "--address", "[::1]:1"], "HOST is a name"),
        (["init", "AGREED", "--agreed", "AGREED", "--address", "a:1"], "exists already"),
        (["init", "OUT", "--agreed", "OUT", "--address", "a:1"], "cannot read the class list"),
        (["start", "AGREED", "--images", "AGREED"], "no folder of a site at"),
        (["status", "AGREED"], "no folder of a site at"),
    ],
)
def test_invalid_site_arguments_are_rejected(agreement_folder, tmp_path, words, message):
    places = {"OUT": str(tmp_path / "out"), "AGREED": str(agreement_folder)}
    result = run_command(*(places.get(argument, argument) for argument in words))
    assert result.exit_code == 1 and message in result.output
    assert sum(line.startswith("Error") for line in result.output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "..", "server", "a/b"])
def test_site_name_must_be_folder_name(agreement_folder, tmp_path, name):
    run = (agreement_folder / "run.toml").read_text()
    (agreement_folder / "run.toml").write_text(run.replace('"lyon"', f'"{name}"'))
    out = tmp_path / "out"
    result = run_command("init", out, "--agreed", agreement_folder, "--address", "localhost:9443")
    assert result.exit_code == 1
    assert f"a site is called {name!r}; its name must be a valid folder name" in result.output
    assert not out.exists()


def test_certificates_name_server_and_sites(agreement_folder, tmp_path):
    from cryptography.x509 import (
        DNSName,
        SubjectAlternativeName,
        UniformResourceIdentifier,
        load_pem_x509_certificate,
    )

    run = (agreement_folder / "run.toml").read_text()
    (agreement_folder / "run.toml").write_text(run.replace('"lyon"', '"Köln, " '))
    host, out = ".".join(["a" * 60, "b" * 60, "example", "org"]), tmp_path / "out"
    run_command("init", out, "--agreed", agreement_folder, "--address", f"{host}:9443")

    def names_in(file: str, kind: type) -> list[str]:
        certificate = load_pem_x509_certificate((out / file).read_bytes())
        names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
        return names.get_values_for_type(kind)

    assert host in names_in("server/server.crt", DNSName)
    assert names_in("Köln, /site.crt", UniformResourceIdentifier) == ["fczoo-site:K%C3%B6ln%2C%20"]
    for key in out.rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    assert not list(out.rglob("ca.key"))  # the key of the authority is thrown away


def test_invalid_server_address_is_rejected(federation, tmp_path):
    address_file = federation / "lyon" / "place.json"
    address_file.write_text(address_file.read_text().replace("localhost:", "localhost"))
    result = run_command("start", address_file.parent, "--images", tmp_path)
    assert result.exit_code == 1
    assert "place.json is not valid: 'localhost" in result.output


def test_second_server_keeps_files_of_first(federation, data):
    server = federation / "server"
    (server / "result.json").write_text("{}")
    with socket() as first:
        first.bind(("0.0.0.0", read_identity(server)[1][1]))
        first.listen()
        result = serve(federation, data / "test")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert line.startswith("Error: the server cannot use port ")
    assert json.loads((server / "failed.json").read_text()) == {"reason": line[len("Error: ") :]}
    assert run_command("status", server).stdout.startswith("failed, 0 s")
    with node._lock_folder(server):
        result = serve(federation, data / "test")
    assert result.exit_code == 1 and "another process is running in " in result.output
    assert (server / "result.json").exists()


def test_site_start_reports_unknown_class_folder(federation, data, tmp_path):
    shutil.copytree(data / "lyon" / "bee", tmp_path / "images" / "Bee")
    result = run_command("start", federation / "lyon", "--images", tmp_path / "images")
    assert result.exit_code == 1
    assert "images/Bee is not a class in classes.txt" in result.output
