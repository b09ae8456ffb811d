"""Test killed and stopped searches of ``fczoo tune``."""

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

from fczoo.federation.result import Result
from fczoo.runner.tune import record_interrupts
from helpers_cli import TINY


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_workers_stop_with_killed_command(tmp_path: Path):
    """Stop workers that would otherwise run all trials of methods with and without rounds."""
    words = [
        "--methods",
        "fedclm,fedlda",
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
        wait_for(lambda: not is_alive(command.pid))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize(("jobs", "group"), [(1, False), (2, False), (2, True)])
def test_stopped_search_names_command_to_resume(tmp_path: Path, jobs: int, group: bool):
    """Stop a search at once and name the command that resumes it.

    With ``group``, the workers get the signal too, as on a terminal.
    """
    words = ["--methods", "fedclm,fedlda", "--trials", "500", "--jobs", str(jobs), *TINY]
    with start_search([*words, "--out", str(tmp_path)]) as command:
        assert command.stderr is not None
        lines = [command.stderr.readline()]  # a trial has ended
        (os.killpg if group else os.kill)(command.pid, signal.SIGINT)
        lines += command.communicate(timeout=60)[1].splitlines()
        text = "\n".join(lines)
        assert command.returncode == 130, text
        assert "Traceback" not in text, text
        advice = "finished trials are stored, and the same command resumes"
        assert lines[-1] == f"Error: stopped on request; {advice} in {tmp_path}"
        assert len(lines) < 20 and "trial 1 of 500" in lines[0]
        wait_for(lambda: not is_alive(command.pid))


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError


class Finalised:
    """Call a function as the object is deleted."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


def test_interrupt_in_finaliser_prints_nothing_and_stops_next_round(monkeypatch) -> None:
    reported: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_type))
    hook, handler = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with record_interrupts() as check:
            check.round({})
            Finalised(interrupt)
            Finalised(fail)
            with pytest.raises(KeyboardInterrupt):
                check.round({})
            with pytest.raises(KeyboardInterrupt):  # a method without rounds has only tasks
                check.task(Result("fedlda", {}, {}, 0, {}, {}, [], [], []))
        assert sys.unraisablehook is hook
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert reported == [ValueError]


@contextmanager
def start_search(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run ``fczoo tune`` in its own process group, and end the whole group afterwards.

    It handles SIGINT as on a terminal, even if the tests run in the background of a script.
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
        if is_alive(command.pid):
            os.killpg(command.pid, signal.SIGKILL)
        command.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen within two minutes")


def is_alive(group: int) -> bool:
    """Return whether the group has a running process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
