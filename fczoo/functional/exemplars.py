"""Images of finished tasks that a client keeps, as positions in its training data.

``exemplar.index`` of its memory: the images that it keeps, class by class in order of choice.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData, ServerContext, Training
from fczoo.functional.herding import herding, residual_herding

NONE = torch.empty(0, dtype=torch.int64)  # positions of no image

Choose = Callable[[Tensor, int], Tensor]
"""(positions [n] of the images of a class, number) -> the chosen positions, in order of choice."""

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class Rehearsal(Method):
    """Base of methods whose clients keep images of finished tasks and train on them beside the new ones.

    Once a task's rounds are over, every client shares its room equally among all classes that it has ever
    held: lists of earlier classes are shortened from their end, images of new classes are chosen under the
    final global model.
    """

    memory: int = option(
        200, "images a client may keep (the papers' 2000, shared by ten clients as in FPPL)", low=0
    )
    choice: Literal["herding", "raw", "residual", "first"] = option(
        "herding",
        "how a client chooses them: herding of features of length 1, or of features as they are; herding by "
        "the residual as in the code of PODNet, AFC and DyTox; or the first images of each class",
    )

    @abstractmethod
    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """The features [B, D] by which images are chosen, with the tensors of ``tree``."""

    def rehearsing(self, training: Training) -> Training:
        """What a method trains, with its exemplars."""
        return replace(training, exemplars="exemplar.index")

    def remark(self) -> str:
        return "; ".join(filter(None, [f"keeps {self.memory} images a client", super().remark()]))

    def conclude(self, backbone: Backbone, data: LocalData, ctx: Context) -> tuple[Tree, Tree]:
        """Choose exemplars of the new classes; nothing is sent."""
        kept = ctx.memory.get("exemplar.index", NONE)
        held = data.labels(torch.cat([data.index, data.earlier])).unique()
        share = self.memory // len(held)
        if 0 < self.memory < len(held):
            warn_once(
                f"{self.name}.memory={self.memory} has no room for one image of each of a client's "
                f"{len(held)} classes: it keeps none"
            )

        def choose(index: Tensor, number: int) -> Tensor:
            if self.choice == "first":
                return index[:number]
            found = torch.cat([self.features(backbone, ctx.shared, batch) for batch in data.batches(index)])
            if self.choice == "residual":
                return index[residual_herding(found, number)]
            return index[herding(found, number, normalise=self.choice == "herding")]

        return {**ctx.memory, "exemplar.index": with_exemplars(kept, data.index, data, share, choose)}, {}

    def concluded(self, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        return state


def exemplar_sums(index: Tensor, data: LocalData, features: Callable[[Batch], Tensor], classes: int) -> Tree:
    """``kept.count`` [c], ``kept.sum`` [c, D]: features of length 1 of the images at ``index``, by class.

    ``classes``: c, those seen so far. ``features(batch)`` [B, D].
    """
    sums: Tree = {}
    for batch in data.batches(index):
        found = F.normalize(features(batch), dim=-1)
        hot = F.one_hot(batch.y, classes).to(found)
        for name, part in {"kept.count": hot.sum(0), "kept.sum": hot.mT @ found}.items():
            sums[name] = sums[name] + part if name in sums else part
    return sums


@cache
def warn_once(text: str) -> None:
    """Log a warning that is the same in every round and for every client."""
    log.warning(text)


def with_exemplars(kept: Tensor, new: Tensor, data: LocalData, share: int, choose: Choose) -> Tensor:
    """Positions of the images to keep, at most ``share`` of a class.

    Of ``kept`` stays the first part of each class, of ``new`` comes what ``choose`` takes of each class.
    """
    old_labels, labels = data.labels(kept).cpu(), data.labels(new).cpu()
    lists = [kept[old_labels == c][:share] for c in old_labels.unique()]
    if share:
        lists += [choose(new[labels == c], share) for c in labels.unique()]
    return torch.cat([NONE, *lists])
