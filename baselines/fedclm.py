"""FedCLM: class means of features after federated fine-tuning, a baseline of PILoRA.

Guo et al., ECCV 2024.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, ServerContext, Task
from fczoo.functional.heads import nearest_mean, update_means


@register_method("fedclm")
@dataclass(frozen=True)
class FedCLM(TunedLinearHead):
    """FedAvg that predicts the nearest class mean; means of finished tasks do not change.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    After a task they send, once, count and feature sum of every local class under the final global
    model. The server computes the class means. The means of finished tasks stay, while the features
    change.
    """

    paper = (
        'baseline of PILoRA: Guo et al., "PILoRA: Prototype Guided Incremental LoRA for Federated '
        'Class-Incremental Learning", ECCV 2024'
    )
    formulas = r"""
    $$\hat y(x) = \underset{c}{\operatorname{argmin}}\; \lVert f_t(x) - \mu_c \rVert$$

    $\mu_c$ is the mean, over all clients, of the features of class $c$ under the model as its task
    ends.
    """
    supports_recurring_classes = True
    server_only = ("mean", "count")

    tune: Literal["full", "lora", "head"] = option(
        "lora", "tensors trained below the head: full, all weights; lora, LoRA pairs; head, none"
    )
    distance: Literal["euclid", "cosine"] = option(
        "euclid", "distance between feature and class mean"
    )

    def training(self) -> Training:
        # As FedAvg; as a task ends clients also send count and feature sum per class.
        training = super().training()
        return replace(
            training,
            uploads={"class.": per_class("count", "sum")},
            collect_at={*training.collect_at, "task_end"},
            gives_logits=False,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        none = {"mean": torch.zeros(task.classes, backbone.dim), "count": torch.zeros(task.classes)}
        return state or {**super().begin_task(state, task, backbone, rng), **none}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # As a task ends: class means mu_c over all clients under the final global model. Means of
        # earlier tasks stay unchanged.
        return {**state, **update_means(state, sums, ctx.task)}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmin_c |f(x) - mu_c| over the classes seen; the head is not used.
        features = self.features(backbone, state, batch)
        mean, count = state["mean"][: task.stop], state["count"][: task.stop]
        return nearest_mean(features, mean, count > 0, self.distance)
