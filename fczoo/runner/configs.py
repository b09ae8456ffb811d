"""Configuration of a sweep and of its execution, and the single runs that they make."""

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
"""Run folder below that of the command -> its runs, which have the same settings."""


def make_sweep(
    folder: Path,
    settings: Settings,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    search: Mapping[str, Any] | None = None,
) -> dict[Path, list[RunConfig]]:
    """Configure the runs of methods and seeds in one setting.

    They share one folder, or have one per seed if the seed varies more than training.

    Args:
        folder: Run folder below that of the command.
        settings: Settings of the runs.
        methods: Names of methods.
        seeds: Seeds of the runs.
        options: Options of methods by the user or a tuned file.
        search: Search of ``fczoo tune`` with its methods, as in ``bench.json``.

    Raises:
        FczooError: A name is unknown, or a value does not fit.
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
    """Store the paths of data and weights of some runs, where their folder does not have them.

    Args:
        out: The run folder.
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
    """Return the folder of a setting: a level per data set and partition if there are several."""
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

    It changes no number; only the last bits depend on the threads.
    """

    resume: bool = False  # begin nothing new
    skip_failed: bool = False  # continue after a run that fails
    loggers: tuple[str, ...] = ()
    diagnostics: bool = False
    jobs: int = 1  # runs side by side, each in its own process; or workers for the clients of each
    accept_changed_code: bool = False  # continue in a folder that other source began
    executor: str = "cores"  # where runs execute
    cluster: tuple[tuple[str, str], ...] = ()  # resources that a run requests from a cluster
    keep_model: KeepModel = "final"  # of which tasks each run keeps its model
    keep_server_state: bool = True  # what the server needs to continue, next to the model

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

        It only describes runs that execute on other machines.
        """
        return replace(settings, device="cpu") if self.on_cluster else settings

    def device(self, settings: Settings) -> str:
        """Return the device of the runs; the machine that submits them need not have it."""
        is_remote = self.on_cluster and settings.device != "auto"
        return settings.device if is_remote else str(pick_device(settings.device))

    @property
    def threads(self) -> int:
        """Return the threads per run: all of this process, or its share of the cores.

        On a cluster it is the requested number, or one.
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
    number: int = 1  # among the runs of the sweep
    count: int = 1
    # data and weights for a worker
    shared: SharedBenchmark | None = field(default=None, compare=False, repr=False)
    setting_name: str = ""  # folder of the setting where the sweep has several

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
        """Return the label with the run's number among several."""
        return f"run {self.number} of {self.count}, {self.label}" if self.count > 1 else self.label


def is_finished(run: RunSpec) -> bool:
    """Read from the run's folder whether it is finished."""
    folder = run.folder_of_run
    if not (folder / RESULT).is_file() or (folder / FAILURE).is_file():
        return False
    return read_result(folder / RESULT).is_finished
