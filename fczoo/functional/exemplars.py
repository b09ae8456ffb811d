"""Exemplars: images of finished tasks that a client keeps, as positions in its training data.

``exemplar.index`` in the client's memory holds the exemplars, class by class in order of choice.
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
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData

log = logging.getLogger("fczoo")


TIE_TOLERANCE = 1e-6  # distances between features of length 1 that differ by less count as equal


def herding(features: Tensor, number: int, repeats: bool = False, normalise: bool = True) -> Tensor:
    """Choose exemplars by herding: their running mean stays nearest to the class mean.

    Rebuffi et al., "iCaRL", CVPR 2017, algorithm 4. Any first part of the list is itself a choice
    by herding, so a list is shortened from its end.

    Args:
        features: Features [n, D] of one class.
        number: Number of exemplars; all images if there are fewer.
        repeats: Allow an image to be chosen again, as GLFC's code does.
        normalise: Normalise the features to length 1 first.

    Returns:
        Positions in order of choice.
    """
    features = F.normalize(features, dim=-1) if normalise else features
    mean, total = features.mean(0), torch.zeros_like(features[0])
    slack = TIE_TOLERANCE * torch.linalg.vector_norm(features, dim=-1).mean()
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen: list[int] = []
    for i in range(number if repeats else min(number, len(features))):
        gap = torch.linalg.vector_norm(mean - (total + features) / (i + 1), dim=-1)
        best = _lowest(gap.masked_fill(~free, torch.inf), slack)
        chosen.append(best)
        free[best] = repeats
        total = total + features[best]
    return torch.tensor(chosen, dtype=torch.int64)


def residual_herding(features: Tensor, number: int, turns: int = 1000) -> Tensor:
    """Choose exemplars by residual herding, as in the code of PODNet, AFC and DyTox.

    That code follows the code of iCaRL. In each turn it chooses the image whose normalised feature
    points most towards w. Then w becomes w + mean - that feature, even if the image was chosen
    before. At first w is the mean.

    Args:
        features: Features [n, D] of one class; they are normalised to length 1.
        number: Maximum number of exemplars.
        turns: Maximum number of turns.

    Returns:
        Positions in order of choice, ``number`` or fewer.
    """
    features = features / (torch.linalg.vector_norm(features, dim=-1, keepdim=True) + 1e-8)
    mean = features.mean(0)
    direction, chosen = mean, dict[int, None]()  # w
    for _ in range(turns):
        if len(chosen) >= min(number, len(features)):
            break
        best = _lowest(-(features @ direction), TIE_TOLERANCE)
        chosen[best] = None
        direction = direction + mean - features[best]
    return torch.tensor(list(chosen), dtype=torch.int64)


def _lowest(values: Tensor, slack: Tensor | float) -> int:
    """Return the first position of the lowest value; values within ``slack`` of it count as equal.

    Two images of a class are equally far from their mean. Without slack, rounding would choose
    between them.
    """
    return int((values <= values.min() + slack).nonzero()[0])


NO_POSITIONS = torch.empty(0, dtype=torch.int64)  # an empty list of positions

Choose = Callable[[Tensor, int], Tensor]
"""(positions [n] of the images of a class, number) -> the chosen positions, in order of choice."""


@dataclass(frozen=True)
class Rehearsal(Method):
    """Base of methods whose clients rehearse: they train on exemplars together with new images.

    At the end of a task every client divides its memory equally among all classes that it has held
    so far. It shortens the lists of earlier classes from their end. It chooses exemplars of new
    classes under the final global model.
    """

    memory: int = option(
        200,
        "maximum number of exemplars per client (200: the usual 2000, divided among ten clients as "
        "in FPPL)",
        low=0,
    )
    choice: Literal["herding", "raw", "residual", "first"] = option(
        "herding",
        "choice of exemplars: herding, of normalised features; raw, herding of raw features; "
        "residual, largest inner product with what the mean lacks after the earlier choices (code "
        "of PODNet, AFC and DyTox); first, first images of each class",
    )

    @abstractmethod
    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the features by which a client chooses exemplars.

        Args:
            backbone: The frozen backbone.
            tree: Tensors of the model.
            batch: Images of a client.

        Returns:
            Features [B, D].
        """

    def rehearsing(self, training: Training) -> Training:
        """Return the method's declaration with exemplars, and a table note with their number.

        Args:
            training: Training description without exemplars.

        Returns:
            A copy that reads exemplars from ``exemplar.index``.
        """
        note = f"keeps {self.memory} images per client"
        return replace(training, exemplars="exemplar.index", table_note=note)

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Choose exemplars of the new classes; the upload is empty.

        Args:
            backbone: The frozen backbone.
            data: Local data of the client.
            ctx: Memory of the client and the broadcast tensors.

        Returns:
            The new memory and an empty upload.
        """
        memory = ctx.memory.get("exemplar.index", NO_POSITIONS)
        classes = data.labels(torch.cat([data.index, data.earlier])).unique()
        share = self.memory // len(classes)
        if 0 < self.memory < len(classes):
            warn_once(
                f"{self.name}.memory={self.memory} is too small for one image of each of the "
                f"{len(classes)} classes of a client, so this client keeps no images; raise it"
            )

        def choose(index: Tensor, number: int) -> Tensor:
            if self.choice == "first":
                return index[:number]
            features = torch.cat(
                [self.features(backbone, ctx.shared, batch) for batch in data.batches(index)]
            )
            if self.choice == "residual":
                return index[residual_herding(features, number)]
            return index[herding(features, number, normalise=self.choice == "herding")]

        return {
            **ctx.memory,
            "exemplar.index": update_exemplars(memory, data.index, data, share, choose),
        }, {}


def exemplar_sums(
    index: Tensor, data: LocalData, features: Callable[[Batch], Tensor], classes: int
) -> Tree:
    """Sum the normalised features of a client's exemplars per class.

    Args:
        index: Positions of the exemplars.
        data: Local data of the client.
        features: Function from a batch to features [B, D]; they are normalised to length 1 here.
        classes: Number c of classes seen so far.

    Returns:
        ``kept.count`` [c] and ``kept.sum`` [c, D].
    """
    sums: Tree = {}
    for batch in data.batches(index):
        units = F.normalize(features(batch), dim=-1)
        hot = F.one_hot(batch.y, classes).to(units)
        for name, part in {"kept.count": hot.sum(0), "kept.sum": hot.mT @ units}.items():
            sums[name] = sums[name] + part if name in sums else part
    return sums


@cache
def warn_once(text: str) -> None:
    """Log a warning only once, as it is the same in every round and for every client.

    Args:
        text: The warning.
    """
    log.warning(text)


def update_exemplars(
    kept: Tensor, new: Tensor, data: LocalData, share: int, choose: Choose
) -> Tensor:
    """Return the positions of the new exemplars, at most ``share`` per class.

    Args:
        kept: Positions of the current exemplars; the first ``share`` of each class stay.
        new: Positions of the images to choose from.
        data: Local data of the client.
        share: Maximum number of exemplars per class.
        choose: Function that chooses exemplars among the new images of one class.

    Returns:
        Positions of the exemplars, class by class.
    """
    old_labels, labels = data.labels(kept).cpu(), data.labels(new).cpu()
    lists = [kept[old_labels == c][:share] for c in old_labels.unique()]
    if share:
        lists += [choose(new[labels == c], share) for c in labels.unique()]
    return torch.cat([NO_POSITIONS, *lists])
