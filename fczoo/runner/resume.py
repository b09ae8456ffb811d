"""Who may go on in a run folder: one process at a time, with the configuration that began it,
until it is told to stop.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from fczoo.core.errors import FczooError
from fczoo.core.streams import HANGUP
from fczoo.federation.code import file_of

LOCK = ".lock"
CLUSTER = ".cluster"  # files of --executor slurm or ray in a run folder
FREE = (
    "command",
    "earlier_commands",
    "started",
    "hardware",
    "settings.min_clients",
    "settings.data_root",  # the data's own hash is compared
    "data.remarks",
    "code",  # see check_code
    "changed_code",
    "warnings",
)  # parts of bench.json that may change while a run goes on


class Interrupted(FczooError):
    """The run was told to stop, and everything up to its last round is on disk."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupts:
    """Inside it, the first SIGINT or SIGTERM is a wish that ``obey`` fulfils after the round;
    the second one ends at once. A terminal that is closed does not end a run.
    """

    def __init__(self, out: Path):
        self.advice = f"to go on: fczoo bench --resume --out {out}"
        self.wish = 0

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python delivers signals nowhere else
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
            self._before |= {s: signal.signal(s, signal.SIG_IGN) for s in HANGUP}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in getattr(self, "_before", {}).items():
            signal.signal(number, handler)

    def obey(self) -> None:
        """Raise Interrupted if the run was told to stop; called where everything is saved."""
        if self.wish:
            raise Interrupted(f"stopped as told, with the last round saved; {self.advice}", self.wish)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.wish:
            raise Interrupted(f"stopped at once; the round before is saved; {self.advice}", number)
        self.wish = number
        with suppress(OSError, ValueError, AttributeError):  # the terminal may be gone
            os.write(  # print is not safe in a handler
                sys.stderr.fileno(), b"\nstopping after this round; once more to stop at once\n"
            )


@contextmanager
def only_process(out: Path) -> Iterator[None]:
    """Hold the run folder, which is made if need be.
    Raises FczooError at once when another process holds it.

    The system gives the lock back when a process ends, however it ends.
    A folder that stays empty is removed again.
    """
    made = [p for p in (out, *out.parents) if not p.exists()]
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FczooError(
            f"another process is running in {out}; wait for it, or give another folder with --out"
        ) from None
    try:
        yield
    finally:
        if all(p.name == LOCK for p in out.iterdir()):
            (out / LOCK).unlink(missing_ok=True)
        lock.release()
        for folder in made:
            if not any(folder.iterdir()):
                folder.rmdir()


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise FczooError, naming the differences,
    when the folder's ``bench.json`` is of another configuration.
    """
    old, new = _flat(before), _flat(now)
    other = [k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and not k.startswith(FREE)]
    if other:
        other.sort(key=lambda name: ("sha256" in name, name))  # what was typed says more than a hash of it

        def told(tree: Mapping[str, Any], name: str) -> str:
            value = str(tree.get(name, "not there"))
            return value[:8] if "sha256" in name else value

        named = "; ".join(f"{k} was {told(old, k)}, is {told(new, k)}" for k in other[:4])
        more = f" and {len(other) - 4} more" if len(other) > 4 else ""
        named = " ".join(named.split())  # what a foreign file holds may have line breaks
        raise FczooError(
            f"output folder {folder} is already in use by another configuration: {named}{more}; give "
            "another with --out"
        )


def check_code(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], accept: bool) -> list[str]:
    """Modules whose source is another than the one that began a folder's runs.

    Raises FczooError, naming their files, unless that is accepted.
    """
    known = before.get("code", {})
    changed = [name for name, sha256 in now["code"].items() if known.get(name, sha256) != sha256]
    if changed and not accept:
        named = ", ".join(str(file_of(name) or name) for name in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise FczooError(
            f"the runs in {folder} were begun with other code: {named}{more}; give another folder with "
            "--out, or --accept-changed-code to go on all the same"
        )
    return changed


def last_run(results: Path) -> Path:
    """The newest run folder that ``bench`` named itself. Raises FczooError when there is none."""
    runs = sorted(results / p.relative_to(results).parts[0] for p in results.glob("run-*/**/bench.json"))
    if not runs:
        raise FczooError(f"no run to resume in {results}; name its folder with --out")
    return runs[-1]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
