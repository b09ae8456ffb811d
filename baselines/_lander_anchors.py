"""Anchors of LANDER (Tran et al., CVPR 2024): one fixed vector per class."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fczoo.baselines._data_free_replay import DataFreeReplay
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.gaussians import class_sums

SPREAD = 0.43  # root mean square of the entries in the released table of text embeddings


@dataclass(frozen=True)
class AnchoredReplay(DataFreeReplay):
    """Base of methods that pull linearly projected features towards one anchor per class."""

    anchors: Literal["random", "etf", "frozen_means"] = option(
        "random",
        "class anchors: random, N(0, 0.43^2) per entry; etf, corners of a randomly rotated "
        "simplex; frozen_means, mean frozen features over all clients",
    )
    anchor_file: str | None = option(
        None,
        "safetensors file with one anchor per class of the data set; none: anchors are made "
        "as the option anchors says",
    )
    anchor_width: int = option(512, "entries per anchor, with anchors=random or etf", low=1)
    bound: Literal["batch", "sample"] = option(
        "batch",
        "hinge on the distance: batch, averaged over the batch (released code); sample, of each "
        "image",
    )
    radius_relative: float = option(
        0.186,
        "radius r divided by the mean squared difference of two anchors; 0.186 is the ratio for "
        "the released text embeddings",
        low=0,
    )
    radius: float | None = option(
        None, "absolute radius r (0.015 with the released table); none: by radius_relative", low=0
    )

    def training(self) -> Training:
        training = super().training()
        optims = {**training.optims, "projection.": self.optim(self.lr)}
        if not self._measures_anchors:
            return replace(training, optims=optims)
        return replace(
            training,
            optims=optims,
            uploads={**training.uploads, "frozen.": per_class("count", "sum")},
            collect_at={*training.collect_at, "task_start"},
        )

    @property
    def _measures_anchors(self) -> bool:
        return self.anchors == "frozen_means" and self.anchor_file is None

    def start_anchors(self, task: Task, dim: int, rng: torch.Generator) -> Tree:
        """Create the anchors, one row per class in order of arrival, and the projection to them.

        Args:
            task: The first task, which knows the order of the classes.
            dim: Feature dimension D.
            rng: Random generator.

        Returns:
            ``anchors`` [C, e], ``radius`` and the linear map ``projection.*``.
        """
        if self.anchor_file is not None:
            label = f"{self.name}.anchor_file"
            table = order_anchors(read_anchors(self.anchor_file, label), task.class_order, label)
        elif self.anchors == "frozen_means":
            table = torch.zeros(task.classes, dim)  # measured as each task begins
        else:
            sizes = task.classes, self.anchor_width
            table = draw_anchors(self.anchors, *sizes, rng, f"{self.name}.anchors")
        width, bound = table.shape[1], dim**-0.5
        return {
            "anchors": table,
            "radius": self._radius_of(table),
            "projection.weight": torch.empty(width, dim).uniform_(-bound, bound, generator=rng),
            "projection.bias": torch.empty(width).uniform_(-bound, bound, generator=rng),
        }

    def _radius_of(self, table: Tensor) -> Tensor:
        """Return the radius r, a scalar; relative radii use the anchors known so far."""
        if self.radius is not None:
            return table.new_tensor(self.radius)
        return self.radius_relative * mean_square_difference(table[table.any(1)])

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # ``frozen_means``, before the first round: sums of the frozen features of each new class.
        sums: Tree = {}
        if phase == "task_end" or self.head_init == "means":
            sums = super().collect(phase, backbone, tree, batch, ctx)
        if phase == "task_start" and self._measures_anchors:
            features = batch.query if self.tune == "head" else backbone(batch.x)
            frozen = class_sums(features, batch, ctx.task)
            sums |= {k.replace("class.", "frozen."): v for k, v in frozen.items()}
        return sums

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Set the anchors of the new classes to their mean features, with ``frozen_means``.

        Args:
            phase: ``task_start``; at ``task_end`` the images are synthesised.
            state: Current state.
            sums: ``frozen.count`` [c] and ``frozen.sum`` [c, D], and those of the base classes.
            ctx: Server context.

        Returns:
            The state with the new ``anchors`` and ``radius``.
        """
        if phase == "task_end" or self.head_init == "means":
            state = super().update_from(phase, state, sums, ctx)
        if phase == "task_start" and self._measures_anchors:
            table = state["anchors"].clone()
            count = sums["frozen.count"][:, None].clamp(min=1)
            table[ctx.task.start : ctx.task.stop] = (sums["frozen.sum"] / count).to(table)
            state = {**state, "anchors": table, "radius": self._radius_of(table)}
        return state

    def anchor_loss(
        self, attached: Tensor, anchors: Tensor, radius: Tensor, batch: Batch
    ) -> Tensor:
        """Compute B = [mean (a - E_y)^2 - r]_+, the hinge on the distance to the anchors.

        Args:
            attached: Features a [B, e] in the space of the anchors.
            anchors: Anchors [B, e] of their classes.
            radius: Mean squared distance r below which B is 0.
            batch: Weights of the images.
        """
        # Released code: the hinge is on the mean over batch and entries, not on each image.
        distance = (attached - anchors).square().mean(1)
        if self.bound == "sample":
            return batch.mean(F.relu(distance - radius))
        return F.relu(batch.mean(distance) - radius)


