"""What one run of a grid is: a method with a seed in one setting, written to its folder."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from loky import cpu_count

from fczoo.core.method import Method
from fczoo.federation.device import pick_device
from fczoo.federation.result import read_result
from fczoo.federation.settings import Settings
from fczoo.reports.run_folder import FAILURE, RESULT
from fczoo.runner.lending import Lent

CLIENTS = "clients"  # --cluster spread=clients


@dataclass(frozen=True)
class Conduct:
    """How a grid is run; nothing of it changes a number, but that the last bits depend on the threads."""

    resume: bool = False  # begin nothing new
    skip_failed: bool = False  # carry on after a run that fails
    loggers: tuple[str, ...] = ()
    diagnostics: bool = False
    jobs: int = 1  # runs side by side, each in a process of its own; or workers for the clients of each
    accept_changed_code: bool = False  # go on in a folder that other source began
    executor: str = "cores"  # where they go on
    cluster: tuple[tuple[str, str], ...] = ()  # what is asked of a cluster

    @property
    def spreads_clients(self) -> bool:
        """Whether the runs go on in turn in this process, their clients on a cluster."""
        return self.executor == "ray" and dict(self.cluster).get("spread") == CLIENTS

    @property
    def away(self) -> bool:
        """Whether whole runs go on on a cluster."""
        return self.executor != "cores" and not self.spreads_clients

    @property
    def in_turn(self) -> bool:
        """Whether the runs go on in this process."""
        return self.spreads_clients or (self.executor == "cores" and self.jobs == 1)

    def here(self, settings: Settings) -> Settings:
        """The settings with which this process opens data and weights: of runs that go on elsewhere it only
        has to describe them.
        """
        return replace(settings, device="cpu") if self.away else settings

    def device(self, settings: Settings) -> str:
        """The device of the runs, which a machine that only hands them out need not have."""
        elsewhere = self.away and settings.device != "auto"
        return settings.device if elsewhere else str(pick_device(settings.device))

    @property
    def threads(self) -> int:
        """Threads of each run: what this process has or, side by side, its share of the cores; on a cluster
        what is asked for, or one.
        """
        if self.executor != "cores":
            return int(dict(self.cluster).get("threads", 1))
        if self.in_turn:
            return torch.get_num_threads()
        return int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_count() // self.jobs))


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    folder: Path  # run folder of the setting
    settings: Settings
    method: Method
    seed: int
    number: int = 1  # among the runs of the grid
    count: int = 1
    lent: Lent | None = field(default=None, compare=False, repr=False)  # data and weights for a worker
    among: str = ""  # which of several settings of the grid its own is, by their folders

    @property
    def place(self) -> Path:
        """Folder of this run."""
        return self.folder / self.method.name / f"seed{self.seed}"

    @property
    def checkpoint(self) -> Path:
        """Where the run is saved until it is finished."""
        return self.place / "checkpoint.safetensors"

    @property
    def label(self) -> str:
        """The run as progress and messages name it."""
        run = f"{self.method.name} seed {self.seed}"
        return f"{self.among}, {run}" if self.among else run

    @property
    def numbered(self) -> str:
        """The label, and which of several runs this is."""
        return f"run {self.number} of {self.count}, {self.label}" if self.count > 1 else self.label

    @property
    def finished(self) -> bool:
        """Whether an earlier command has brought this run to its end."""
        if not (self.place / RESULT).is_file() or (self.place / FAILURE).is_file():
            return False
        return read_result(self.place / RESULT).finished
