"""The types that pass between methods, the engine and the server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fczoo.core.tree import Tree

Moment = Literal["begin", "end"]

Scope = Literal["task", "latest", "seen", "pooled"]
"""Images of a client: its own of the task; its own of all tasks so far; everybody's of all tasks so far, in one place."""


class Batch(NamedTuple):
    """One mini-batch of one client. Padding rows have weight 0 and repeat a real row."""

    x: Tensor  # [B, 3, H, W] normalised images; [B, 0] for a method that reads only frozen features
    y: Tensor  # [B] labels in order of arrival
    w: Tensor  # [B] 1 = real sample, 0 = padding
    q: Tensor  # [B, D] feature of the frozen backbone; [B, 0] for a method that does not ask for it
    t: Tensor = torch.empty(
        0, 0
    )  # [B, C] what the method's teacher says of the same view; [B, 0] without a teacher
    n: Tensor = torch.empty(0)  # [C] images of each class on which the client trains; [0] outside of training

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average of a [B] tensor over the real samples. Every loss averages through this."""
        return (per_sample * self.w).sum() / self.w.sum().clamp(min=1)


@dataclass(frozen=True)
class Task:
    """Classes are numbered in order of arrival, so a task is a range of labels."""

    index: int
    start: int  # first new class
    stop: int  # one past the last class seen so far
    classes: int  # over all tasks
    count: int  # number of tasks

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Context:
    """What a client knows besides its batch: where the run stands and what the server broadcast."""

    task: Task
    round: int  # within the task
    rounds: int  # per task
    shared: Tree  # all that the server broadcast, trained tensors as the round begins included; read-only
    memory: Tree = field(
        default_factory=dict
    )  # what this client keeps from round to round; see Method.prepare


@dataclass(frozen=True)
class Optim:
    """How one group of tensors is trained on a client. Optimizers are made anew in every round."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    schedule: str = "constant"  # a key of fczoo.schedules.SCHEDULES


class LocalData(Protocol):
    """A client's own images, by their positions in the training store."""

    @property
    def index(self) -> Tensor:
        """Positions [n] of its images of the current task."""

    def labels(self, index: Tensor) -> Tensor: ...
    def batches(self, index: Tensor) -> Iterator[Batch]:
        """The test view of some images, in order."""


class ServerAggregator(Protocol):
    """Pure function from the payloads of one round to one tree. Payloads carry ``num_samples`` and ``client``."""

    def __call__(self, payloads: Sequence[Tree], /) -> Tree: ...


class Partitioner(Protocol):
    """Pure function from the labels of one task to one array of positions a client.

    One with an attribute ``scope = "dataset"`` gets all labels at once, before they are cut into tasks; one with
    ``disjoint = False`` may give an image to several clients or to none.
    """

    def __call__(self, labels: np.ndarray, clients: int, rng: np.random.Generator, /) -> list[np.ndarray]: ...
