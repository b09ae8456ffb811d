"""FedProto with a shared model: Federated Prototype Learning across Heterogeneous Clients.

Tan et al., AAAI 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import HGP_RATES, TunedWithStatistics
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop
from fczoo.core.types import (
    Batch,
    Context,
    ServerAggregator,
    ServerContext,
    Task,
    Training,
)
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import head_logits, nearest_mean
from fczoo.functional.losses import task_cross_entropy


@register_method("fedproto")
@dataclass(frozen=True)
class FedProto(TunedWithStatistics):
    """Features are drawn to their class's global prototype, its mean feature over all clients last round.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs, with count and mean feature
    of each local class; a class with a single image at a client sends that image's feature. Weights are
    averaged plainly (``--aggregator fedavg`` weighs them by samples). Only the current task's prototypes
    are used.
    """

    paper = "Tan et al., AAAI 2022; centralised form as in HGP's comparison"
    formulas = r"""
    $$L = L_{ce} + \frac{\lambda}{D} \sum_c \lVert \bar f_c - G_c \rVert^2$$

    $$G_c = \frac{\sum_k \sum_{x \in D_{k,c}} f(x)}{\sum_k n_{k,c}}$$

    $\bar f_c$ is the mean feature of the batch's images of class $c$; $G_c$ is of the last round.
    """
    private = ("all.",)
    tuned = {
        **HGP_RATES,
        "imagenet_a": {"lr": 3e-5, "lr_backbone": 3e-5},
        "eurosat": {"lr": 3e-5, "lr_backbone": 3e-5},
    }

    strength: float = option(
        0.1,
        "ld, weight of the distance to the prototypes (official code: 1)",
        low=0,
        tune=(1e-2, 10.0, "log"),
    )
    per_sample: bool = option(
        False, "distance of each image instead of each class's mean in the batch (official code)"
    )
    infer: Literal["head", "ncm"] = option(
        "head", "answer of the linear head, or the nearest prototype, those of old tasks as they were"
    )

    def training(self) -> Training:
        statistics = {"class.": per_class("count", "sum")}
        return replace(super().training(), uploads=statistics, averaging="uniform", stats="test")

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        dim = backbone.dim
        if not state:
            none = {"all.mean": torch.zeros(task.classes, dim), "all.known": torch.zeros(task.classes)}
            state = {**super().begin_task(state, task, backbone, rng), **none}
        unknown = {"prototype.mean": torch.zeros(task.size, dim), "prototype.known": torch.zeros(task.size)}
        return {**state, **unknown}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = self.features(backbone, train, batch)
        loss = task_cross_entropy(head_logits(train, features), batch, ctx.task)
        return loss + self.strength * self.distance(features, batch, ctx), {}

    def distance(self, features: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """Mean over dimensions of the squared distance between features [B, D] and their prototypes.

        Summed over the batch's classes, or averaged over its images; classes without a prototype give 0.
        """
        mean, known = ctx.shared["prototype.mean"], ctx.shared["prototype.known"]
        own = batch.y - ctx.task.start
        if self.per_sample:
            return batch.mean((features - mean[own]).square().mean(-1) * known[own])
        hot = F.one_hot(own, ctx.task.size).to(features) * batch.w[:, None]
        count = hot.sum(0)
        gap = (hot.mT @ features / count[:, None].clamp(min=1) - mean).square().mean(-1)
        return (gap * known * (count > 0)).sum()

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        return class_sums(self.statistics_features(backbone, train, batch), batch, ctx.task)

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        sums = {k: torch.stack([p[k] for p in payloads]).sum(0) for k in payloads[0].only("class.")}
        return {**average([p.drop("class.") for p in payloads]), **sums}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        count, total = merged["class.count"], merged["class.sum"]
        held = count > 0  # a class whose holders sit the round out keeps its prototype
        fresh = {"mean": total / count[:, None].clamp(min=1), "known": held.to(total)}  # G
        state = {**state, **drop(merged, "class.")}
        now = slice(ctx.task.start, ctx.task.stop)
        for name, value in fresh.items():
            every = state[f"all.{name}"].clone()
            every[now][held] = value[held].to(every)
            state[f"all.{name}"], state[f"prototype.{name}"] = every, every[now].clone()
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        features = self.features(backbone, state, batch)
        if self.infer == "head":
            return head_logits(state, features)[:, : task.stop]
        mean, known = state["all.mean"][: task.stop], state["all.known"][: task.stop]
        return nearest_mean(features, mean, known > 0, "euclid")
