"""What the runs of one benchmark share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Concludes, Method
from fczoo.core.registry import METHODS
from fczoo.core.types import Scope, Task
from fczoo.data.owned import Owned
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Uplink


@dataclass(frozen=True)
class World:
    """Data, their split over clients, and the frozen backbone: loaded once for all methods and seeds."""

    settings: Settings
    stream: Stream
    partition: Partition
    backbone: Backbone
    train: ImageStore
    test: ImageStore

    def check_labels(self, method: Method) -> None:
        """Raise FczooError where labels come back in later tasks and ``method`` would overwrite them."""
        if method.returning or not any(task.returning for task in self.stream.tasks):
            return
        able = ", ".join(name for name in METHODS.names() if METHODS.get(name).returning)
        problem = (
            f"{method.name} holds that a class belongs to one task, and would overwrite what it has of it "
            "when its labels come back"
        )
        where = "with --tasks domains, --moving or --task-order own"
        raise FczooError(f"{problem}, as they do {where}; these add to it: {able}")

    def check_least(self, method: Method) -> None:
        """Raise FczooError where a task has fewer clients that can upload than a run needs."""
        training, least = method.training(), self.settings.min_clients
        for task in self.stream.tasks if least > 1 else ():
            joined = self.clients(task, training.scope, idle=True)
            holders = [c for c in joined if len(c.index)]
            most = len(holders)
            if training.active_optims(task, 0):
                candidates = holders if self.settings.draw_among == "data" else joined
                most = min(most, self.settings.drawn(len(candidates)))
            elif isinstance(method, Concludes):  # clients that hold exemplars are asked as well
                most = len(joined)
            if 0 < most < least:
                raise FczooError(
                    f"--min-clients is {least}, but at most {most} of the clients can upload in task "
                    f"{task.index + 1} of {method.name}; lower it, or change --participation or --partition"
                )

    def clients(self, task: Task, scope: Scope = "task", idle: bool = False) -> list[Client]:
        """The clients that have something to train on, by the method's ``scope``.

        With ``idle``, all that have joined by then.
        """
        first, present = task.index if scope == "task" else 0, self.partition.present(task.index)
        tasks = [own[:present] for own in self._places[first : task.index + 1]]
        combine = _latest if scope == "latest" else _together
        owned = tasks[0] if scope == "task" else [combine(parts) for parts in zip(*tasks, strict=True)]
        if scope == "pooled":
            owned = [np.unique(np.concatenate(owned))]
        return [
            Client(k, torch.from_numpy(index), partial(self.earlier, k, task, scope))
            for k, index in enumerate(owned)
            if idle or len(index)
        ]

    def unsurveyed(
        self,
        clients: Sequence[Client],
        task: Task,
        scope: Scope,
        asked: Callable[[Task], Collection[int]] | None = None,
    ) -> list[Client]:
        """The clients that have images of which they were not asked yet, without all others.

        Where clients stay in a task, their images come back with their labels; sums must count each once. A
        method that trains on all images so far starts anew and is asked for all. ``asked`` says which clients
        were asked in a task; None: all that had images.
        """
        if not task.returning or scope in ("seen", "pooled"):
            return list(clients)
        told: dict[int, list[torch.Tensor]] = {}
        for before in self.stream.tasks[: task.index] if asked else [self.stream.tasks[task.index - 1]]:
            for client in self.clients(before, scope):
                if asked is None or client.number in asked(before):
                    told.setdefault(client.number, []).append(client.index)
        now = {c.number: c.index for c in self.clients(task, scope, idle=True)}
        found = []
        for client in clients:
            earlier = torch.cat(told.get(client.number, [client.index[:0]]))
            again = now[client.number][torch.isin(now[client.number], earlier)]
            found.append(replace(client, index=client.index[~torch.isin(client.index, again)]))
        return [client for client in found if len(client.index)]

    def held(self, task: Task) -> torch.Tensor:
        """[task.stop] whether any client has had images of each class so far."""
        return self._held[task.index, : task.stop]

    @cached_property
    def _held(self) -> torch.Tensor:
        """[T, C] whether any client has had images of each class by each task; asked for at every answer."""
        labels, classes = self.stream.train.labels, self.stream.tasks[-1].stop
        of_task = [np.bincount(labels[own.positions], minlength=classes) > 0 for own in self._places]
        return torch.from_numpy(np.logical_or.accumulate(of_task))

    @cached_property
    def _places(self) -> tuple[Owned, ...]:
        """The partition by positions in the training store."""
        return tuple(task.within(self.stream.train_index) for task in self.partition.tasks)

    def earlier(self, client: int, task: Task, scope: Scope) -> torch.Tensor:
        """Positions of a client's images of the tasks before, without those that it still has in this one.

        None but for the scope "task".
        """
        tasks = task.index if scope == "task" else 0
        none = np.empty(0, dtype=np.int64)
        met = _together([none, *(own[client] for own in self._places[:tasks])])
        return torch.from_numpy(met[~np.isin(met, self._places[tasks][client])])

    def uplink(self, method: Method, seed: int) -> Uplink:
        """The way from the clients to the server in one run."""
        return Uplink(method, self.settings, seed, self.partition.clients)


def _together(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts one after another; a position of several is where it comes first."""
    joined = np.concatenate(parts)
    _, first = np.unique(joined, return_index=True)
    return joined[np.sort(first)]


def _latest(parts: Sequence[np.ndarray]) -> np.ndarray:
    return next((part for part in reversed(parts) if len(part)), parts[-1])
