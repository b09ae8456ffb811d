"""A server and three nodes of Flower on this machine, with TLS and keys: the numbers of a
simulation.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from socket import socket

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo import create_method
from fczoo.cli.app import main
from fczoo.federation.checkpoint import unpack
from fczoo.federation.result import read_result
from fczoo.sites.folders import LOG
from fczoo.sites.server import CHECKPOINT, RUN_START_FILE
from fczoo.sites.site import STATE_FORM
from helpers_site_folders import simulated_folders

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

LONGEST = 420.0  # seconds for which anything is waited for


@contextmanager
def process(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of fczoo and end it afterwards with all that it started."""
    with log.open("ab") as out:
        command = [sys.executable, "-m", "fczoo", "site", "start", *words]
        group = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            yield group
        finally:
            kill(group)


def kill(started: subprocess.Popen[bytes]) -> None:
    """Kill the process and all of its group at once."""
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def wait(for_what: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + LONGEST
    while not for_what():
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.5)


def has_answered(kept: Path) -> bool:
    """Return whether a site has answered a question of its first task."""
    return kept.exists() and unpack(STATE_FORM, kept.read_bytes())[1]["moment"][0] == 0


def flower_log(folder: Path) -> str:
    """Return Flower's log of a site."""
    return (folder / LOG).read_text() if (folder / LOG).exists() else ""


def free_port() -> int:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def init(out: Path, agreement_folder: Path, port: int) -> None:
    result = CliRunner().invoke(
        main,
        [
            "site",
            "init",
            str(out),
            "--agreed",
            str(agreement_folder),
            "--address",
            f"localhost:{port}",
        ],
    )
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_three_nodes_with_a_node_and_the_server_killed_and_strangers_refused(
    agreement_folder, data, tmp_path
):
    halves = [["fox", "bee", "ant"], ["eel", "dog", "cat"]]
    (agreement_folder / "schedule.json").write_text(json.dumps({"tasks": halves}))
    port, out, second = free_port(), tmp_path / "federation", tmp_path / "other"
    init(out, agreement_folder, port)
    init(second, agreement_folder, port)
    shutil.copy(
        out / "rome" / "ca.crt", second / "rome"
    )  # so that Rome's stranger lacks a key alone
    log, memory_file = tmp_path / "log", out / "paris" / "kept" / "kept.safetensors"

    def start(
        images: str, folder: Path, *more: str
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return process(log, str(folder), "--images", str(data / images), *more)

    def serve() -> AbstractContextManager[subprocess.Popen[bytes]]:
        return start("test", out / "server", "--patience", "400")

    with serve() as first:
        with start("rome", second / "rome"):
            wait(lambda: "Failed to activate SuperNode" in flower_log(second / "rome"), log)
            with start("paris", second / "paris") as stranger:
                assert stranger.wait(LONGEST) == 1
            assert "is not the one for which this folder was written" in log.read_text()
        with start("rome", out / "rome"), start("lyon", out / "lyon"):
            with start("paris", out / "paris") as paris:
                wait(lambda: has_answered(memory_file) or first.poll() is not None, log)
                kill(paris)
            assert first.poll() is None, log.read_text()[-3000:]
            status = CliRunner().invoke(main, ["site", "status", str(out / "server")])
            assert status.exit_code == 0 and ": running, " in status.output, status.output
            with start("paris", out / "paris"):
                checkpoint = out / "server" / CHECKPOINT
                wait(lambda: checkpoint.exists() or first.poll() is not None, log)
                kill(first)
                assert checkpoint.exists(), log.read_text()[-3000:]
                mtime = (out / "server" / RUN_START_FILE).stat().st_mtime_ns
                with serve() as server:
                    wait(lambda: server.poll() is not None, log)
                assert (out / "server" / RUN_START_FILE).stat().st_mtime_ns == mtime  # it continued
    assert server.returncode == 0, log.read_text()[-3000:]
    result = read_result(out / "server" / "result.json")
    simulation = simulated_folders(agreement_folder, data).run(create_method("hgp"))
    assert result.rejected == []
    assert result.metrics["A_N"] == pytest.approx(simulation.metrics["A_N"], abs=1e-5)
    np.testing.assert_allclose(
        np.concatenate(result.accuracy), np.concatenate(simulation.accuracy), atol=1e-5
    )
    assert "MB on the wire" in log.read_text()
    assert (result.bytes_up, result.bytes_down) == (simulation.bytes_up, simulation.bytes_down)
    assert not list(second.glob("*/kept/kept.safetensors"))
    written = [
        memory_file,
        *(out / "paris" / "kept" / "cache").rglob("*.u8"),
        *out.glob("*/flower.log"),
    ]
    assert len(written) == 6
    assert not any(file.stat().st_mode & 0o077 for file in written)


def listens(port: int) -> bool:
    with socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux signals a process when its parent is gone"
)
def test_a_server_whose_command_alone_is_killed_is_gone_and_can_begin_again(
    agreement_folder, data, tmp_path
):
    port, log = free_port(), tmp_path / "log"
    init(tmp_path / "federation", agreement_folder, port)
    words = str(tmp_path / "federation" / "server"), "--images", str(data / "test")
    with process(log, *words) as first:
        wait(lambda: listens(port) or first.poll() is not None, log)
        first.kill()
        wait(lambda: not listens(port), log)
        with process(log, *words) as second:
            wait(lambda: listens(port) or second.poll() is not None, log)
            assert second.poll() is None, log.read_text()


