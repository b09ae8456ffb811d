"""FeCAM: Exploiting the Heterogeneity of Class Distributions. Goswami et al., NeurIPS 2023."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.gaussians import moment_sums

EPSILON = 1e-12  # minimum variance, for a dimension without spread


@register_method("fecam")
@dataclass(frozen=True)
class FeCAM(Method):
    """Nearest class mean in the Mahalanobis distance of each class's own covariance.

    Nothing is trained. Once per task clients send count, sum and sum of products (or squares) of
    each class's features of length 1. From these the server computes each class's mean and
    covariance exactly as on the pooled images. It shrinks covariances, then normalises them to
    correlations, so that no class wins by its small variance. A class with one image gets the mean
    covariance of the others.
    """

    paper = (
        'Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in '
        'Exemplar-Free Continual Learning", NeurIPS 2023; federated by sums'
    )
    formulas = r"""
    $$\hat y(x) = \underset{c}{\operatorname{argmin}}\;
    (\hat f - \mu_c)^\top R_c^{-1} (\hat f - \mu_c)$$

    $\hat f = f / \lVert f \rVert$; $R_c$ is the class's covariance, shrunk and brought to a
    correlation.
    """
    supports_recurring_classes = True
    server_only = ("moment.", "answer.")

    covariance: Literal["correlation", "full", "diagonal"] = option(
        "correlation",
        "covariance per class: correlation, normalised by standard deviations; full, not "
        "normalised; diagonal, variances only (uploads D instead of D x D values)",
    )
    shrink: float = option(
        1.0,
        "alpha_1, shrinkage: alpha_1 times the mean variance is added to the variances",
        low=0,
        tune=(1e-2, 10.0, "log"),
    )
    shrink_apart: float = option(
        0.0,
        "alpha_2, shrinkage: alpha_2 times the mean covariance is added to the covariances "
        "(ResNet: 1)",
        low=0,
        tune=(0.0, 1.0, "linear"),
    )

    def training(self) -> Training:
        last = "squares" if self.covariance == "diagonal" else "products"
        uploads = {"class.": per_class("count", "sum", last)}
        return Training(
            inputs=["query"], uploads=uploads, collect_at={"task_start"}, gives_logits=False
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state:
            return state
        rows = torch.zeros(task.classes, backbone.dim, dtype=torch.float64)
        state = {"moment.count": torch.zeros(task.classes, dtype=torch.float64), "moment.sum": rows}
        if self.covariance == "diagonal":
            return {**state, "moment.squares": rows, "answer.precision": rows[:, :, None]}
        square = rows[:, :, None].expand(-1, -1, backbone.dim).clone()
        return {**state, "moment.products": square, "answer.precision": square}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Client, once per task: n_c, sum f and sum f f^T (or f^2) per class, with f of length 1 in
        # float64.
        features = F.normalize(batch.query.double(), dim=-1)
        return moment_sums(features, batch, ctx.task, full=self.covariance != "diagonal")

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        state = dict(state)
        for name, value in sums.items():
            total = state[name.replace("class.", "moment.")].clone()
            total[ctx.task.start : ctx.task.stop] += value  # added, as classes may recur
            state[name.replace("class.", "moment.")] = total
        # Server: covariance S_c of each class, shrunk, normalised to a correlation R_c, inverted.
        has_images = state["moment.count"] > 0
        precision = torch.zeros_like(state["answer.precision"])
        precision[has_images] = self._precisions(self._covariances(state, has_images))
        return {**state, "answer.precision": precision}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmin_c (f - mu_c)^T R_c^-1 (f - mu_c); classes without images are masked.
        count, precision = (
            state["moment.count"][: task.stop],
            state["answer.precision"][: task.stop],
        )
        means = state["moment.sum"][: task.stop] / count.clamp(min=1)[:, None]
        gap = F.normalize(batch.query.double(), dim=-1)[:, None] - means  # [B, C, D]
        if self.covariance == "diagonal":
            score = -(gap.square() * precision[..., 0]).sum(-1)
        else:
            score = -torch.einsum("bci,cij,bcj->bc", gap, precision, gap)
        return torch.where(count > 0, score, torch.finfo(score.dtype).min)

    def _covariances(self, state: Tree, held: Tensor) -> Tensor:
        """Return unbiased covariances [c, D, D], or variances [c, D, 1], of classes with images."""
        count = state["moment.count"][held][:, None, None]
        means = state["moment.sum"][held][:, :, None] / count
        if self.covariance == "diagonal":
            scatter = (state["moment.squares"][held][:, :, None] - count * means.square()).clamp(
                min=0
            )
        else:
            scatter = state["moment.products"][held] - count * means * means.mT
        spread = scatter / (count - 1).clamp(min=1)
        # A class with one image gets the mean of the other classes' covariances.
        has_spread = count[:, 0, 0] > 1
        return torch.where(
            has_spread[:, None, None],
            spread,
            spread[has_spread].sum(0) / has_spread.sum().clamp(min=1),
        )

    def _precisions(self, covariance: Tensor) -> Tensor:
        """Return the inverses of covariances after shrinkage and normalisation."""
        if self.covariance == "diagonal":
            variance = covariance + self.shrink * covariance.mean(1, keepdim=True)
            return 1 / variance.clamp(min=EPSILON)
        # Shrinkage: S_c + alpha_1 mean(diagonal) I + alpha_2 mean(nonzero off-diagonal) (1 - I).
        one = torch.eye(covariance.shape[1]).to(covariance)
        off_diagonal = covariance * (1 - one)
        mean = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        covariance_mean = (off_diagonal.sum((1, 2)) / (off_diagonal != 0).sum((1, 2)).clamp(min=1))[
            :, None, None
        ]
        shrunk = (
            covariance + self.shrink * mean * one + self.shrink_apart * covariance_mean * (1 - one)
        )
        # Correlation normalisation: R_c = S_c / (sd sd^T).
        if self.covariance == "correlation":
            deviation = shrunk.diagonal(dim1=1, dim2=2).clamp(min=EPSILON).sqrt()
            shrunk = shrunk / (deviation[:, :, None] * deviation[:, None])
        inverses: Tensor = torch.linalg.pinv(shrunk, hermitian=True)
        return inverses
