"""What a site has of the data, and what the server knows of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import Exchange, Task
from fczoo.data.dataset import Images
from fczoo.data.owned import Owned
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Uplink
from fczoo.federation.world import World
from fczoo.sites.messages import Enrolment


def site_world(settings: Settings, stream: Stream, backbone: Backbone, train: ImageStore, site: int) -> World:
    """The world of one site: all of the stream's training images are its own, and it tests nothing."""
    none = np.empty(0, np.int64)
    tasks = [
        Owned(stream.positions(stream.train, task) if k == site else none for k in range(settings.clients))
        for task in stream.tasks
    ]
    side = train.pixels.shape[-1]
    nothing = ImageStore(Images(np.empty((0, side, side, 3), np.uint8), none), backbone)
    return World(settings, stream, _owned(stream, tasks), backbone, train, nothing)


class FromSites(Uplink):
    """The way up from sites, which protect what they send before it leaves them."""

    def protected(self, made: Sequence[Payload], shared: Tree, exchange: Exchange) -> list[Payload]:
        return list(made)


@dataclass(frozen=True)
class Known(World):
    """What a server knows of its sites' images: how many there are.

    Its training images are blank and numbered at will, so that all that counts images finds them; no pixel,
    label or position of a site's is in it.
    """

    held_by_any: Tensor = field(kw_only=True)  # [C] whether some site may have images of a class

    def held(self, task: Task) -> Tensor:
        return self.held_by_any[: task.stop]

    def uplink(self, method: Method, seed: int) -> Uplink:
        return FromSites(method, self.settings, seed, self.partition.clients)


def server_world(
    settings: Settings,
    stream: Stream,
    backbone: Backbone,
    test: ImageStore,
    enrolments: Sequence[Enrolment],
) -> Known:
    """The server's world: test images of its own, and of the sites what they have said as they enrolled.

    Raises FczooError where no site has an image of a task, or of a class, if they say of which they have.
    """
    count = np.array([enrolment.images for enrolment in enrolments]).T  # [tasks, sites]
    if bare := [t for t, images in enumerate(count.sum(1)) if not images]:
        raise FczooError(f"no site has an image of task {bare[0] + 1}; mend the schedule or its classes")
    held = torch.ones(len(stream.classes), dtype=torch.bool)
    if all(enrolment.classes is not None for enrolment in enrolments):
        held[:] = False
        held[[label for enrolment in enrolments for label in enrolment.classes or ()]] = True
    starts = np.concatenate([[0], count.cumsum()]).tolist()  # in the order of tasks, then of sites
    ranges = [np.arange(start, stop) for start, stop in pairwise(starts)]
    sites = len(enrolments)
    tasks = [Owned(ranges[t * sites : (t + 1) * sites]) for t in range(len(count))]
    labels = np.repeat([task.start for task in stream.tasks], count.sum(1))
    blank = Images(np.zeros((len(labels), 1, 1, 3), np.uint8), labels)
    stream = replace(stream, train=blank, train_index=np.arange(len(labels)))
    known = settings, stream, _owned(stream, tasks), backbone, ImageStore(blank, backbone), test
    return Known(*known, held_by_any=held)


def _owned(stream: Stream, tasks: Sequence[Owned]) -> Partition:
    return Partition(stream.name, "sites", 0, stream.class_order, tuple(tasks))
