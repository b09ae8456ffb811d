"""Data of a site, the server's view of them, and the server's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.files import convert_json, read_json, write_json
from fczoo.core.method import Method
from fczoo.core.types import Task
from fczoo.data.client_index import ClientIndex
from fczoo.data.dataset import Images
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.scenario import Scenario
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Uplink
from fczoo.sites.federation_config import check_terms
from fczoo.sites.messages import Enrolment


def site_scenario(
    settings: Settings, stream: Stream, backbone: Backbone, train: ImageStore, site: int
) -> Scenario:
    """Create the scenario of one site, which has all training images and no test image.

    Args:
        settings: Settings of the run.
        stream: Stream of the site's images.
        backbone: Frozen backbone.
        train: Training images.
        site: Number of the site.

    Returns:
        The scenario.
    """
    none = np.empty(0, np.int64)
    tasks = [
        ClientIndex(
            stream.positions(stream.train, task) if k == site else none
            for k in range(settings.clients)
        )
        for task in stream.tasks
    ]
    side = train.pixels.shape[-1]
    nothing = ImageStore(Images(np.empty((0, side, side, 3), np.uint8), none), backbone)
    return Scenario(settings, stream, _partition(stream, tasks), backbone, train, nothing)


@dataclass(frozen=True)
class ServerView(Scenario):
    """Scenario of the server, which knows only the number of each site's images.

    Its training images are blank, for code that counts images. Each site has as many of a task's
    blank images as it reports, from the first one on. Sites share them, so memory depends only on
    the largest site. The scenario contains no pixel, label or position of a site's image.
    """

    sees_clients: ClassVar[bool] = False
    held_by_any: Tensor = field(kw_only=True)  # [C] whether some site may have images of a class

    def uplink(self, method: Method, seed: int) -> Uplink:
        """Create the uplink; ``SitesRun`` handles too few valid uploads."""
        return replace(super().uplink(method, seed), ends_run=False)

    def classes_with_images(self, task: Task) -> Tensor:
        return self.held_by_any[: task.stop]


def server_scenario(
    settings: Settings,
    stream: Stream,
    backbone: Backbone,
    test: ImageStore,
    enrolments: Sequence[Enrolment],
) -> ServerView:
    """Create the server's scenario from its test images and the sites' enrolments.

    Args:
        settings: Settings of the run.
        stream: Classes, tasks and test images.
        backbone: Frozen backbone.
        test: Test images.
        enrolments: Enrolment of each site.

    Returns:
        The scenario.

    Raises:
        FczooError: No site has an image of some task.
    """
    count = np.array([enrolment.images for enrolment in enrolments]).T  # [tasks, sites]
    if empty_tasks := [t for t, images in enumerate(count.sum(1)) if not images]:
        raise FczooError(
            f"no site has an image of task {empty_tasks[0] + 1}; check the class folders of the "
            "sites, or agree on a schedule without its classes"
        )
    class_mask = torch.ones(len(stream.classes), dtype=torch.bool)
    if all(enrolment.classes is not None for enrolment in enrolments):
        class_mask[:] = False
        class_mask[[label for enrolment in enrolments for label in enrolment.classes or ()]] = True
    max_counts = count.max(1)  # [tasks]
    starts = np.concatenate([[0], max_counts.cumsum()[:-1]]).tolist()
    tasks = [
        ClientIndex(start + np.arange(images, dtype=np.int32) for images in of_task)
        for start, of_task in zip(starts, count.tolist(), strict=True)
    ]
    labels = np.repeat([task.start for task in stream.tasks], max_counts)
    blank = Images(np.zeros((len(labels), 1, 1, 3), np.uint8), labels)
    stream = replace(stream, train=blank, train_index=np.arange(len(labels)))
    scenario_arguments = (
        settings,
        stream,
        _partition(stream, tasks),
        backbone,
        ImageStore(blank, backbone),
        test,
    )
    return ServerView(*scenario_arguments, held_by_any=class_mask)


def _partition(stream: Stream, tasks: Sequence[ClientIndex]) -> Partition:
    return Partition(stream.name, "sites", 0, stream.class_order, tuple(tasks))


RUN_START_FILE, CHECKPOINT = "begun.json", "checkpoint.safetensors"


class RunStart(msgspec.Struct):
    """State of a federation at the start of a run."""

    run: str  # name of the run
    terms: dict[str, Any]  # see ``terms_of``
    enrolments: list[Enrolment]


class ServerFolder:
    """Folder of a server, with the latest checkpoint and the record of the run's start."""

    def __init__(self, folder: Path):
        self.path = folder / RUN_START_FILE
        self.checkpoint = Checkpoint(folder / CHECKPOINT)

    def run(self, terms: Mapping[str, Any]) -> str | None:
        """Return the name of the run to resume; None without a checkpoint.

        Args:
            terms: Terms of the server, from ``terms_of``.

        Raises:
            FczooError: The run started with other terms.
        """
        if not self.checkpoint.path.exists():
            return None
        first_start = self._read()
        try:
            check_terms(terms, first_start.terms, "in the resumed run")
        except FczooError as error:
            raise FczooError(f"{error}, or {self._how_to_restart}") from error
        return first_start.run

    def check_enrolments(self, names: Sequence[str], run_start: RunStart, resumes: bool) -> None:
        """Record the enrolments of a new run; check those of a resumed one.

        Args:
            names: Names of the sites.
            run_start: Name, terms and enrolments of the run.
            resumes: Whether the run is resumed.

        Raises:
            FczooError: A site's enrolment differs from that at the start of the run.
        """
        if not resumes:
            write_json(self.path, msgspec.to_builtins(run_start))
            return
        for name, old_enrolment, new_enrolment in zip(
            names, self._read().enrolments, run_start.enrolments, strict=True
        ):
            if old_enrolment != new_enrolment:
                problem = f"the images of site {name} have changed since the run started"
                raise FczooError(f"{problem}; restore them, or {self._how_to_restart}")

    @property
    def _how_to_restart(self) -> str:
        return f"remove {self.checkpoint.path} to restart the run"

    def _read(self) -> RunStart:
        try:
            return convert_json(read_json(self.path, "record of a run's start"), RunStart)
        except ValueError as error:
            raise FczooError(
                f"{self.path} is not the record of a run's start: {error}; {self._how_to_restart}"
            ) from error
