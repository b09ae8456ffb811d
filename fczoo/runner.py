"""One run: a method learns the tasks of a stream over simulated clients and is evaluated after each."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .aggregate import make_aggregator
from .backbone import Backbone
from .check import need_data
from .checkpoint import Checkpoint
from .core import Method, Scope, Task
from .data import Stream, make_stream
from .diagnostics import Probe
from .engine import Client
from .images import ImageStore, get_augment
from .options import build
from .partition import Partition, make_partition
from .record import Observer, Result, Silent
from .registry import METHODS
from .rounds import Run
from .settings import DTYPES, Settings, pick_device, reproducible
from .uplink import Uplink
from .weights import load_backbone

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class Bench:
    """What the runs of one benchmark share: loaded once, the same for every method and seed."""

    settings: Settings
    stream: Stream
    partition: Partition
    backbone: Backbone
    train: ImageStore
    test: ImageStore

    @staticmethod
    def open(settings: Settings) -> "Bench":
        """Load data, partition and backbone. Raises FczooError for whatever is missing or does not fit."""
        device, dtype = pick_device(settings.device), DTYPES[settings.precision]
        get_augment(settings.augment)
        s = settings
        need_data(s.dataset, s.root, s.backbone)
        mean, std = s.normalisation
        backbone = load_backbone(s.backbone, image_size=s.image_size, mean=mean, std=std).to(device, dtype)  # decoding takes longer
        stream, partition = open_stream(s)
        train, test = (ImageStore(part, backbone, s.test_crop) for part in (stream.train, stream.test))
        return Bench(settings, stream, partition, backbone, train, test)

    def clients(self, task: Task, scope: Scope = "task", idle: bool = False) -> list[Client]:
        """The clients that have something to train on, by the method's ``scope``; with ``idle``, all that have joined by then."""
        tasks = self.partition.tasks[: task.index + 1] if scope != "task" else self.partition.tasks[task.index : task.index + 1]
        combine = _latest if scope == "latest" else np.concatenate
        owned = [combine(parts) for parts in zip(*tasks, strict=True)][: self.partition.present(task.index)]
        if scope == "pooled":
            owned = [np.unique(np.concatenate(owned))]
        places = [torch.from_numpy(np.searchsorted(self.stream.train_index, index)) for index in owned]
        return [Client(k, place) for k, place in enumerate(places) if idle or len(place)]

    def check(self, method: Method) -> None:
        """Raise FczooError where ``method`` cannot start on this backbone, before anything is run or written."""
        make_aggregator(self.settings.aggregator or method.averaging)
        self.uplink(method, 0).check()
        method.begin_task({}, self.stream.tasks[0], self.backbone, torch.Generator())

    def uplink(self, method: Method, seed: int) -> Uplink:
        """The way from the clients to the server in one run."""
        return Uplink(method, self.settings, seed, self.partition.clients)

    def run(
        self,
        method: Method,
        seed: int = 0,
        observer: Observer | None = None,
        checkpoint: Checkpoint | None = None,
        probe: Probe | None = None,
    ) -> Result:
        """Train ``method`` over all tasks. The same settings and seed give the same result on the same device.

        With ``checkpoint`` the run is saved after every round, and goes on from what was saved there. A ``probe``
        records diagnostics and changes nothing.
        """
        with reproducible(self.settings.deterministic):
            return Run(self, method, seed, observer or Silent(), checkpoint, probe).run()


def _latest(parts: Sequence[np.ndarray]) -> np.ndarray:
    return next((part for part in reversed(parts) if len(part)), parts[-1])


def open_stream(s: Settings, pixels: bool = True) -> tuple[Stream, Partition]:
    """Load the images, or only their labels, and split them. Raises FczooError for whatever is missing or impossible."""
    kept = s.train_per_class, s.test_per_class, s.stored_size
    stream = make_stream(s.dataset, s.root, s.tasks, s.class_order_seed, *kept, s.class_order, pixels)
    return stream, make_partition(stream, s.partition, s.clients, s.partition_seed, s.joining, s.transition)


def run(method: Method, *, seed: int = 0, observer: Observer | None = None, dataset: str = "digits", **settings: Any) -> Result:
    """Run one method: ``fczoo.run(fczoo.create_method("pilora", rank=8), dataset="digits", rounds=2)``.

    ``settings`` are the fields of ``Settings``; those not given follow the data set's defaults. The method's options are
    its own: a warning names those for which the data set has other values.
    """
    fields = type(method).__dataclass_fields__  # type: ignore[attr-defined]
    if other := {k: v for k, v in type(method).tuned.get(dataset, {}).items() if getattr(method, k) == fields[k].default != v}:
        named = ", ".join(f"{k}={v}" for k, v in other.items())
        log.warning("%s has %s on %s; fczoo.create_method(%r, %r) takes the data set's values", method.name, named, dataset, method.name, dataset)
    return Bench.open(Settings.for_dataset(dataset, **settings)).run(method, seed, observer)


def create_method(name: str, dataset: str | None = None, **options: Any) -> Method:
    """Method by name; options beat the method's values for ``dataset``, which beat its defaults."""
    cls = METHODS.get(name)
    return build(cls, name, {**cls.tuned.get(dataset, {}), **options})
