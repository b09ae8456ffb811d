"""``fczoo tune`` that is killed or told to stop: its workers end, and the same command carries on."""

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
    """They would go on with all trials of their methods."""
    words = ["--methods", "fedavg,fedclm", "--trials", "50", "--jobs", "2", *TINY, "--out", str(tmp_path)]
    with begun(words) as command:
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
    """A terminal tells the workers, too."""
    words = ["--methods", "fedavg,fedclm", "--trials", "500", "--jobs", str(jobs), *TINY]
    with begun([*words, "--out", str(tmp_path)]) as command:
        assert command.stderr is not None
        said = [command.stderr.readline()]  # a trial has ended
        (os.killpg if group else os.kill)(command.pid, signal.SIGINT)
        said += command.communicate(timeout=60)[1].splitlines()
        assert command.returncode == 130 and "Traceback" not in "".join(said)
        advice = "the trials that had ended are kept, and the same command carries on"
        assert said[-1] == f"Error: stopped as told; {advice} in {tmp_path}"
        assert len(said) < 20 and "trial 1 of 500" in said[0]
        wait_for(lambda: not living(command.pid))


@contextmanager
def begun(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """``fczoo tune`` in a group of its own, of which nothing is left at the end.

    It obeys SIGINT as in a terminal; tests that a script runs in its background would hand down to ignore it.
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
    """Whether a process of the group still lives."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
