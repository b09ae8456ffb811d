"""A server and three clients of NVIDIA FLARE's proof of concept against a simulation."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo import create_method
from fczoo.cli.app import main
from fczoo.federation.result import read_result
from fczoo.sites.site_data import CHECKPOINT, RUN_START_FILE
from helpers_site_folders import simulated_folders
from helpers_sites import NAMES

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (extra flare)")

PORTS = 8002, 8003  # which FLARE's proof of concept takes
TIMEOUT = 420.0  # seconds
ADMIN = "admin@nvidia.com"


class ProofOfConcept:
    """Run FLARE's proof of concept in its own folder."""

    def __init__(self, folder: Path):
        self.kits = folder / "poc" / "example_project" / "prod_00"
        (folder / "home").mkdir()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {
            "HOME": str(folder / "home"),
            "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
            "PATH": path,
        }
        self.environment = {**os.environ, **variables}
        self.output_of("poc", "prepare", "-c", *NAMES, "--force")

    def output_of(self, *words: str) -> Any:
        """Return what a command of FLARE prints as JSON."""
        command = [sys.executable, "-m", "nvflare.cli", "--format", "json", *words]
        process = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
        assert lines and "data" in lines[-1], process.stdout + process.stderr
        return lines[-1]["data"]

    def allow(self, agreement_folder: Path, images: Path) -> None:
        """Allow fczoo in each kit and provide the agreed files and images."""
        for name in ("server", *NAMES):
            local, site_folder = self.kits / name / "local", self.kits / name / "fczoo"
            resources = json.loads((local / "resources.json.default").read_text())
            resources["class_allow_list"].append("fczoo.sites.flare")
            resources["allow_log_streaming"] = False
            (local / "resources.json").write_text(json.dumps(resources))
            shutil.copytree(agreement_folder, site_folder / "agreed")
            (site_folder / "images").symlink_to(images / ("test" if name == "server" else name))

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self.output_of("poc", "start", "--timeout", "200")
            yield
        finally:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.output_of("poc", "stop")
            self.kill()

    def kill(self, of: str = "", what: str = "") -> int:
        """Kill processes of a participant's folder whose command contains ``what``.

        Return their number.
        """
        import psutil  # FLARE needs it, too

        count = 0
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(
                argument.startswith(str(self.kits / of)) for argument in words
            ) and what in " ".join(words):
                with suppress(psutil.Error):
                    process.kill()
                    count += 1
        return count

    def submit(self, job: Path) -> str:
        """Submit a job and return its number."""
        return str(self.output_of("job", "submit", "-j", str(job), *self.kit)["job_id"])

    def status(self, number: str, outcome: Path) -> str:
        """Wait for a job, download its files to ``outcome`` and return its status."""
        reply = self.output_of("job", "wait", number, "--timeout", str(int(TIMEOUT)), *self.kit)
        self.output_of("job", "download", number, "-o", str(outcome), *self.kit)
        return str(reply["status"])

    @property
    def kit(self) -> tuple[str, str]:
        return "--startup-kit", str(self.kits / ADMIN)


@pytest.mark.slow
def test_flare_run_with_killed_client_matches_simulation(agreement_folder, data, tmp_path):
    for port in PORTS:
        with socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                pytest.skip(
                    f"something else listens at port {port}, which FLARE's proof of concept takes"
                )
    job = tmp_path / "job"
    command = CliRunner().invoke(
        main, ["site", "job", str(job), "--agreed", str(agreement_folder), "--patience", "300"]
    )
    assert command.exit_code == 0, command.output
    flare = ProofOfConcept(tmp_path)
    flare.allow(agreement_folder, data)
    resources = flare.kits / "rome" / "local" / "resources.json"
    quiet = resources.read_text()
    with flare.running():
        resources.write_text(
            quiet.replace('"allow_log_streaming": false', '"allow_log_streaming": true')
        )
        assert (
            flare.status(flare.submit(job), tmp_path / "refused") == "FINISHED:EXECUTION_EXCEPTION"
        )
        log = next((tmp_path / "refused").rglob("log.txt")).read_text()
        assert "site rome: its log goes to the server; set allow_log_streaming = false" in log
        resources.write_text(quiet)
        cut, end = flare.submit(job), time.monotonic() + TIMEOUT
        server_folder = flare.kits / "server" / "fczoo"
        while not (server_folder / CHECKPOINT).exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        assert flare.kill("paris", "worker_process")
        start = (server_folder / RUN_START_FILE).read_text()
        assert flare.status(cut, tmp_path / "cut") != "FINISHED:COMPLETED"
        assert flare.status(flare.submit(job), tmp_path / "outcome") == "FINISHED:COMPLETED"
        assert (server_folder / RUN_START_FILE).read_text() == start  # it continued
    (result_file,) = (tmp_path / "outcome").rglob("result.json")
    result, simulation = (
        read_result(result_file),
        simulated_folders(agreement_folder, data).run(create_method("hgp")),
    )
    assert result.rejected == []
    assert result.metrics["A_N"] == pytest.approx(simulation.metrics["A_N"], abs=1e-5)
    np.testing.assert_allclose(
        np.concatenate(result.accuracy), np.concatenate(simulation.accuracy), atol=1e-5
    )
    assert (result.bytes_up, result.bytes_down) == (simulation.bytes_up, simulation.bytes_down)
