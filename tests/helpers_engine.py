"""A toy method whose training can be worked out by hand, and whole runs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fczoo import Batch, Benchmark, Context, Method, Optim, Task, Training, Tree, whole_tensors
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.run import FederatedRun

TASK = Task(0, 0, 2, 2, 1)
DESCENT = Optim("sgd", lr=0.1)
STATISTICS = {name: whole_tensors("counts") for name in ("seen", "labels", "count", "weighted")}


@dataclass(frozen=True)
class Toy(Method):
    """Linear regression of the label on two given features: loss = mean (w.q - y)^2."""

    name = "toy"
    optim: Optim = DESCENT
    clip: float | None = None

    def __post_init__(self) -> None:
        """Skip the check of the options, as this method is not for users."""

    def training(self) -> Training:
        return Training({"w": self.optim}, ["query"], STATISTICS, clip_norm=self.clip)

    def begin_task(self, state, task, backbone, rng) -> Tree:
        return {"w": torch.zeros(2, dtype=torch.float64)}

    def loss(self, backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        return batch.mean((batch.query @ train["w"] - batch.y).square()), {
            "seen": batch.w.sum(),
            "labels": (batch.y * batch.w).sum(),
        }

    def predict(self, backbone, state, batch: Batch, task: Task) -> Tensor:
        return (batch.query[:, :1] - batch.query[:, :1]).expand(-1, task.stop) + torch.arange(
            task.stop
        )


def run_to_end(
    bench: Benchmark, method: Method, checkpoint: Checkpoint | None = None
) -> FederatedRun:
    """Return a run that has ended."""
    run = FederatedRun(bench, method, 0, Callback(), checkpoint, None)
    run.run()
    return run


def same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> bool:
    """Return whether two trees have the same names and close values."""
    close = [torch.allclose(v, theirs[k], rtol=tolerance, atol=tolerance) for k, v in ours.items()]
    return all(close) and ours.keys() == theirs.keys()
