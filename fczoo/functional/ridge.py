"""Classifiers solved from sums over images: ridge regression on one-hot labels, and Gram matrices."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.payload import per_class, whole
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Moment, ServerContext, Task, Training
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums

WIDE = 5000  # random features, above which an upload takes more than 200 MB
Score = Literal["linear", "cosine"]

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class Analytic(Method):
    """Base of methods that solve for a linear classifier from sums of frozen features: one survey a task.

    Trained: nothing. Sent once a task: count and feature sum of every class, and the sum of outer products of
    all features. The server keeps the totals in float64 and solves anew, so that the answer does not depend
    on who held which image or when, up to the rounding of sums. A class that nobody ever held is no answer.
    """

    returning = True
    private = ("moment.", "answer.")

    normalise: bool = option(False, "features of length 1", tune=[False, True])

    @abstractmethod
    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        """W [M, C] and b [C] from ``gram`` [M, M], ``target`` [M, C] and ``count`` [C] of all images so far.

        ``state`` is the state before they were added up.
        """

    def random_features(self) -> int:
        """Columns M of the random projection; 0: features are taken as they are."""
        return 0

    def read_out(self) -> Score:
        """How the classifier answers."""
        return "linear"

    def training(self) -> Training:
        uploads = {"class.": per_class("count", "sum"), "gram": whole("second moments")}
        return Training(inputs=["query"], uploads=uploads)

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state:
            return state
        start: Tree = {}
        if columns := self.random_features():
            if columns > WIDE:
                log.warning("%s.width=%d: each upload holds %d^2 numbers", self.name, columns, columns)
            start["projection"] = torch.randn(backbone.dim, columns, generator=rng)  # R
        size = self.lifted(start, torch.zeros(1, backbone.dim)).shape[1]  # M
        return {
            **start,
            "moment.gram": torch.zeros(size, size, dtype=torch.float64),  # G
            "moment.target": torch.zeros(task.classes, size, dtype=torch.float64),  # Q, a row a class
            "moment.count": torch.zeros(task.classes, dtype=torch.float64),
            "answer.weight": torch.zeros(task.classes, size, dtype=torch.float64),  # W, a row a class
            "answer.bias": torch.zeros(task.classes, dtype=torch.float64),
        }

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        return gram_sums(self.lifted(state, self.features(backbone, state, batch)), batch, task)

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        new = slice(ctx.task.start, ctx.task.stop)
        gram, target, count = (state[f"moment.{name}"].clone() for name in ("gram", "target", "count"))
        gram += sums["gram"]
        target[new] += sums["class.sum"]  # added: labels may come back
        count[new] += sums["class.count"]
        weight, bias = self.solve(state, {"gram": gram, "target": target.mT, "count": count}, ctx)
        moments = {"moment.gram": gram, "moment.target": target, "moment.count": count}
        return {**state, **moments, "answer.weight": weight.mT.contiguous(), "answer.bias": bias}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        phi = self.lifted(state, self.features(backbone, state, batch))
        weight = state["answer.weight"][: task.stop]
        if self.read_out() == "cosine":
            scores = cosines(phi, weight)
        else:
            scores = phi @ weight.mT + state["answer.bias"][: task.stop]
        held = state["moment.count"][: task.stop] > 0
        return torch.where(held, scores, torch.finfo(scores.dtype).min)

    def lifted(self, state: Tree, query: Tensor) -> Tensor:
        """phi(f) [B, M] in float64, of frozen features [B, D]: f, of length 1 if so chosen, or relu(f R)."""
        phi = F.normalize(query.double(), dim=-1) if self.normalise else query.double()
        return (phi @ state["projection"].double()).relu() if "projection" in state else phi


def gram_sums(phi: Tensor, batch: Batch, task: Task) -> Tree:
    """``class_sums`` and ``gram`` [M, M], the sum of outer products, of features [B, M]."""
    return {**class_sums(phi, batch, task), "gram": (phi * batch.w[:, None]).mT @ phi}


def solve_ridge(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """W [M, C] with (G + ridge I) W = Q, in float64.

    ``gram`` G [M, M] is the sum of outer products of the features, ``target`` Q [M, C] the sum of features of
    each class. By Cholesky; with ``ridge`` 0, where G may be singular, the solution of smallest norm.
    """
    matrix = gram.double() + ridge * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    if ridge:  # without it a factor of a singular matrix may be found, from rounding alone
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return torch.cholesky_solve(target.double(), factor)
    inverse: Tensor = torch.linalg.pinv(matrix, hermitian=True)
    return inverse @ target.double()


def with_free_bias(gram: Tensor, target: Tensor, count: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """W [M, C] and a bias b [C] that the ridge does not hold back, from the same sums.

    ``count`` [C] is the number of images of each class. With n images, mean feature mu and class shares p:
    W = (G - n mu mu^T + ridge I)^-1 (Q - n mu p^T), b = p - W^T mu.
    """
    n = count.sum()
    mean, share = target.sum(1) / n, count.double() / n  # mu, p
    weight = solve_ridge(gram - n * mean.outer(mean), target - n * mean.outer(share), ridge)
    return weight, share - mean @ weight


def best_ridge(fit: Tree, held_out: Tree, ridges: Sequence[float]) -> float:
    """The ridge whose solution on ``fit`` has the smallest squared error on ``held_out``, from sums alone.

    Both hold ``gram`` [M, M] and ``target`` [M, C]. With W = (G + ridge I)^-1 Q, the error is
    <W, G_h W> - 2 <W, Q_h> + n_h (McDonnell et al., 2023; the sums are worked out from it). Of equal errors,
    the smallest ridge.
    """
    values, vectors = torch.linalg.eigh(fit["gram"].double())
    turned = vectors.mT @ fit["target"]
    errors = []
    for ridge in ridges:
        weight = vectors @ (turned / (values.clamp(min=0) + ridge)[:, None])
        error = (weight * (held_out["gram"] @ weight)).sum() - 2 * (weight * held_out["target"]).sum()
        errors.append(error)
    return ridges[int(torch.stack(errors).argmin())]


def gram_of_groups(count: Tensor, total: Tensor, groups: int | None = None) -> Tensor:
    """Sum of outer products [M, M] of all features, estimated from sums over groups of images.

    ``count`` [J, c] and ``total`` s [J, c, M] are the images and their feature sum of each group and class.
    For a class with N images in J_c groups that hold it, and P = sum_j s_j: G_c = (N-1)/(J_c-1) sum_j s_j
    s_j^T / n_j - (N-J_c)/((J_c-1) N) P P^T (FedCOF, Goswami et al., 2025; STSA-E, Guan et al., 2026), which
    is unbiased where features have no say in who is in which group, and exact where each group has one image.
    A class in one group: P P^T / N, as no spread is known. With ``groups`` J in place of J_c, coefficients
    below 0 become 0.
    """
    n, s = count.double(), total.double()
    images, sums = n.sum(0), s.sum(0)  # N, P
    if groups is None:
        held = (n > 0).sum(0).double()  # J_c
        several = held > 1
        within = torch.where(several, (images - 1) / (held - 1).clamp(min=1), 1.0)
        lost = torch.where(several, (images - held) / ((held - 1) * images).clamp(min=1), 0.0)
    else:
        within = ((images - 1) / (groups - 1)).clamp(min=0)
        lost = ((images - groups) / ((groups - 1) * images.clamp(min=1))).clamp(min=0)
    weight = torch.where(n > 0, within / n.clamp(min=1), 0.0)
    rows = s.flatten(0, 1)
    return (rows * weight.flatten()[:, None]).mT @ rows - (sums * lost[:, None]).mT @ sums
