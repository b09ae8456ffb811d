"""What a run leaves behind and whom it tells."""

import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from . import __version__
from .core import Method


@dataclass
class Result:
    """What a run found out. ``accuracy[t][i]``: percent on task i after task t."""

    method: str
    options: dict[str, Any]
    settings: dict[str, Any]
    seed: int
    backbone: dict[str, Any]
    partition: dict[str, Any]
    class_order: list[int]
    task_sizes: list[int]
    test_counts: list[int]
    trained_scalars: int = 0
    remark: str = ""  # what a reader must know of the method as it ran
    accuracy: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0  # all uploads
    bytes_down: int = 0  # all broadcasts; a tensor that a client already has is not sent again
    client_rounds: int = 0  # uploads
    seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes
    versions: dict[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Is told how a run gets on."""

    def start(self, method: Method, seed: int, clients: int, rounds: int) -> None: ...
    def client(self, task: int, round: int, loss: float) -> None: ...
    def round(self, record: dict[str, Any]) -> None: ...
    def task(self, result: Result) -> None: ...


class Silent:
    """The observer that says nothing."""

    def start(self, method: Method, seed: int, clients: int, rounds: int) -> None:
        """A run begins: ``clients`` clients, ``rounds`` rounds over all tasks."""

    def client(self, task: int, round: int, loss: float) -> None:
        """A client has trained."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""

    def task(self, result: Result) -> None:
        """A task is over and evaluated."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest resident set of this process so far and, on CUDA, of the allocator since the run began; bytes."""
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {**peak, "cuda": torch.cuda.max_memory_allocated()} if device.type == "cuda" else peak


def versions() -> dict[str, str]:
    """Versions that can change a number."""
    import platform

    import numpy
    import timm
    import torchvision

    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "numpy": numpy}
    return {"fczoo": __version__, "python": platform.python_version(), **{k: m.__version__ for k, m in modules.items()}}
