"""A Python interpreter that has imported torch when it starts.

Most of a short command's time is the import of torch, and tests start hundreds of commands.
``warm_python`` returns an executable to use in place of ``sys.executable``. It hands its words,
folder, environment and streams to a server, which has imported the large libraries, but nothing of
fczoo, and forks a process for them. What is imported later, plug-ins among it, is as in a new
process, but for ``os.fsync``, which does not wait for the disk. Its ``sys.executable`` is warm,
too: the workers that it starts have imported torch.

The process that a test starts is a client of the forked one: it forwards signals and ends as that
one does, also by the same signal. Children of the forked process are below ``server_process()``.
"""

import atexit
import contextlib
import fcntl
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    *("torch", "torch._dynamo", "torch.func", "torchvision.transforms.v2", "safetensors.torch"),
    *("numpy", "scipy.stats", "sklearn.datasets", "sklearn.model_selection", "pandas"),
    *("loky", "PIL.Image", "click", "tabulate", "tqdm", "jinja2", "msgspec", "filelock"),
)
MOST_FILES = 253  # that one message may carry
CLIENT = r"""
import json, os, signal, socket, sys
numbers = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        numbers += [number] if os.get_inheritable(number) else []  # Python's own are not
    except OSError:
        pass
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    message = json.dumps([numbers, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "big")], numbers)
    server.sendall(message)
    pid = int.from_bytes(server.recv(8), "big")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    for number in numbers:
        os.close(number)
    code = int.from_bytes(server.recv(8) or (1).to_bytes(8, "big"), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_python() -> str:
    """Return the path of the executable ``python``; the first call starts the server."""
    return str(warm_commands() / "python")


def warm_commands() -> Path:
    """Return a folder with ``python`` and ``fczoo``; the first call starts the server."""
    return _start()[0]


def server_process() -> int:
    """Return the number of the process below which all warm processes are."""
    return _start()[1]


@cache
def _start() -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix="fczoo-warm-"))
    address = folder / "socket"
    texts = {
        "python": f"#!{sys.executable} -SE\n{CLIENT.format(address=str(address))}",
        "fczoo": f'#!/bin/sh\nexec {folder}/python -m fczoo "$@"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(address)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.kill)
    return folder, server.pid


def serve(address: str) -> None:
    """Import the libraries and fork a process for each client until this process is killed."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(name)
    os.fsync = lambda handle: None  # as conftest.py has it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    parent = os.getppid()
    while os.getppid() == parent:
        if not select.select([listener], [], [], 5.0)[0]:
            continue
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            supervise(client)
        client.close()


def supervise(client: socket.socket) -> NoReturn:
    """Run one process for a client, kill it where the client is gone, and send its exit code."""
    length, files, _, _ = socket.recv_fds(client, 8, MOST_FILES)
    message = b""
    while len(message) < int.from_bytes(length, "big"):
        message += client.recv(1 << 20)
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = os.fork()
    if not pid:
        client.close()
        numbers, words, folder, environment = json.loads(message)
        take_files(files, numbers)
        os.getppid = lambda: parent_of(struct.unpack("3i", credentials)[0])
        run_words(words, folder, environment)
    for file in files:
        os.close(file)
    client.sendall(pid.to_bytes(8, "big"))
    process = os.pidfd_open(pid)
    if client in select.select([process, client], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def take_files(files: list[int], numbers: list[int]) -> None:
    """Give received files the numbers that they have in the client; it may lack streams."""
    free = max((*files, *numbers, 2)) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, free) for file in files]
    for file in (0, 1, 2, *files):
        with contextlib.suppress(OSError):  # one of the received files may be a stream's number
            os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    # the server's own objects remember whether its streams could be sought in
    sys.stdin = os.fdopen(0) if 0 in numbers else None
    sys.stdout = os.fdopen(1, "w") if 1 in numbers else None
    sys.stderr = os.fdopen(2, "w", 1) if 2 in numbers else None
    if sys.stderr:
        sys.stderr.reconfigure(errors="backslashreplace")


def parent_of(process: int) -> int:
    """Return the parent of the client, which is 1 when the client has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return 1
    return int(status.rpartition(")")[2].split()[1])


def run_words(words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Do what ``python WORDS`` does: run a module, a command or a file, and exit as it does."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # a library may have looked it up in the server's environment
    sys.executable = str(Path(sys.argv[1]).with_name("python"))
    code = 0
    try:
        run_main(words, environment.get("PYTHONPATH", ""))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except ValueError:  # it is closed
            continue
        except OSError:
            code = 120  # as Python's own end
    os._exit(code)


def run_main(words: list[str], python_path: str) -> None:
    """Run a module, a command or a file as the main module."""
    while words[0][:2] not in ("-m", "-c") and words[0].startswith("-"):
        words = words[1:]  # -B and -u, which processes of libraries are started with, change little
    sys.path[:] = [*filter(None, python_path.split(os.pathsep)), *sys.path[1:]]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(words[1], "<string>", "exec"), space)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
