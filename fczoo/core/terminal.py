"""Terminal output: streams that may close without ending a run, and progress bars."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

HANGUP = tuple(s for s in signal.Signals if s.name == "SIGHUP")
"""Signals to a process whose terminal is closed; none on Windows. A run ignores them."""

FULL_DISK = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)
)
"""Errors of writing that lose output which someone waits for, unlike those of a closed stream."""


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a closed or missing one is not.

    Args:
        stream: Text stream, or None.
    """
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


class LossyStream:
    """A text stream whose output is dropped once it cannot be written any more.

    Attributes:
        disk_error: Error of a full disk at which output was dropped; None without one.
    """

    def __init__(self, stream: TextIO):
        """Wrap a stream.

        Args:
            stream: Text stream that takes the output while it can.
        """
        self._stream = stream
        self.disk_error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or drop it if the stream cannot be written any more.

        Args:
            text: Text to write.

        Returns:
            Number of characters.
        """
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def _drop(self, error: OSError) -> None:
        """Redirect the file descriptor to the null device, so that all later writes succeed."""
        if error.errno in FULL_DISK:
            self.disk_error = self.disk_error or error
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(null, self._stream.fileno())
        finally:
            os.close(null)


@contextlib.contextmanager
def lossy_output() -> Iterator[LossyStream]:
    """Make stdout and stderr lossy, and yield stdout.

    A stream closed at the start becomes the null device.
    """
    originals = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as null:
        output, errors = (LossyStream(stream or null) for stream in originals)
        sys.stdout, sys.stderr = output, errors
        try:
            yield output
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = originals


def progress_bar(label: str, total: int | None, done: int, unit: str = "B") -> "tqdm[Any]":
    """Create a progress bar on a terminal; elsewhere print one line at the start.

    Args:
        label: Text in front of the bar.
        total: Units at the end, if known.
        done: Units at the start.
        unit: Name of the unit; B for bytes.
    """
    from tqdm import tqdm

    quiet = not is_terminal(sys.stderr)
    if quiet:
        print(f"{label}: {'resumed' if done else 'started'}", file=sys.stderr, flush=True)
    return tqdm(
        total=total,
        initial=done,
        desc=label,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1000,
        disable=quiet,
        leave=False,
    )