@pytest.mark.slow
def test_a_site_says_for_which_server_it_waits_and_goes_on_waiting(
    agreement_folder, data, tmp_path
):
    port, log = free_port(), tmp_path / "log"
    init(tmp_path / "federation", agreement_folder, port)
    with process(
        log, str(tmp_path / "federation" / "lyon"), "--images", str(data / "lyon")
    ) as site:
        wait(lambda: "waiting" in log.read_text() or site.poll() is not None, log)
        assert f"waiting for localhost:{port} (Connection refused)" in log.read_text()
        assert site.poll() is None


@pytest.mark.slow
def test_a_run_that_fails_ends_with_its_reason(agreement_folder, data, tmp_path):
    """A run that fails ends with its reason.

    Flower's own command to begin a run has exit status 0 then.
    """
    init(tmp_path / "federation", agreement_folder, free_port())
    shutil.copytree(data / "test", tmp_path / "test")
    shutil.rmtree(tmp_path / "test" / "eel")
    folder = tmp_path / "federation" / "server"
    with process(tmp_path / "log", str(folder), "--images", str(tmp_path / "test")) as server:
        wait(lambda: server.poll() is not None, tmp_path / "log")
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert server.returncode == 1
    assert last.startswith(
        "Error: the run has finished as failed: no test image of class eel in "
    ), last


@pytest.mark.parametrize(
    ("words", "said"),
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
    ],
)
def test_words_that_do_not_fit_are_refused_in_one_line(agreement_folder, tmp_path, words, said):
    places = {"OUT": str(tmp_path / "out"), "AGREED": str(agreement_folder)}
    result = CliRunner().invoke(
        main, ["site", *(places.get(argument, argument) for argument in words)]
    )
    assert result.exit_code == 1 and said in result.output
    assert sum(line.startswith("Error") for line in result.output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "..", "server", "a/b"])
def test_a_site_is_called_as_a_folder_can_be(agreement_folder, tmp_path, name):
    run = (agreement_folder / "run.toml").read_text()
    (agreement_folder / "run.toml").write_text(run.replace('"lyon"', f'"{name}"'))
    words = [
        "site",
        "init",
        str(tmp_path / "out"),
        "--agreed",
        str(agreement_folder),
        "--address",
        "localhost:9443",
    ]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "a site's name must be that of a folder" in result.output
    assert not (tmp_path / "out").exists()


def test_the_name_of_a_server_may_be_long(agreement_folder, tmp_path):
    from cryptography.x509 import DNSName, SubjectAlternativeName, load_pem_x509_certificate

    host = ".".join(["a" * 60, "b" * 60, "example", "org"])
    words = [
        "site",
        "init",
        str(tmp_path / "out"),
        "--agreed",
        str(agreement_folder),
        "--address",
        f"{host}:9443",
    ]
    assert CliRunner().invoke(main, words).exit_code == 0
    certificate = load_pem_x509_certificate(
        (tmp_path / "out" / "server" / "server.crt").read_bytes()
    )
    names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    assert host in names.get_values_for_type(DNSName)


def test_a_folder_with_an_address_that_is_none_says_so(agreement_folder, tmp_path):
    init(tmp_path / "federation", agreement_folder, 9443)
    address_file = tmp_path / "federation" / "lyon" / "place.json"
    address_file.write_text(address_file.read_text().replace("localhost:9443", "localhost"))
    result = CliRunner().invoke(
        main, ["site", "start", str(address_file.parent), "--images", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "place.json is not valid: 'localhost' is not a HOST:PORT" in result.output


def test_a_second_server_leaves_the_first_ones_files(agreement_folder, data, tmp_path):
    with socket() as first:
        first.bind(("0.0.0.0", 0))
        first.listen()
        port, server = first.getsockname()[1], tmp_path / "federation" / "server"
        init(tmp_path / "federation", agreement_folder, port)
        (server / "result.json").write_text("{}")
        result = CliRunner().invoke(
            main, ["site", "start", str(server), "--images", str(data / "test")]
        )
    assert result.exit_code == 1
    assert f"Error: the server cannot have port {port}: Address" in result.output
    assert (server / "result.json").exists()


def test_a_site_that_cannot_be_opened_says_so_where_it_is(agreement_folder, data, tmp_path):
    init(tmp_path / "federation", agreement_folder, 9443)
    shutil.copytree(data / "lyon" / "bee", tmp_path / "images" / "Bee")
    folder = str(tmp_path / "federation" / "lyon")
    result = CliRunner().invoke(
        main, ["site", "start", folder, "--images", str(tmp_path / "images")]
    )
    assert result.exit_code == 1
    assert "images/Bee is not a class in classes.txt" in result.output


def test_keys_are_for_their_owners_alone(agreement_folder, tmp_path):
    init(tmp_path / "federation", agreement_folder, 9443)
    for key in (tmp_path / "federation").rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    app_files = {
        file.name
        for file in (tmp_path / "federation" / "server" / "app").rglob("*")
        if file.is_file()
    }
    assert app_files == {"pyproject.toml", "__init__.py", "apps.py"}  # all of which nodes get
