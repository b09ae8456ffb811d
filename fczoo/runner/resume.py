"""Checks before a run folder is resumed: no other process, same configuration, same code."""

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

from fczoo.core.errors import FczooError, InterruptedCommandError
from fczoo.core.terminal import HANGUP
from fczoo.federation.environment import file_of

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
    "code",  # compared by check_code
    "changed_code",
    "keep",
    "warnings",
)  # parts of bench.json that may change when a run resumes


class Interrupts:
    """Context in which a signal stops a run after its round.

    After the first SIGINT or SIGTERM the next ``check_interrupt`` stops the run; the second signal
    stops it at once. Closing the terminal does not stop a run.
    """

    def __init__(self, out: Path):
        self.advice = f"to resume: fczoo bench --resume --out {out}"
        self.signal_number = 0

    def __enter__(self) -> "Interrupts":
        if (
            threading.current_thread() is threading.main_thread()
        ):  # Python delivers signals nowhere else
            self._before = {
                s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)
            }
            self._before |= {s: signal.signal(s, signal.SIG_IGN) for s in HANGUP}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in getattr(self, "_before", {}).items():
            signal.signal(number, handler)

    def check_interrupt(self) -> None:
        """Raise InterruptedCommandError after a signal; call it when everything is saved."""
        if self.signal_number:
            raise InterruptedCommandError(
                f"stopped on request, with the last round saved; {self.advice}", self.signal_number
            )

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal_number:
            raise InterruptedCommandError(
                f"stopped at once; the previous round is saved; {self.advice}", number
            )
        self.signal_number = number
        with suppress(OSError, ValueError, AttributeError):  # the terminal may be gone
            os.write(  # print is not safe in a handler
                sys.stderr.fileno(),
                b"\nstopping after this round; interrupt again to stop at once\n",
            )


@contextmanager
def only_process(out: Path) -> Iterator[None]:
    """Lock the run folder, which is created if necessary.

    The operating system releases the lock when the process ends. A new folder that stays empty is
    removed at the end.

    Raises FczooError if another process holds the lock.
    """
    new_folders = [p for p in (out, *out.parents) if not p.exists()]
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
        for folder in new_folders:
            if not any(folder.iterdir()):
                folder.rmdir()


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise FczooError that names the differences if ``bench.json`` has another configuration."""
    old, new = _flat(before), _flat(now)
    differences = [
        k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and not k.startswith(FREE)
    ]
    if differences:
        # settings first, since their values explain more than hashes
        differences.sort(key=lambda name: ("sha256" in name, name))

        def describe(tree: Mapping[str, Any], name: str) -> str:
            value = str(tree.get(name, "not there"))
            return value[:8] if "sha256" in name else value

        listing = "; ".join(
            f"{k} was {describe(old, k)}, is {describe(new, k)}" for k in differences[:4]
        )
        suffix = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        listing = " ".join(listing.split())  # values from the file may have line breaks
        raise FczooError(
            f"output folder {folder} is already in use by another configuration: {listing}"
            f"{suffix}; give another with --out"
        )


def check_code(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], accept: bool
) -> list[str]:
    """Return modules whose source differs from that of the folder's first runs.

    Raises FczooError, which names their files, unless ``accept`` is true.
    """
    old_hashes = before.get("code", {})
    changed_modules = [
        name for name, sha256 in now["code"].items() if old_hashes.get(name, sha256) != sha256
    ]
    if changed_modules and not accept:
        files = ", ".join(str(file_of(name) or name) for name in changed_modules[:3])
        suffix = f" and {len(changed_modules) - 3} more" if len(changed_modules) > 3 else ""
        raise FczooError(
            f"the runs in {folder} were started with other code: {files}{suffix}; give another "
            "folder with --out, or --accept-changed-code to resume all the same"
        )
    return changed_modules


def last_run(results: Path) -> Path:
    """Return the newest run folder in ``results`` that has a default name.

    Raises FczooError if there is none.
    """
    runs = sorted(
        results / p.relative_to(results).parts[0] for p in results.glob("run-*/**/bench.json")
    )
    if not runs:
        raise FczooError(f"no run to resume in {results}; name its folder with --out")
    return runs[-1]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return out
