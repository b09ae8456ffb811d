"""Configuration of a sweep and of its execution, and the runs that result from both."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from loky import cpu_count

from fczoo.core.files import shorten, write_json
from fczoo.federation.device import pick_device
from fczoo.federation.model_record import path_note
from fczoo.federation.result import read_result
from fczoo.federation.settings import Settings
from fczoo.federation.settings_checks import PATH_SETTINGS
from fczoo.models.storage import KeepModel
from fczoo.reports.run_config import RunConfig, configure_run
from fczoo.reports.run_folder import FAILURE, RESULT
from fczoo.runner.shared_memory import SharedBenchmark

CLIENTS = "clients"  # --cluster spread=clients

Sweep = Mapping[Path, Sequence[RunConfig]]
"""Runs by run folder, relative to the command's folder; all runs in a folder share settings."""


def make_sweep(
    folder: Path,
    settings: Settings,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    search: Mapping[str, Any] | None = None,
) -> dict[Path, list[RunConfig]]:
    """Configure one run per method and seed, all with the same settings.

    The runs share one folder, or have one per seed if the seed varies more than training.

    Args:
        folder: Run folder, relative to the command's folder.
        settings: Settings of the runs.
        methods: Names of methods.
        seeds: Seeds of the runs.
        options: Options by method, from the user or a tuned file.
        search: Search of ``fczoo tune`` with its methods, as in ``bench.json``.

    Raises:
        FczooError: A name is unknown, or a value is invalid.
    """
    settings.check()
    configs = []
    for method in methods:
        method_search = search if search and method in search["methods"] else None
        method_options = (options or {}).get(method, {})
        configs.append(configure_run(method, settings, method_options, search=method_search))
    if settings.vary == ("training",):
        return {folder: [replace(config, seed=s) for config in configs for s in seeds]}
    return {
        folder / f"seed{s}": [
            replace(config, settings=settings.with_seed(s), seed=s) for config in configs
        ]
        for s in seeds
    }


def store_paths(out: Path, sweep: Sweep) -> None:
    """Store the paths of data and weights that ``bench.json`` leaves out, in a separate file.

    Args:
        out: Folder of the command.
        sweep: Runs by subfolder.
    """
    notes = {}
    for folder, runs in sweep.items():
        settings = runs[0].settings
        paths = {name: getattr(settings, name) for name in PATH_SETTINGS}
        hidden = {name: value for name, value in paths.items() if value != shorten(value)}
        if settings.root:
            hidden["data_root"] = str(settings.root.resolve())
        if settings.start_from:
            hidden["start_from"] = str(Path(settings.start_from).resolve())
        if hidden:
            notes[str(folder)] = hidden
    if notes:
        path_note(out).parent.mkdir(parents=True, exist_ok=True)
        write_json(path_note(out), notes)


def setting_folder(settings: Settings, grid: Sequence[Settings]) -> Path:
    """Return a setting's folder; data set and partition are levels where the grid has several."""
    folder = Path()
    for name in ("dataset", "partition"):
        if len({getattr(s, name) for s in grid}) > 1:
            folder /= folder_name(getattr(settings, name))
    return folder


def folder_name(spec: str) -> str:
    """Convert a command-line value to a folder name: ``dirichlet:0.5`` -> ``dirichlet_0.5``."""
    return re.sub("[:/]", "_", shorten(spec) or "")


@dataclass(frozen=True)
class ExecutionConfig:
    """Execution of a sweep.

    It does not affect results, except that their last bits depend on the number of threads.
    """

    resume: bool = False  # require an existing run folder
    skip_failed: bool = False  # continue after a failed run
    loggers: tuple[str, ...] = ()
    diagnostics: bool = False
    jobs: int = 1  # parallel runs, one process each; with spread=clients, workers for clients
    accept_changed_code: bool = False  # resume although the source has changed since
    executor: str = "cores"  # where runs execute
    cluster: tuple[tuple[str, str], ...] = ()  # resources that a run requests from a cluster
    keep_model: KeepModel = "final"  # tasks after which a run stores its model
    keep_server_state: bool = True  # store next to the model what the server needs to continue

    @property
    def distributes_clients(self) -> bool:
        """Return whether runs execute in this process with their clients on a cluster."""
        return self.executor == "ray" and dict(self.cluster).get("spread") == CLIENTS

    @property
    def on_cluster(self) -> bool:
        """Return whether whole runs execute on a cluster."""
        return self.executor != "cores" and not self.distributes_clients

    @property
    def sequential(self) -> bool:
        """Return whether the runs execute in this process, one after another."""
        return self.distributes_clients or (self.executor == "cores" and self.jobs == 1)

    def settings_of_this_process(self, settings: Settings) -> Settings:
        """Return the settings with which this process opens data and weights.

        If runs execute on other machines, this process only describes them and needs no GPU.
        """
        return replace(settings, device="cpu") if self.on_cluster else settings

    def device(self, settings: Settings) -> str:
        """Return the device of the runs; the submitting machine need not have it."""
        is_remote = self.on_cluster and settings.device != "auto"
        return settings.device if is_remote else str(pick_device(settings.device))

    @property
    def threads(self) -> int:
        """Return the number of threads per run.

        A sequential run has all threads of this process, a parallel run its share of the cores. On
        clusters it is the requested number, by default one.
        """
        if self.executor != "cores":
            return int(dict(self.cluster).get("threads", 1))
        if self.sequential:
            return torch.get_num_threads()
        return int(os.environ.get("OMP_NUM_THREADS") or max(1, cpu_count() // self.jobs))


DEFAULT_EXECUTION: ExecutionConfig = ExecutionConfig()


@dataclass(frozen=True)
class RunSpec:
    """One run of a sweep: its configuration, its folder and its number."""

    config: RunConfig
    folder: Path  # run folder of the setting
    number: int = 1  # in the sweep, from 1
    count: int = 1  # runs in the sweep
    # data and weights for a worker
    shared: SharedBenchmark | None = field(default=None, compare=False, repr=False)
    setting_name: str = ""  # folder of the setting; empty if the sweep has a single setting

    @property
    def folder_of_run(self) -> Path:
        """Return the folder of this run."""
        return self.folder / self.config.method / f"seed{self.config.seed}"

    @property
    def checkpoint(self) -> Path:
        """Return the file of the run's checkpoint."""
        return self.folder_of_run / "checkpoint.safetensors"

    @property
    def label(self) -> str:
        """Return the run's name in progress and messages."""
        run = f"{self.config.method} seed {self.config.seed}"
        return f"{self.setting_name}, {run}" if self.setting_name else run

    @property
    def numbered_label(self) -> str:
        """Return the label, with the run's number if the sweep has several runs."""
        return f"run {self.number} of {self.count}, {self.label}" if self.count > 1 else self.label


def is_finished(run: RunSpec) -> bool:
    """Return whether the result in the run's folder is complete and no failure is recorded."""
    folder = run.folder_of_run
    if not (folder / RESULT).is_file() or (folder / FAILURE).is_file():
        return False
    return read_result(folder / RESULT).is_finished