def read_anchors(path: str, label: str) -> Tensor:
    """Read a table of anchors, one row per class in the data set's own order.

    Args:
        path: safetensors file with one tensor [C, e].
        label: Name of the option for messages.

    Returns:
        The table in float32.

    Raises:
        FczooError: The file cannot be read, or does not hold one finite table.
    """
    try:
        tensors = [*load_file(Path(path)).values()]
    except (OSError, SafetensorError) as error:
        raise FczooError(
            f"{label} names {path}, which cannot be read: {first_line(error)}; give a safetensors "
            "file with one row per class"
        ) from error
    if len(tensors) != 1 or tensors[0].dim() != 2 or not tensors[0].isfinite().all():
        raise FczooError(
            f"{label} names {path}, which does not contain a single table [classes, width] of "
            "finite numbers; write one row per class"
        )
    return tensors[0].float()


def order_anchors(table: Tensor, order: tuple[int, ...], label: str) -> Tensor:
    """Return the rows of a table in the order in which classes arrive.

    Args:
        table: One row per class, in the data set's own order [C, e].
        order: Original label of each class in order of arrival; empty: the order of the table.
        label: Name of the option for messages.

    Raises:
        FczooError: A class has no row.
    """
    if order and max(order) >= len(table):
        raise FczooError(
            f"{label} has {len(table)} rows, but none for class {max(order)} of the data set, "
            "counted from 0; write one row per class"
        )
    return table[list(order)] if order else table


def draw_anchors(
    kind: Literal["random", "etf"], classes: int, width: int, rng: torch.Generator, label: str
) -> Tensor:
    """Draw a table of anchors; its entries have the scale of the released text embeddings.

    Args:
        kind: Normal entries, or a simplex (equiangular tight frame) in a random rotation.
        classes: Number of classes C.
        width: Entries e of an anchor.
        rng: Random generator.
        label: Name of the option for messages.

    Returns:
        The table [C, e].

    Raises:
        FczooError: A simplex of this many classes needs more entries.
    """
    if kind == "random":
        return SPREAD * torch.randn(classes, width, generator=rng)
    if classes > width:
        raise FczooError(
            f"{label}=etf needs at least {classes} entries per anchor, one per class, but "
            f"anchor_width is {width}; raise anchor_width, or use {label}=random"
        )
    basis = torch.linalg.qr(torch.randn(width, classes, generator=rng)).Q  # orthonormal columns
    rows = basis.mT - basis.mean(1)
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    anchors: Tensor = SPREAD * width**0.5 * rows / lengths
    return anchors


def mean_square_difference(table: Tensor) -> Tensor:
    """Compute the mean squared difference of two anchors, mean over all pairs.

    Args:
        table: Anchors [n, e].

    Returns:
        A scalar; 0 for fewer than two anchors.
    """
    if len(table) < 2:
        return table.new_zeros(())
    return 2 * (table - table.mean(0)).square().sum() / ((len(table) - 1) * table.shape[1])
