"""Control of running commands: the lock of a run folder, and stops on signals."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from fczoo.core.errors import FczooError, InterruptedCommandError
from fczoo.core.terminal import HANGUP

LOCK = ".lock"
CLUSTER = ".cluster"  # files of --executor slurm or ray in a run folder


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
            self._earlier_handlers = {
                s: signal.signal(s, self._record_signal) for s in (signal.SIGINT, signal.SIGTERM)
            }
            self._earlier_handlers |= {s: signal.signal(s, signal.SIG_IGN) for s in HANGUP}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in getattr(self, "_earlier_handlers", {}).items():
            signal.signal(number, handler)

    def check_interrupt(self) -> None:
        """Raise InterruptedCommandError after a signal; call it when everything is saved."""
        if self.signal_number:
            raise InterruptedCommandError(
                f"stopped on request, with the last round saved; {self.advice}", self.signal_number
            )

    def _record_signal(self, number: int, _: FrameType | None) -> None:
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
def lock_folder(out: Path) -> Iterator[None]:
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
