"""A Python interpreter that has imported torch when it starts.

Most of a short command's time is the import of torch, and tests start hundreds of commands.
``warm_python`` returns an executable to use in place of ``sys.executable``. It hands its words,
folder, environment and streams to a server, which has imported the large libraries, but nothing of
fczoo, and forks a process for them. What is imported later, plug-ins among it, is as in a new
process. A process that is killed by a test, or looked at from outside, should be a real one.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
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
    *("PIL.Image", "click", "tabulate", "tqdm", "jinja2", "msgspec", "filelock"),
)
CLIENT = r"""
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(message)
    pid = int.from_bytes(server.recv(8), "big")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int.from_bytes(server.recv(8) or (1).to_bytes(8, "big"), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_python() -> str:
    """Return the path of the executable ``python``; the first call starts the server."""
    return str(warm_commands() / "python")


@cache
def warm_commands() -> Path:
    """Start the server of this process; return a folder with ``python`` and ``fczoo``."""
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
    return folder


def serve(address: str) -> None:
    """Import the libraries and fork a process for each client until this process is killed."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(name)
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
    length, streams, _, _ = socket.recv_fds(client, 8, 3)
    message = b""
    while len(message) < int.from_bytes(length, "big"):
        message += client.recv(1 << 20)
    pid = os.fork()
    if not pid:
        client.close()
        run_words(streams, *json.loads(message))
    for stream in streams:
        os.close(stream)
    client.sendall(pid.to_bytes(8, "big"))
    process = os.pidfd_open(pid)
    if client in select.select([process, client], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def run_words(
    streams: list[int], words: list[str], folder: str, environment: dict[str, str]
) -> NoReturn:
    """Do what ``python WORDS`` does: run a module, a command or a file, and exit as it does."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # the server's own objects remember whether its streams could be sought in
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    sys.stderr.reconfigure(errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
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
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_main(words: list[str], python_path: str) -> None:
    """Run a module, a command or a file as the main module."""
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
