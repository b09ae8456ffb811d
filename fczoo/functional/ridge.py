"""Classifiers solved from sums over images: ridge regression on one-hot labels, Gram matrices."""

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
from fczoo.core.payload import Group, per_class, whole_tensors
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums

WARN_FEATURES = 5000  # random features, above which an upload takes more than 100 MB
Score = Literal["linear", "cosine"]

log = logging.getLogger("fczoo")


@dataclass(frozen=True)
class Analytic(Method):
    """Base of methods that solve for a linear classifier from sums of frozen features.

    Nothing is trained. Once per task clients upload the count and feature sum of every class, and
    the sum of outer products of all features. The server keeps the totals in float64 and solves
    again. Thus the result does not depend on which client has an image or in which task it arrives,
    up to the rounding of sums. A class without images is never predicted.
    """

    supports_recurring_classes = True
    server_only = ("moment.", "answer.")

    normalise: bool = option(False, "normalise features to length 1", tune=[False, True])

    @abstractmethod
    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        """Solve for the weights and biases of the classifier.

        Args:
            state: State before the current sums were added.
            moments: ``gram`` [M, M], ``target`` [M, C] and ``count`` [C] of all images so far.
            ctx: Server context.

        Returns:
            W [M, C] and b [C].
        """

    def random_features(self) -> int:
        """Return the number M of columns of the random projection; 0: no projection."""
        return 0

    def read_out(self) -> Score:
        """Return the score that the classifier predicts by: linear or cosine."""
        return "linear"

    def class_group(self, *statistics: str) -> Group:
        """Declare one row per class of the task, of features that may be projected.

        Args:
            *statistics: As in ``per_class``.
        """
        return per_class(*statistics, projected=self.random_features() > 0)

    def gram_group(self) -> Group:
        """Declare Gram matrices, sent exactly or, with an option ``gram_rank``, as factors."""
        rank = getattr(self, "gram_rank", None) or 0
        return whole_tensors("second moments", symmetric=True, rank=rank)

    def training(self) -> Training:
        return Training(
            inputs=["query"],
            uploads={"class.": self.class_group("count", "sum"), "gram": self.gram_group()},
            collect_at={"task_start"},
            gives_logits=False,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state:
            return state
        start: Tree = {}
        if columns := self.random_features():
            if columns > WARN_FEATURES:
                log.warning(
                    "%s.width=%d: each upload has %d^2 / 2 numbers; a smaller width saves bytes",
                    *(self.name, columns, columns),
                )
            start["projection"] = torch.randn(backbone.dim, columns, generator=rng)  # R
        size = self.lift_features(start, torch.zeros(1, backbone.dim)).shape[1]  # M
        return {
            **start,
            "moment.gram": torch.zeros(size, size, dtype=torch.float64),  # G
            # Q, one row per class
            "moment.target": torch.zeros(task.classes, size, dtype=torch.float64),
            "moment.count": torch.zeros(task.classes, dtype=torch.float64),
            # W, one row per class
            "answer.weight": torch.zeros(task.classes, size, dtype=torch.float64),
            "answer.bias": torch.zeros(task.classes, dtype=torch.float64),
        }

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        return gram_sums(
            self.lift_features(tree, self.features(backbone, tree, batch)), batch, ctx.task
        )

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        new = slice(ctx.task.start, ctx.task.stop)
        gram, target, count = (
            state[f"moment.{name}"].clone() for name in ("gram", "target", "count")
        )
        gram += sums["gram"]
        target[new] += sums["class.sum"]  # added, as labels may recur
        count[new] += sums["class.count"]
        weight, bias = self.solve(state, {"gram": gram, "target": target.mT, "count": count}, ctx)
        moments = {"moment.gram": gram, "moment.target": target, "moment.count": count}
        return {**state, **moments, "answer.weight": weight.mT.contiguous(), "answer.bias": bias}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        phi = self.lift_features(state, self.features(backbone, state, batch))
        weight = state["answer.weight"][: task.stop]
        if self.read_out() == "cosine":
            scores = cosines(phi, weight)
        else:
            scores = phi @ weight.mT + state["answer.bias"][: task.stop]
        present = state["moment.count"][: task.stop] > 0
        return torch.where(present, scores, torch.finfo(scores.dtype).min)

    def lift_features(self, state: Tree, query: Tensor) -> Tensor:
        """Compute the features phi(f) that the classifier reads.

        phi(f) is f, normalised to length 1 with the option ``normalise``, or relu(f R) with a
        random projection R.

        Args:
            state: State, with ``projection`` R if there is one.
            query: Frozen features f [B, D].

        Returns:
            phi [B, M] in float64.
        """
        phi = F.normalize(query.double(), dim=-1) if self.normalise else query.double()
        return (phi @ state["projection"].double()).relu() if "projection" in state else phi


def gram_sums(phi: Tensor, batch: Batch, task: Task) -> Tree:
    """Sum features per class, and their outer products over all classes.

    Args:
        phi: Features [B, M].
        batch: Labels and weights of the images.
        task: The current task, with c classes.

    Returns:
        ``class.count`` [c], ``class.sum`` [c, M] and ``gram`` [M, M].
    """
    return {**class_sums(phi, batch, task), "gram": (phi * batch.w[:, None]).mT @ phi}


def solve_ridge(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """Solve (G + ridge I) W = Q in float64, by Cholesky.

    With ``ridge`` 0, where G can be singular, W is the solution of smallest norm.

    Args:
        gram: G [M, M], the sum of outer products of the features.
        target: Q [M, C], the sum of features of each class.
        ridge: Strength of the regularisation.

    Returns:
        W [M, C].
    """
    matrix = gram.double() + ridge * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    if ridge:  # without it, rounding can make a singular matrix look positive definite
        factor, error_code = torch.linalg.cholesky_ex(matrix)
        if not error_code:
            return torch.cholesky_solve(target.double(), factor)
    inverse: Tensor = torch.linalg.pinv(matrix, hermitian=True)
    return inverse @ target.double()


def solve_ridge_with_bias(
    gram: Tensor, target: Tensor, count: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    """Solve for weights and an unregularised bias from the same sums.

    With n images, mean feature mu and class shares p: W = (G - n mu mu^T + ridge I)^-1 (Q - n mu
    p^T), b = p - W^T mu.

    Args:
        gram: G [M, M], the sum of outer products of the features.
        target: Q [M, C], the sum of features of each class.
        count: Number of images of each class [C].
        ridge: Strength of the regularisation.

    Returns:
        W [M, C] and b [C].
    """
    n = count.sum()
    mean, share = target.sum(1) / n, count.double() / n  # mu, p
    weight = solve_ridge(gram - n * mean.outer(mean), target - n * mean.outer(share), ridge)
    return weight, share - mean @ weight


def best_ridge(fit: Tree, held_out: Tree, ridges: Sequence[float]) -> float:
    """Select the ridge with the smallest squared error on held-out images, only from sums.

    With W = (G + ridge I)^-1 Q, the error is <W, G_h W> - 2 <W, Q_h> + n_h (McDonnell et al., 2023;
    the formula in terms of sums is derived from it). n_h is the same for all ridges.

    Args:
        fit: ``gram`` G [M, M] and ``target`` Q [M, C] of the images to fit.
        held_out: ``gram`` G_h and ``target`` Q_h of the held-out images.
        ridges: Candidates, in ascending order.

    Returns:
        The best ridge; of equal errors, the smallest.
    """
    values, vectors = torch.linalg.eigh(fit["gram"].double())
    rotated_target = vectors.mT @ fit["target"]
    errors = []
    for ridge in ridges:
        weight = vectors @ (rotated_target / (values.clamp(min=0) + ridge)[:, None])
        error = (weight * (held_out["gram"] @ weight)).sum() - 2 * (
            weight * held_out["target"]
        ).sum()
        errors.append(error)
    return ridges[int(torch.stack(errors).argmin())]


def gram_of_groups(count: Tensor, total: Tensor, groups: int | None = None) -> Tensor:
    """Estimate the sum of outer products of all features from sums over groups of images.

    For a class with N images in J_c groups that hold it, and P = sum_j s_j, the estimate is G_c =
    (N-1)/(J_c-1) sum_j s_j s_j^T / n_j - (N-J_c)/((J_c-1) N) P P^T (FedCOF, Goswami et al., 2025;
    STSA-E, Guan et al., 2026). It is unbiased if the assignment to groups does not depend on the
    features. It is exact if each group has one image. A class in one group gives P P^T / N, as no
    spread is known.

    Args:
        count: Images n [J, c] of each group and class.
        total: Feature sums s [J, c, M] of each group and class.
        groups: Use this number J instead of J_c; coefficients below 0 become 0.

    Returns:
        The sum of outer products [M, M].
    """
    n, s = count.double(), total.double()
    images, sums = n.sum(0), s.sum(0)  # N, P
    if groups is None:
        holders = (n > 0).sum(0).double()  # J_c
        multiple = holders > 1
        within = torch.where(multiple, (images - 1) / (holders - 1).clamp(min=1), 1.0)
        correction = torch.where(
            multiple, (images - holders) / ((holders - 1) * images).clamp(min=1), 0.0
        )
    else:
        within = ((images - 1) / (groups - 1)).clamp(min=0)
        correction = ((images - groups) / ((groups - 1) * images.clamp(min=1))).clamp(min=0)
    weight = torch.where(n > 0, within / n.clamp(min=1), 0.0)
    rows = s.flatten(0, 1)
    return (rows * weight.flatten()[:, None]).mT @ rows - (sums * correction[:, None]).mT @ sums
