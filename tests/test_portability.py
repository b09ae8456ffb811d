"""Test fczoo without modules, signals and calls that Windows does not have."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_POSIX = """
import importlib, os, pkgutil, signal, sys
import sklearn.linear_model, timm, torchvision, filelock, loky  # these check the platform

modules = ("fcntl", "grp", "pwd", "pty", "resource", "syslog", "termios", "tty")
sys.modules.update(dict.fromkeys(modules))
for name in (
    "fork", "forkpty", "getpgid", "getloadavg", "killpg", "mkfifo", "sched_getaffinity", "setsid",
    "statvfs", "sysconf", "uname",
):
    vars(os).pop(name, None)
for name in (
    "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm",
    "pause", "pthread_sigmask", "setitimer", "sigwait",
):
    vars(signal).pop(name, None)

import fczoo
for module in pkgutil.walk_packages(fczoo.__path__, "fczoo."):
    if module.name == "fczoo.__main__":  # the command itself
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # an extra that is not installed
        if error.name in modules:
            raise

from fczoo.cli.app import main
sys.argv[:1] = ["fczoo"]
main()
"""  # fmt: skip


@pytest.mark.slow
def test_run_works_without_posix_features(tmp_path: Path) -> None:
    command = ["bench", "--methods", "fedncm", "--dataset", "digits", "--stop-after-tasks", "1"]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, *command, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "fedncm" in result.stdout
    assert (tmp_path / "run/fedncm/seed0/model.safetensors").is_file()
