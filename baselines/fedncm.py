"""FedNCM: Guiding The Last Layer in Federated Learning with Pre-Trained Models.

Legate et al., NeurIPS 2023.
"""

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
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import nearest_mean, update_means


@register_method("fedncm")
@dataclass(frozen=True)
class FedNCM(Method):
    """Nearest class mean of the frozen features, without training or forgetting.

    Once per task clients send count and feature sum of every class of the task. The result equals
    the centralised class means exactly. The paper's second stage, FedNCM+FT, which trains from
    these means, is fedavg with head_init=means.
    """

    paper = (
        'Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained '
        'Models", NeurIPS 2023'
    )
    supports_recurring_classes = True
    formulas = r"""
    $$\mu_c = \frac{\sum_k \sum_{x \in D_{k,c}} f(x)}{\sum_k n_{k,c}}$$

    $$\hat y(x) = \underset{c}{\operatorname{argmin}}\; \lVert f(x) - \mu_c \rVert$$
    """
    server_only = ("mean", "count")

    distance: Literal["euclid", "cosine"] = option(
        "euclid", "distance between feature and class mean", tune=["euclid", "cosine"]
    )
    normalise: bool = option(False, "normalise features to length 1 (iCaRL)", tune=[False, True])

    def training(self) -> Training:
        uploads = {"class.": per_class("count", "sum")}
        return Training(
            inputs=["query"], uploads=uploads, collect_at={"task_start"}, gives_logits=False
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        return state or {
            "mean": torch.zeros(task.classes, backbone.dim),
            "count": torch.zeros(task.classes),
        }

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Client, once per task: n_{k,c} and the sum of frozen features per class.
        return class_sums(self._read(batch), batch, ctx.task)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        # Server: mu_c = sum_k sum_x f(x) / sum_k n_{k,c}, equal to the centralised class mean.
        return update_means(state, sums, ctx.task)

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmin_c |f(x) - mu_c|; classes without images are masked.
        mean, count = state["mean"][: task.stop], state["count"][: task.stop]
        return nearest_mean(self._read(batch), mean, count > 0, self.distance)

    def _read(self, batch: Batch) -> Tensor:
        return F.normalize(batch.query, dim=-1) if self.normalise else batch.query
