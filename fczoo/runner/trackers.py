"""Experiment trackers behind one small interface, off by default.

They are TensorBoard, Weights & Biases and MLflow, and each needs an extra.
"""

import importlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError, first_line
from fczoo.core.method import Method
from fczoo.core.options import nearest
from fczoo.federation.callbacks import Callback
from fczoo.federation.result import Result


class Logger(Callback, ABC):
    """Callback that sends the numbers of one run to a tracker.

    A tracker that cannot begin raises FczooError. One that fails later is left with a warning: the
    run's own files have every number, and hours of training are worth more than a tracker's copy.
    """

    extra: str  # of the package, and the name after --log

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.folder, self.config = folder, config
        self.step, self.running = 0, False

    @abstractmethod
    def open(self, name: str, config: Mapping[str, Any]) -> None:
        """Start a run called ``name``."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers after ``step`` rounds."""

    @abstractmethod
    def close(self) -> None:
        """Close the finished or failed run."""

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self._send(self.close)
        self.running = False

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        self.step = done
        options = {f"{method.name}.{k}": v for k, v in asdict(method).items()}
        try:
            self.open(f"{method.name} seed {seed}", {**self.config, **options, "seed": seed})
        except Exception as error:
            raise FczooError(f"--log {self.extra} cannot begin: {first_line(error)}") from error
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


class TensorBoard(Logger):
    """Event files in the run's folder."""

    extra = "tensorboard"

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {k}: {v}" for k, v in config.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB(Logger):
    """Project ``fczoo``, or WANDB_PROJECT; WANDB_MODE=offline keeps it on this machine."""

    extra = "wandb"

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fczoo"),
            name=name,
            config=dict(config),
            dir=str(self.folder),
            reinit="finish_previous",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow(Logger):
    """Experiment ``fczoo`` on the server that MLFLOW_TRACKING_URI names."""

    extra = "mlflow"

    def open(self, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self.server = mlflow.MlflowClient()
        existing = self.server.get_experiment_by_name("fczoo")
        experiment = existing.experiment_id if existing else self.server.create_experiment("fczoo")
        self.run = self.server.create_run(experiment, run_name=name).info.run_id
        for key, value in config.items():
            self.server.log_param(self.run, key, value)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self.server.log_metric(self.run, key, value, step=step)

    def close(self) -> None:
        self.server.set_terminated(self.run)


LOGGERS: dict[str, type[Logger]] = {cls.extra: cls for cls in (TensorBoard, WandB, MLflow)}


def check_loggers(names: Sequence[str]) -> None:
    """Raise FczooError for an unknown logger, and for one whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise FczooError(f"no logger is called {name!r}; {nearest(name, list(LOGGERS))}")
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise FczooError(
                f"--log {name} needs the package {name}; pip install 'fczoo[{name}]'"
            ) from error
