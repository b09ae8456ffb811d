"""Privacy ledger of an institution, which counts the privacy loss of its uploads over all runs.

The epsilon of a run covers only the uploads of that run. A server could average the noise over many
runs or federations. The ledger therefore counts every protected upload of the institution, in all
runs, federations, folders and data sets, since data sets may share patients.
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
LARGEST_DELTA = 1e-5  # delta of the budget, unless an agreement has a smaller one


class Releases(msgspec.Struct):
    """Protected uploads of one data set in one run."""

    data: str  # SHA-256 of the images and labels
    run: str  # unique name of the run
    noise: float  # standard deviation of the noise, in clipping norms
    uploads: Count = 0


class _Content(msgspec.Struct):
    releases: list[Releases] = []


def default_ledger() -> Path:
    """Return this user's ledger file, in ``FCZOO_HOME`` or the platform's folder of user data."""
    folder = os.environ.get("FCZOO_HOME") or platformdirs.user_data_dir("fczoo")
    return Path(folder) / "privacy-ledger.json"


@dataclass(frozen=True)
class PrivacyLedger:
    """File of protected uploads, with a budget for their epsilon."""

    path: Path
    budget: float | None = None  # largest epsilon; None: no limit

    def check(self, settings: Settings) -> None:
        """Check that a run can have at least one upload.

        Args:
            settings: Settings of the run.

        Raises:
            FczooError: There is a budget, and uploads have no noise or would exceed it.
        """
        self._check_noise(settings)
        if self.budget is not None:
            self._check_budget(self._read(), settings)

    def spend(self, settings: Settings, data: str, run: str) -> None:
        """Record one upload on disk, before the site sends it; other processes have to wait.

        Uploads without noise are not recorded.

        Args:
            settings: Settings of the run.
            data: SHA-256 of the images and labels.
            run: Unique name of the run.

        Raises:
            FczooError: There is a budget, and the upload has no noise or would exceed it; or the
                ledger is damaged.
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
        """Return the total epsilon of all recorded uploads; 0 without any.

        Args:
            delta: Delta of the guarantee.
        """
        return composed_epsilon([(r.noise, r.uploads) for r in self._read()], delta)

    def _check_noise(self, settings: Settings) -> None:
        """Raise FczooError if there is a budget and uploads have no noise."""
        if self.budget is not None and not settings.dp_noise:
            raise FczooError(
                "the institution has an epsilon budget, but uploads of this run have no noise; "
                "agree on dp_clip, dp_noise and dp_secure in run.toml"
            )

    def _check_budget(self, releases: list[Releases], settings: Settings) -> None:
        """Raise FczooError if one more upload would exceed the budget."""
        if self.budget is None:
            return
        uploads = [(r.noise, r.uploads) for r in releases] + [(settings.dp_noise, 1)]
        total = composed_epsilon(uploads, min(settings.dp_delta, LARGEST_DELTA))
        if total > self.budget:
            raise FczooError(
                f"one more upload would raise the institution's epsilon to {total:.3g}, above its "
                f"budget of {self.budget:g}; agree on more noise or fewer rounds"
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
            raise FczooError(f"{problem}; with --ledger name a file that you can write") from error
