"""The privacy ledger of an institution: what its uploads have disclosed over all runs.

A run's epsilon covers the uploads of that run. A server that starts many runs, or many federations
together, could average their noise away. The ledger therefore counts every protected upload of the
institution, whatever the run, federation, folder or data set: data sets may share patients.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs
from filelock import FileLock

from fczoo.core.errors import FczooError
from fczoo.core.files import Count, read_record, write_record
from fczoo.federation.settings import Settings
from fczoo.security.privacy import composed_epsilon

FORMAT = "fczoo-privacy-ledger-1"
LARGEST_DELTA = 1e-5  # of the budget, whatever larger delta an agreement states


class Releases(msgspec.Struct):
    """Protected uploads of one data set in one run."""

    data: str  # SHA-256 of the images and labels
    run: str  # unique name of the run
    noise: float  # standard deviation of the noise, in clipping norms
    uploads: Count = 0


class _Content(msgspec.Struct):
    releases: list[Releases] = []


def default_ledger() -> Path:
    """Return the ledger of this user: in ``FCZOO_HOME``, or where the platform keeps user data."""
    folder = os.environ.get("FCZOO_HOME") or platformdirs.user_data_dir("fczoo")
    return Path(folder) / "privacy-ledger.json"


@dataclass(frozen=True)
class PrivacyLedger:
    """A file of protected uploads, and the epsilon that they may reach; None: no limit."""

    path: Path
    budget: float | None = None

    def check(self, settings: Settings) -> None:
        """Raise FczooError if a run cannot have a single upload.

        Args:
            settings: Settings of the run.

        Raises:
            FczooError: Uploads are not protected although there is a budget, or it is spent.
        """
        self._check_noise(settings)
        if self.budget is not None:
            self._check_budget(self._read(), settings)

    def spend(self, settings: Settings, data: str, run: str) -> None:
        """Record one upload, on disk before it leaves; no other process can do so in between.

        Args:
            settings: Settings of the run.
            data: SHA-256 of the images and labels.
            run: Unique name of the run.

        Raises:
            FczooError: The upload would exceed the budget, or the ledger is damaged.
        """
        self._check_noise(settings)
        if not settings.dp_noise:
            return
        with self._locked():
            releases = self._read()
            self._check_budget(releases, settings)
            key = data, run, settings.dp_noise
            entry = next((r for r in releases if (r.data, r.run, r.noise) == key), None)
            if entry is None:
                entry = Releases(*key)
                releases.append(entry)
            entry.uploads += 1
            write_record(self.path, FORMAT, {"releases": msgspec.to_builtins(releases)})

    def epsilon(self, delta: float = LARGEST_DELTA) -> float:
        """Return epsilon of all recorded uploads together; 0 without any.

        Args:
            delta: Delta of the guarantee.
        """
        return composed_epsilon([(r.noise, r.uploads) for r in self._read()], delta)

    def _check_noise(self, settings: Settings) -> None:
        """Raise FczooError for uploads without noise where there is a budget."""
        if self.budget is not None and not settings.dp_noise:
            raise FczooError(
                "the institution has set an epsilon budget, and uploads of this run have no "
                "noise; agree on dp_clip, dp_noise and dp_secure in run.toml"
            )

    def _check_budget(self, releases: list[Releases], settings: Settings) -> None:
        """Raise FczooError if one more upload would exceed the budget."""
        if self.budget is None:
            return
        uploads = [(r.noise, r.uploads) for r in releases] + [(settings.dp_noise, 1)]
        total = composed_epsilon(uploads, min(settings.dp_delta, LARGEST_DELTA))
        if total > self.budget:
            raise FczooError(
                f"one more upload would bring the institution's epsilon to {total:.3g}, and its "
                f"budget is {self.budget:g}; agree on more noise or fewer rounds"
            )

    def _read(self) -> list[Releases]:
        if not self.path.exists():
            return []
        return read_record(self.path, "privacy ledger", _Content, FORMAT).releases

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock"):
                yield
        except OSError as error:
            problem = f"cannot write the privacy ledger {self.path}: {error.strerror or error}"
            raise FczooError(f"{problem}; give a file that belongs to you with --ledger") from error
