"""FedCLM: class means of federatedly fine-tuned features, a baseline of PILoRA. Guo et al., ECCV 2024."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from fczoo.baselines.finetune import Tuned
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Moment, ServerContext, Task, Training
from fczoo.functional.heads import nearest_mean, with_means


@register_method("fedclm")
@dataclass(frozen=True)
class FedCLM(Tuned):
    """FedAvg that predicts the nearest class mean; means of finished tasks stay, while the features change.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs; after a task, once, count
    and feature sum of every local class under the final global model.
    """

    paper = "baseline of Guo et al., PILoRA, ECCV 2024"
    formulas = r"""
    $$\hat y(x) = \underset{c}{\operatorname{argmin}}\; \lVert f_t(x) - \mu_c \rVert$$

    $\mu_c$ is the mean, over all clients, of the features of class $c$ under the model as its task
    ends.
    """
    returning = True
    private = ("mean", "count")

    tune: Literal["full", "lora", "head"] = option(
        "lora", "what is trained besides the head: all weights, LoRA pairs, or nothing"
    )
    distance: Literal["euclid", "cosine"] = option("euclid", "distance between feature and class mean")

    def training(self) -> Training:
        return replace(super().training(), uploads={"class.": per_class("count", "sum")})

    def surveys(self) -> frozenset[Moment]:
        return super().surveys() | {"end"}

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        none = {"mean": torch.zeros(task.classes, backbone.dim), "count": torch.zeros(task.classes)}
        return state or {**super().begin_task(state, task, backbone, rng), **none}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if moment == "begin":
            return super().absorb(moment, state, sums, ctx)
        return {**state, **with_means(state, sums, ctx.task)}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        features = self.features(backbone, state, batch)
        mean, count = state["mean"][: task.stop], state["count"][: task.stop]
        return nearest_mean(features, mean, count > 0, self.distance)
