"""One run of a grid: a method with a seed in one setting, and its folder."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from loky import cpu_count

from fczoo.core.method import Method
from fczoo.federation.device import pick_device
from fczoo.federation.result import read_result
from fczoo.federation.settings import Settings
from fczoo.models.keep import KeepModel
from fczoo.reports.run_folder import FAILURE, RESULT
from fczoo.runner.shared_memory import SharedBenchmark

CLIENTS = "clients"  # --cluster spread=clients


@dataclass(frozen=True)
class ExecutionConfig:
    """Execution of a grid.

    It changes no number; only the last bits depend on the threads.
    """

    resume: bool = False  # begin nothing new
    skip_failed: bool = False  # resume after a run that fails
    loggers: tuple[str, ...] = ()
    diagnostics: bool = False
    jobs: int = 1  # runs side by side, each in its own process; or workers for the clients of each
    accept_changed_code: bool = False  # continue in a folder that other source began
    executor: str = "cores"  # where they continue
    cluster: tuple[tuple[str, str], ...] = ()  # what is asked of a cluster
    keep_model: KeepModel = "final"  # of which tasks each run keeps its model
    keep_server_state: bool = True  # what the server needs to continue, next to the model

    @property
    def spreads_clients(self) -> bool:
        """Return whether runs execute in this process with their clients on a cluster."""
        return self.executor == "ray" and dict(self.cluster).get("spread") == CLIENTS

    @property
    def away(self) -> bool:
        """Return whether whole runs execute on a cluster."""
        return self.executor != "cores" and not self.spreads_clients

    @property
    def in_turn(self) -> bool:
        """Return whether the runs execute in this process, one after another."""
        return self.spreads_clients or (self.executor == "cores" and self.jobs == 1)

    def settings_of_this_process(self, settings: Settings) -> Settings:
        """Return the settings with which this process opens data and weights.

        It only describes runs that execute on other machines.
        """
        return replace(settings, device="cpu") if self.away else settings

    def device(self, settings: Settings) -> str:
        """Return the device of the runs; the machine that submits them need not have it."""
        on_cluster = self.away and settings.device != "auto"
        return settings.device if on_cluster else str(pick_device(settings.device))

    @property
    def threads(self) -> int:
        """Return the threads per run: all of this process, or its share of the cores.

        On a cluster it is the requested number, or one.
        """
        if self.executor != "cores":
            return int(dict(self.cluster).get("threads", 1))
        if self.in_turn:
            return torch.get_num_threads()
        return int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_count() // self.jobs))


@dataclass(frozen=True)
class RunSpec:
    """One run of a grid."""

    folder: Path  # run folder of the setting
    settings: Settings
    method: Method
    seed: int
    number: int = 1  # among the runs of the grid
    count: int = 1
    lent: SharedBenchmark | None = field(
        default=None, compare=False, repr=False
    )  # data and weights for a worker
    among: str = ""  # which of several settings of the grid its own is, by their folders

    @property
    def folder_of_run(self) -> Path:
        """Return the folder of this run."""
        return self.folder / self.method.name / f"seed{self.seed}"

    @property
    def checkpoint(self) -> Path:
        """Return the file of the run's checkpoint."""
        return self.folder_of_run / "checkpoint.safetensors"

    @property
    def label(self) -> str:
        """Return the run's name in progress and messages."""
        run = f"{self.method.name} seed {self.seed}"
        return f"{self.among}, {run}" if self.among else run

    @property
    def numbered_label(self) -> str:
        """Return the label with the run's number among several."""
        return f"run {self.number} of {self.count}, {self.label}" if self.count > 1 else self.label

    @property
    def is_finished(self) -> bool:
        """Return whether an earlier command has finished this run."""
        if not (self.folder_of_run / RESULT).is_file() or (self.folder_of_run / FAILURE).is_file():
            return False
        return read_result(self.folder_of_run / RESULT).is_finished
