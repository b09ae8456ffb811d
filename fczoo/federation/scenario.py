"""Scenario: settings, data, partition and backbone that the runs of one benchmark share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.options import plural
from fczoo.core.registry import METHODS
from fczoo.core.training import Scope
from fczoo.core.types import EndsTasks, Task
from fczoo.data.client_index import ClientIndex
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.client_devices import ClientDevices, read_devices
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Uplink


@dataclass(frozen=True)
class Scenario:
    """Settings, data with their tasks and their partition over clients, and the frozen backbone.

    All are loaded once for all methods and seeds.
    """

    settings: Settings
    stream: Stream
    partition: Partition
    backbone: Backbone
    train: ImageStore
    test: ImageStore
    sees_clients: ClassVar[bool] = True  # False: the server does not know what clients store

    def check_labels(self, method: Method) -> None:
        """Raise FczooError if labels return in later tasks and ``method`` would overwrite them."""
        if method.supports_recurring_classes or not any(
            task.returning for task in self.stream.tasks
        ):
            return
        supporting_methods = ", ".join(
            name for name in METHODS.names() if METHODS.get(name).supports_recurring_classes
        )
        raise FczooError(
            f"{method.name} does not support labels that return in later tasks (--tasks domains, "
            f"--blurry, --moving or --task-order own); choose {supporting_methods}"
        )

    def check_min_clients(self, method: Method) -> None:
        """Raise FczooError if fewer clients than ``min_clients`` can upload in a task."""
        training, min_clients = method.training(), self.settings.min_clients
        for task in self.stream.tasks if min_clients > 1 else ():
            members = self.clients(task, training.data_scope, idle=True)
            holders = [c for c in members if len(c.index)]
            upload_count = len(holders)
            if training.active_optims(task, 0):
                candidates = holders if self.settings.draw_among == "data" else members
                upload_count = min(upload_count, self.settings.participant_count(len(candidates)))
            elif isinstance(method, EndsTasks):  # clients that hold exemplars are asked as well
                upload_count = len(members)
            if 0 < upload_count < min_clients:
                raise FczooError(
                    f"--min-clients is {min_clients}, but in task {task.index + 1} of "
                    f"{method.name} at most {plural(upload_count, 'client')} can upload; lower it, "
                    "or change --participation or --partition"
                )

    def clients(self, task: Task, scope: Scope = "task", idle: bool = False) -> list[Client]:
        """Return the clients that have training images in the method's ``data_scope``.

        With ``idle``, all clients that have joined by ``task``.
        """
        first, count = task.index if scope == "task" else 0, self.partition.client_count(task.index)
        tasks = [task_index[:count] for task_index in self._store_indices[first : task.index + 1]]
        combine = _latest_task_images if scope == "latest" else _union_of_tasks
        client_indices = (
            tasks[0] if scope == "task" else [combine(parts) for parts in zip(*tasks, strict=True)]
        )
        if scope == "pooled":
            client_indices = [np.unique(np.concatenate(client_indices))]
        return [
            Client(k, torch.from_numpy(index), partial(self.earlier, k, task, scope))
            for k, index in enumerate(client_indices)
            if idle or len(index)
        ]

    def without_counted_images(
        self,
        clients: Sequence[Client],
        task: Task,
        scope: Scope,
        senders_of: Callable[[Task], Collection[int]] | None = None,
    ) -> list[Client]:
        """Return the clients with images that no statistics count yet, with only these images.

        If clients stay in a task, their images and labels return; sums must count each image once.
        A method that trains on all images so far collects over all of them again. ``senders_of``
        returns the clients that sent statistics in a task; None: all clients with images.
        """
        if not task.returning or scope in ("seen", "pooled"):
            return list(clients)
        earlier_indices: dict[int, list[torch.Tensor]] = {}
        for earlier_task in (
            self.stream.tasks[: task.index] if senders_of else [self.stream.tasks[task.index - 1]]
        ):
            for client in self.clients(earlier_task, scope):
                if senders_of is None or client.number in senders_of(earlier_task):
                    earlier_indices.setdefault(client.number, []).append(client.index)
        task_indices = {c.number: c.index for c in self.clients(task, scope, idle=True)}
        new_clients = []
        for client in clients:
            earlier = torch.cat(earlier_indices.get(client.number, [client.index[:0]]))
            counted = task_indices[client.number][torch.isin(task_indices[client.number], earlier)]
            new_clients.append(
                replace(client, index=client.index[~torch.isin(client.index, counted)])
            )
        return [client for client in new_clients if len(client.index)]

    def classes_with_images(self, task: Task) -> torch.Tensor:
        """Return [task.stop] whether any client has had images of each class so far."""
        return self._classes_with_images[task.index, : task.stop]

    def classes_of(self, client: int, task: Task) -> torch.Tensor:
        """Return [task.stop] whether a client has had images of each class so far."""
        owners, labels = self.images_by_client(task)
        return torch.from_numpy(np.bincount(labels[owners == client], minlength=task.stop) > 0)

    @cached_property
    def _classes_with_images(self) -> torch.Tensor:
        """Return [T, C] whether any client has had images of each class by each task."""
        labels, classes = self.stream.train.labels, self.stream.tasks[-1].classes
        of_task = [
            np.bincount(labels[task_index.positions], minlength=classes) > 0
            for task_index in self._store_indices
        ]
        return torch.from_numpy(np.logical_or.accumulate(of_task))

    @cached_property
    def _store_indices(self) -> tuple[ClientIndex, ...]:
        """Return the partition by positions in the training store."""
        return tuple(task.within(self.stream.train_index) for task in self.partition.tasks)

    def earlier(self, client: int, task: Task, scope: Scope) -> torch.Tensor:
        """Return positions of a client's images of earlier tasks that are not in this task.

        The result is empty for scopes other than "task".
        """
        tasks = task.index if scope == "task" else 0
        none = np.empty(0, dtype=np.int64)
        earlier_indices = [task_index[client] for task_index in self._store_indices[:tasks]]
        seen_images = _union_of_tasks([none, *earlier_indices])
        is_current = np.isin(seen_images, self._store_indices[tasks][client])
        return torch.from_numpy(seen_images[~is_current])

    def images_by_client(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """Return owner and label [n] of the clients' training images of all tasks so far.

        An image counts once per client, even if it returns in a later stage.
        """
        tasks, count = self._store_indices[: task.index + 1], len(self.stream.train.labels)
        owners = [np.repeat(np.arange(len(task_index)), task_index.sizes) for task_index in tasks]
        images = [task_index.positions.astype(np.int64) for task_index in tasks]
        keys = np.unique(np.concatenate(owners) * count + np.concatenate(images))
        return keys // count, self.stream.train.labels[keys % count]

    @cached_property
    def devices(self) -> ClientDevices | None:
        """Return the clients' devices; None without ``--client-devices``."""
        spec = self.settings.client_devices
        return read_devices(spec, self.partition.seed) if spec else None

    def uplink(self, method: Method, seed: int) -> Uplink:
        """Create the uplink of one run; with an attack, too few valid uploads do not end it."""
        s, ends_run = self.settings, not self.settings.attack
        return Uplink(method, s, seed, self.partition.clients, self.backbone, ends_run=ends_run)


def _union_of_tasks(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate parts; a position in several parts is kept only where it first occurs."""
    positions = np.concatenate(parts)
    _, first = np.unique(positions, return_index=True)
    return positions[np.sort(first)]


def _latest_task_images(parts: Sequence[np.ndarray]) -> np.ndarray:
    return next((part for part in reversed(parts) if len(part)), parts[-1])
