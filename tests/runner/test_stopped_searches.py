"""``fczoo tune`` after a kill or a stop: its workers end, and the same command resumes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from helpers_cli import TINY


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_workers_end_with_a_command_that_is_killed(tmp_path: Path):
    """Workers end with a killed command.

    They would continue with all trials of their methods.
    """
    words = [
        "--methods",
        "fedavg,fedclm",
        "--trials",
        "50",
        "--jobs",
        "2",
        *TINY,
        "--out",
        str(tmp_path),
    ]
    with start_search(words) as command:
        wait_for(lambda: len(list(tmp_path.glob("*.db"))) == 2)
        command.kill()
        command.wait()
        wait_for(lambda: not living(command.pid))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize(("jobs", "group"), [(1, False), (2, False), (2, True)])
def test_a_search_that_is_told_to_stop_ends_at_once_and_says_what_carries_on(
    tmp_path: Path, jobs: int, group: bool
):
    """A stopped search ends at once and names what resumes it.

    A terminal signals the workers, too.
    """
    words = ["--methods", "fedavg,fedclm", "--trials", "500", "--jobs", str(jobs), *TINY]
    with start_search([*words, "--out", str(tmp_path)]) as command:
        assert command.stderr is not None
        lines = [command.stderr.readline()]  # a trial has ended
        (os.killpg if group else os.kill)(command.pid, signal.SIGINT)
        lines += command.communicate(timeout=60)[1].splitlines()
        assert command.returncode == 130 and "Traceback" not in "".join(lines)
        advice = "finished trials are stored, and the same command resumes"
        assert lines[-1] == f"Error: stopped on request; {advice} in {tmp_path}"
        assert len(lines) < 20 and "trial 1 of 500" in lines[0]
        wait_for(lambda: not living(command.pid))


@contextmanager
def start_search(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run ``fczoo tune`` in its own process group, and end the whole group afterwards.

    It obeys SIGINT as in a terminal; tests that a script runs in its background would hand down to
    ignore it.
    """
    command = subprocess.Popen(
        [sys.executable, "-m", "fczoo", "tune", *words],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield command
    finally:
        if living(command.pid):
            os.killpg(command.pid, signal.SIGKILL)
        command.communicate()


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(600):
        if happened():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen within two minutes")


def living(group: int) -> bool:
    """Return whether a process of the group still lives."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
