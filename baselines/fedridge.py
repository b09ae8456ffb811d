"""Fed3R, federated ridge regression on frozen features (Fani et al., ICML 2024):
the classifier of AFCL, STSA.
"""

import logging
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.payload import per_class, whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Moment, ServerContext, Task, Training
from fczoo.functional.gaussians import class_sums
from fczoo.functional.ridge import solve_ridge, with_free_bias

WIDE = 5000  # random features, above which an upload takes more than 200 MB

log = logging.getLogger("fczoo")


@register_method("fedridge")
@dataclass(frozen=True)
class FedRidge(Method):
    """Ridge regression of one-hot labels on frozen features,
    exactly as if all images ever seen lay together.

    Trained: nothing. Sent once a task: count and feature sum of every class, and the sum of outer products of
    all features, from which the server solves the regression anew. A class that nobody ever held is no
    answer.
    """

    paper = "Fani et al., Fed3R, ICML 2024"
    private = ("moment.", "answer.")
    tuned = {"digits": {"ridge": 1.0}}

    ridge: float = option(1e2, "lambda, weight of the squared norm of the classifier", low=0)
    scaled: bool = option(False, "multiply lambda by the mean of the moments' diagonal, trace(G) / M")
    normalise: bool = option(False, "features of length 1")
    features: Literal["plain", "random"] = option(
        "plain",
        "the frozen feature f, or relu(f R) with a fixed random R of ``width`` columns (RanPAC, STSA)",
    )
    width: int = option(1250, "columns M of the random projection", low=1)
    bias: Literal["none", "penalised", "free"] = option(
        "free",
        "no bias; a constant feature, held back like the rest; or a bias that lambda does not hold back",
    )
    score: Literal["linear", "cosine"] = option(
        "linear",
        "answer by the regression's values, or by the cosine between feature and class weight (STSA's code)",
    )

    def training(self) -> Training:
        uploads = {"class.": per_class("count", "sum"), "gram": whole("second moments")}
        return Training(inputs=["query"], uploads=uploads)

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state:
            return state
        size = self.width if self.features == "random" else backbone.dim
        start: Tree = {}
        if self.features == "random":
            if self.width > WIDE:
                log.warning("fedridge.width=%d: each upload holds %d^2 numbers", self.width, self.width)
            start["projection"] = torch.randn(backbone.dim, self.width, generator=rng)  # R
        size += self.bias == "penalised"
        return {
            **start,
            "moment.gram": torch.zeros(size, size, dtype=torch.float64),  # G
            "moment.target": torch.zeros(task.classes, size, dtype=torch.float64),  # Q, a row a class
            "moment.count": torch.zeros(task.classes, dtype=torch.float64),
            "answer.weight": torch.zeros(task.classes, size, dtype=torch.float64),  # W, a row a class
            "answer.bias": torch.zeros(task.classes, dtype=torch.float64),
        }

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        phi = self.lifted(state, batch.query)
        weighted = phi * batch.w[:, None]
        return {**class_sums(phi, batch, task), "gram": weighted.mT @ phi}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        new = slice(ctx.task.start, ctx.task.stop)
        gram, target, count = (state[f"moment.{name}"].clone() for name in ("gram", "target", "count"))
        gram += sums["gram"]
        target[new] += sums["class.sum"]  # added: labels may come back
        count[new] += sums["class.count"]
        ridge = self.ridge * (float(gram.diagonal().mean()) if self.scaled else 1.0)
        weight, bias = solve_ridge(gram, target.mT, ridge), torch.zeros_like(count)
        if self.bias == "free":
            weight, bias = with_free_bias(gram, target.mT, count, ridge)
        moments = {"moment.gram": gram, "moment.target": target, "moment.count": count}
        return {**state, **moments, "answer.weight": weight.mT.contiguous(), "answer.bias": bias}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        phi, weight = self.lifted(state, batch.query), state["answer.weight"][: task.stop]
        if self.score == "cosine":
            scores = F.normalize(phi, dim=-1) @ F.normalize(weight, dim=-1).mT
        else:
            scores = phi @ weight.mT + state["answer.bias"][: task.stop]
        held = state["moment.count"][: task.stop] > 0
        return torch.where(held, scores, torch.finfo(scores.dtype).min)

    def lifted(self, state: Tree, query: Tensor) -> Tensor:
        """phi(f) [B, M] in float64, of frozen features [B, D]."""
        phi = query.double()
        if self.normalise:
            phi = F.normalize(phi, dim=-1)
        if self.features == "random":
            phi = (phi @ state["projection"].double()).relu()
        return F.pad(phi, (0, 1), value=1.0) if self.bias == "penalised" else phi
