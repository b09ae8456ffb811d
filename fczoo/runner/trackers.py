"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases and MLflow.

They are off by default, and each needs an extra of the package.
"""

import hashlib
import importlib
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import encode_json
from fczoo.core.method import Method
from fczoo.core.options import nearest
from fczoo.federation.callbacks import Callback
from fczoo.federation.result import Result
from fczoo.reports.runs import effective_settings

MAX_NAME_LENGTH = 128  # characters of a name in W&B
MAX_TAG_LENGTH = 64  # characters of a tag in W&B
REPORT = "report"  # group and job of the tracker's run with the tables of all runs
TAGS = ("dataset", "partition", "backbone", "protocol")  # settings that become tags


class Logger(Callback, ABC):
    """Callback that sends the metrics of one run to a tracker.

    A tracker that cannot start raises FczooError. If it fails later, a warning is logged and the
    run continues, since the run's own files have all metrics.
    """

    extra: str  # name of the package's extra, and of the tracker in --log

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.folder, self.config = folder, config
        self.step, self.running = 0, False
        self.group, self.job, self.tags = "", "", tuple[str, ...]()

    @abstractmethod
    def open(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run called ``name`` with ``self.group``, ``self.job`` and ``self.tags``."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics after ``step`` rounds."""

    @abstractmethod
    def close(self) -> None:
        """Close the finished or failed run."""

    def store(self, kind: str, files: Sequence[Path]) -> None:
        """Store files of a kind, such as ``model``; do nothing if the tracker stores no files."""

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self._send(self.close)
        self.running = False

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        self.step = done
        own_options = asdict(method)
        self.group, self.job = group_name(method.name, own_options, self.config), f"seed {seed}"
        self.tags = (method.name, *_tags(self.config))
        options = {f"{method.name}.{k}": v for k, v in own_options.items()}
        self._begin(f"{method.name} seed {seed}", {**self.config, **options, "seed": seed})

    def start_report(self, name: str) -> None:
        """Start a run for the tables and figures of all runs of a command.

        Args:
            name: Name of the run.
        """
        self.group = self.job = REPORT
        self.tags = tuple(_tags(self.config))
        self._begin(name, self.config)

    def _begin(self, name: str, config: Mapping[str, Any]) -> None:
        try:
            self.open(name, config)
        except Exception as error:
            raise FczooError(f"--log {self.extra} cannot start: {first_line(error)}") from error
        self.running = True

    def round(self, record: dict[str, Any]) -> None:
        self.step += 1
        self._send(
            self.log,
            {
                k: record[k]
                for k in ("loss", "bytes_up", "bytes_down", "seconds", "accuracy")
                if record.get(k) is not None
            },
            self.step,
        )

    def task(self, result: Result) -> None:
        tasks = {f"task {i + 1}": a for i, a in enumerate(result.accuracy[-1])}
        self._send(self.log, {**result.metrics, **tasks}, self.step)

    def finish(self, files: Mapping[str, Sequence[Path]]) -> None:
        """Store the final tables, figures and model.

        Args:
            files: Files by kind.
        """
        for kind, paths in files.items():
            self._send(self.store, kind, paths)

    def _send(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self.running:
            return
        try:
            call(*arguments)
        except Exception as error:
            self.running = False
            logging.getLogger(__name__).warning(
                "--log %s stops after round %d: %s", self.extra, self.step, error
            )


def group_name(method: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the group name of runs that differ only in their seeds.

    Args:
        method: Name of the method.
        options: Its options.
        settings: Settings of the run as plain values.

    Returns:
        Method, data set, partition, and a hash of all options and settings that affect results.
    """
    content = [dict(options), effective_settings(settings)]
    key = hashlib.sha256(encode_json(content).encode()).hexdigest()[:8]
    words = [method, *(str(settings[k]) for k in ("dataset", "partition") if k in settings)]
    return f"{' '.join(words)[: MAX_NAME_LENGTH - 9]} {key}"


def _tags(settings: Mapping[str, Any]) -> list[str]:
    words = [str(settings[name]) for name in TAGS if settings.get(name)]
    return [word[:MAX_TAG_LENGTH] for word in dict.fromkeys(words)]


class TensorBoard(Logger):
    """Logger that writes event files into the run's folder.

    It stores no model, which is in this folder already.
    """

    extra = "tensorboard"

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {k}: {v}" for k, v in config.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def store(self, kind: str, files: Sequence[Path]) -> None:
        for path in files:
            if kind == "tables" and path.suffix == ".md":
                self.writer.add_text(path.stem, path.read_text(encoding="utf-8"), self.step)
            elif path.suffix == ".png":
                from matplotlib.image import imread

                image = imread(path)[..., :3]
                self.writer.add_image(path.stem, image, self.step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class WandB(Logger):
    """Logger for Weights & Biases, project ``fczoo`` or WANDB_PROJECT.

    WANDB_MODE=offline sends nothing. The variables WANDB_NAME, WANDB_RUN_GROUP, WANDB_JOB_TYPE and
    WANDB_TAGS take precedence.
    """

    extra = "wandb"

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fczoo"),
            name=_unless_set("WANDB_NAME", name),
            group=_unless_set("WANDB_RUN_GROUP", self.group or None),
            job_type=_unless_set("WANDB_JOB_TYPE", self.job or None),
            tags=_unless_set("WANDB_TAGS", list(self.tags) or None),
            config=dict(config),
            dir=str(self.folder),
            reinit="finish_previous",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def store(self, kind: str, files: Sequence[Path]) -> None:
        import wandb

        title = f"{self.group} {self.job}"[: MAX_NAME_LENGTH - len(kind) - 1]
        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", f"{title} {kind}"), type=kind)
        for path in files:
            artifact.add_file(str(path), name=path.name)
        self.run.log_artifact(artifact)

    def close(self) -> None:
        self.run.finish()


def _unless_set(variable: str, value: Any) -> Any:
    """Return ``value``, or None if the variable is set, so that W&B reads it."""
    return None if os.environ.get(variable) else value


class MLflow(Logger):
    """Logger for MLflow, on the server of MLFLOW_TRACKING_URI.

    The experiment is MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else ``fczoo``. The name of a
    run is MLFLOW_RUN_NAME, else its method and seed.
    """

    extra = "mlflow"

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self.server = mlflow.MlflowClient()
        tags = {"group": self.group, "job_type": self.job, "tags": ", ".join(self.tags)}
        self.run = self.server.create_run(
            self._experiment(),
            run_name=os.environ.get("MLFLOW_RUN_NAME") or name,
            tags={key: value for key, value in tags.items() if value},
        ).info.run_id
        for key, value in config.items():
            self.server.log_param(self.run, key, value)

    def _experiment(self) -> str:
        """Return the ID of the experiment; create it if the name is new."""
        name, number = map(os.environ.get, ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"))
        if number and not name:
            return str(self.server.get_experiment(number).experiment_id)
        existing = self.server.get_experiment_by_name(name or "fczoo")
        if existing is None:
            return str(self.server.create_experiment(name or "fczoo"))
        if number and number != existing.experiment_id:
            raise FczooError(
                f"MLFLOW_EXPERIMENT_ID is {number}, but experiment {name} has ID "
                f"{existing.experiment_id}; unset one of the two"
            )
        return str(existing.experiment_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.server.log_metric(self.run, key, value, step=step)

    def store(self, kind: str, files: Sequence[Path]) -> None:
        for path in files:
            self.server.log_artifact(self.run, str(path), kind)

    def close(self) -> None:
        self.server.set_terminated(self.run)


LOGGERS: dict[str, type[Logger]] = {cls.extra: cls for cls in (TensorBoard, WandB, MLflow)}


def check_loggers(names: Sequence[str]) -> None:
    """Raise FczooError if a logger is unknown or its package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise FczooError(f"no tracker is called {name!r}; {nearest(name, list(LOGGERS))}")
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise FczooError(
                f"--log {name} needs the package {name}; pip install 'fczoo[{name}]'"
            ) from error
