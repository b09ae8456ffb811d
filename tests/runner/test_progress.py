"""Test the progress of a bench on a terminal, without a terminal and in the log."""

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from fczoo.runner.progress import log_to_file
from helpers_cli import TINY
from helpers_warm import warm_python

pty = pytest.importorskip("pty")


def bench(out: Path, *more: str) -> list[str]:
    return [warm_python(), "-m", "fczoo", "bench", "--out", str(out), *TINY, *more]


def run_on_terminal(command: list[str], columns: int = 140) -> str:
    """Run a command on a terminal of this width and return its output."""
    import fcntl
    import struct
    import termios

    child, screen = pty.fork()
    if not child:
        time.sleep(0.2)  # until the terminal has its size
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
        }
        os.execve(
            sys.executable, [sys.executable, *command[1:]], environment
        )  # the terminal sets them
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    written = b""
    try:
        while part := os.read(screen, 1 << 16):
            written += part
    except OSError:  # the other end is closed
        pass
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, written.decode()
    return written.decode()


def test_terminal_shows_tasks_runs_time_and_best_run(tmp_path: Path) -> None:
    screen = run_on_terminal(
        bench(tmp_path / "run", "--methods", "fedncm,fedavg", "--set", "fedavg.tune=head")
    )
    lines = [line.strip() for line in re.split(r"[\r\n]+", screen)]
    task = re.compile(r"run 2 of 2, fedavg seed 0: task \d of 3, [\d.]+ % over")
    assert len(list(filter(task.match, lines))) == 3
    end = re.compile(r"1 of 2 runs ended; best so far [\d.]+ %, fedncm seed 0; about \d+ s left")
    assert any(map(end.match, lines))
    bars = [line for line in lines if line.startswith("run 2 of 2, fedavg seed 0  ")]
    assert any(
        re.search(r"67 % .* elapsed, \d\d:\d\d left, task 2, round 1, loss [\d.]+", bar)
        for bar in bars
    )
    assert f"2 runs; log: {tmp_path / 'run' / 'log.txt'}" in lines


def test_sweep_progress_names_settings(tmp_path: Path) -> None:
    words = [*bench(tmp_path / "run", "--methods", "fedncm"), "--partition", "iid,quantity:2"]
    words += ["--seeds", "0,1", "--vary", "training,partition"]
    screen = run_on_terminal(words)
    assert "run 1 of 4, iid, fedncm seed 0: task 1 of 3" in screen
    assert "run 4 of 4, quantity_2, fedncm seed 1: task 3 of 3" in screen


def test_progress_bar_covers_parallel_runs(tmp_path: Path) -> None:
    words = ["--methods", "hgp", "--seeds", "0,1,2", "--jobs", "2", "--rounds", "2"]
    command = [
        sys.executable,
        *bench(tmp_path / "run")[1:],
        *words,
    ]  # a fresh interpreter, whose workers start slowly
    lines = re.split(r"[\r\n]+", run_on_terminal(command))
    bars = [
        line for line in lines if re.match(r"\d of 3 runs ", line.strip()) and " elapsed, " in line
    ]
    assert any(re.search(r"hgp seed \d [\d.]+ %, hgp seed \d", bar) for bar in bars)
    shares = [int(re.search(r"(\d+) % \|", bar)[1]) for bar in bars]
    assert shares == sorted(shares)
    assert set(shares) - {0, 33, 67, 100}  # tasks count, not whole runs only
    task = re.compile(r"run (\d) of 3, hgp seed \d: task (\d) of 3, [\d.]+ % over")
    tasks = [m.groups() for m in (task.search(line) for line in lines) if m]
    assert sorted(tasks) == [(str(run), str(t)) for run in (1, 2, 3) for t in (1, 2, 3)]


def test_narrow_terminal_wraps_at_words(tmp_path: Path) -> None:
    command = bench(tmp_path / "run", "--methods", "fedncm", "--seeds", "0,1")
    screen = run_on_terminal(command, 70)
    table = screen[screen.index("digits: 3 tasks") :].splitlines()
    assert [line for line in table if len(line) > 70 and "  " not in line and "/" not in line] == []
    (row,) = [line for line in table if line.startswith("fedncm ")]
    assert len(row) > 70  # a row is one line
    without_terminal = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert max(map(len, without_terminal.stdout.splitlines())) > 115
    assert " ".join(without_terminal.stdout.split()) == " ".join("\n".join(table).split())


def test_progress_without_terminal_prints_lines(tmp_path: Path) -> None:
    wild = [
        "--methods",
        "fedncm,pilora",
        "--epochs",
        "2",
        "--set",
        "pilora.lr_prototype=1e30",
        "--skip-failed",
    ]
    command = bench(tmp_path / "run", "--seeds", "0,1", *wild)
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1 and "\r" not in process.stderr
    assert "run 4 of 4, pilora seed 1: failed, pilora diverged" in process.stderr
    assert "4 of 4 runs ended; best so far" in process.stderr
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ", line) for line in log)
    messages = [line.split(" ", 3)[3] for line in log]
    assert [line for line in messages if line.startswith("run ")] == [
        line for line in process.stderr.splitlines() if line.startswith("run ")
    ]


@pytest.mark.parametrize("shell, shown", [("none", False), ("no kernel", False), ("kernel", True)])
def test_in_notebook_needs_running_kernel(monkeypatch, shell: str, shown: bool):
    """Detect a notebook by its running kernel.

    ipykernel can be imported without IPython, and both without a running kernel.
    """
    from fczoo.runner.progress import in_notebook

    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    if shell != "none":
        shells = ModuleType("IPython")
        shells.get_ipython = lambda: object() if shown else None
        monkeypatch.setitem(sys.modules, "IPython", shells)
    assert in_notebook() is shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a device that is full")
def test_full_disk_disables_log_without_traceback(capsys):
    with log_to_file(Path("/dev/full")) as handler:
        logging.getLogger("fczoo").warning("a line")
    assert handler not in logging.getLogger().handlers
    assert "Logging error" not in capsys.readouterr().err
