"""Optional parts of a method's interface, each a protocol that a method implements as a whole."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.tree import Tree
from fczoo.core.types import (
    Batch,
    Context,
    Evidence,
    Finding,
    LocalData,
    Task,
)


@runtime_checkable
class HasTeacher(Protocol):
    """A method with a teacher that is fixed during a task."""

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        """Return the teacher's outputs [B, C], which ``loss`` gets as ``batch.teacher``.

        Computed without gradients; stored per image where the view of the images is fixed.

        Args:
            backbone: Frozen backbone.
            shared: The server's broadcast.
            batch: Training images.
            task: The current task.
        """


@runtime_checkable
class HasClientMemory(Protocol):
    """A method whose clients keep something from round to round; they train one by one."""

    def before_training(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Return the client's memory before it trains.

        Args:
            backbone: Frozen backbone.
            data: The client's images.
            ctx: Context with the memory of the last round.
        """

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the client's memory after training, and uploads in addition to ``make_upload``.

        Args:
            backbone: Frozen backbone.
            train: The client's trained tensors.
            sums: Sums of ``loss`` and ``collect``.
            data: The client's images.
            ctx: Context with the memory that ``before_training`` returned. The client keeps that
                memory if its training fails.
        """


@runtime_checkable
class EndsTasks(Protocol):
    """A method whose clients update their memory after the rounds of a task.

    Sums that they upload reach the server by ``update_from("after_rounds", ...)``.
    """

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the client's memory after a task, and sums that it uploads, if any.

        Called for all clients that have images of the task or exemplars.

        Args:
            backbone: Frozen backbone.
            data: The client's images.
            ctx: Context with the earlier memory and the state after the last round (``shared``).
        """


@runtime_checkable
class Diagnoses(Protocol):
    """A method that can explain its results by its own numbers."""

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        """Return records by their kind.

        Called with the uploads of a task's last round, and once more at the end of the task.

        Args:
            evidence: State, uploads, backbone and test images.
        """


OPTIONAL = {
    protocol.__name__: sorted(name for name in vars(protocol) if not name.startswith("_"))
    for protocol in (HasTeacher, HasClientMemory, EndsTasks, Diagnoses)
}
"""Optional protocol -> the functions that make it up."""
