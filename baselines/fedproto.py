"""FedProto with a shared model: Federated Prototype Learning across Heterogeneous Clients.

Tan et al., AAAI 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedWithStatistics
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import head_logits, nearest_mean
from fczoo.functional.losses import task_cross_entropy
from fczoo.protocols.registry import use_protocol_options


@register_method("fedproto")
@use_protocol_options("hgp", "fedproto")
@dataclass(frozen=True)
class FedProto(TunedWithStatistics):
    """FedProto with one model: features are pulled towards the global prototype of their class.

    A global prototype is the mean feature of a class over all clients in the last round. Clients
    train and send the linear head and, depending on ``tune``, all weights or LoRA pairs. They also
    send the count and the feature sum of each local class; for a class with a single image the sum
    is that image's feature. The server averages weights uniformly (``--aggregator fedavg`` weights
    them by samples). Training uses only the prototypes of the current task.
    """

    paper = (
        'Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", '
        "AAAI 2022; with one model for all clients"
    )
    formulas = r"""
    $$L = L_{ce} + \frac{\lambda}{D} \operatorname{mean}_x \lVert f(x) - G_y \rVert^2$$

    $$G_c = \frac{\sum_k \sum_{x \in D_{k,c}} f(x)}{\sum_k n_{k,c}}$$

    $G_c$ is from the last round. A test image is assigned the class of the nearest prototype; those
    of old tasks are not updated.
    """
    server_only = ("all.",)

    strength: float = option(
        1.0,
        "lambda, weight of the distance to the prototypes (1: official code; 0.1: HGP's code)",
        low=0,
        tune=(1e-2, 10.0, "log"),
    )
    per_sample: bool = option(
        True,
        "compute the loss's distance to the prototypes per image, then the mean (official code); "
        "off: compute it from each class's mean feature in the batch (HGP's code)",
    )
    infer: Literal["head", "ncm"] = option(
        "ncm",
        "prediction: ncm, class of the nearest prototype, where old tasks' prototypes are not "
        "updated (paper); head, linear head (HGP's code)",
    )

    def training(self) -> Training:
        # Server: uniform mean of the weights, as in fed-mammoth. Client: prototypes of the local
        # model on the test view, after local training.
        training = super().training()
        return replace(
            training,
            uploads={"class.": per_class("count", "sum")},
            averaging="uniform",
            collect_at={*training.collect_at, "after_training"},
            gives_logits=self.infer == "head",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        dim = backbone.dim
        if not state:
            none = {
                "all.mean": torch.zeros(task.classes, dim),
                "all.known": torch.zeros(task.classes),
            }
            state = {**super().begin_task(state, task, backbone, rng), **none}
        # Task boundary: new classes have no prototype yet, so the first round has only L_ce.
        unknown = {
            "prototype.mean": torch.zeros(task.size, dim),
            "prototype.known": torch.zeros(task.size),
        }
        return {**state, **unknown}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L = L_ce + lambda * distance of the features to the global prototypes G_c.
        features = self.features(backbone, train, batch)
        loss = task_cross_entropy(head_logits(train, features), batch, ctx.task)
        return loss + self.strength * self.distance(features, batch, ctx), {}

    def distance(self, features: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """Compute the mean squared difference between features and their global prototypes.

        The mean is over dimensions. Classes without a prototype give 0.

        Args:
            features: Features [B, D].
            batch: Labels and weights of the images.
            ctx: Broadcast tensors, with ``prototype.mean`` [c, D] and ``prototype.known`` [c].

        Returns:
            With ``per_sample`` the mean over images (official code); else the sum over classes of
                the difference to the class's mean feature in the batch (fed-mammoth).
        """
        mean, has_prototype = ctx.shared["prototype.mean"], ctx.shared["prototype.known"]
        labels = batch.y - ctx.task.start
        if self.per_sample:
            return batch.mean((features - mean[labels]).square().mean(-1) * has_prototype[labels])
        hot = F.one_hot(labels, ctx.task.size).to(features) * batch.w[:, None]
        count = hot.sum(0)
        gap = (hot.mT @ features / count[:, None].clamp(min=1) - mean).square().mean(-1)
        return (gap * has_prototype * (count > 0)).sum()

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Local prototypes mu_{k,c}: per local class n_{k,c} and the feature sum.
        return class_sums(self.statistics_features(backbone, tree, batch), batch, ctx.task)

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Server: average the weights, add up counts and feature sums.
        sums = {k: torch.stack([p[k] for p in payloads]).sum(0) for k in payloads[0].only("class.")}
        return {**average([p.drop("class.") for p in payloads]), **sums}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # Global prototypes: G_c = sum_k n_{k,c} mu_{k,c} / sum_k n_{k,c}. A class without images in
        # this round keeps its prototype.
        count, total = merged["class.count"], merged["class.sum"]
        has_images = count > 0
        fresh = {"mean": total / count[:, None].clamp(min=1), "known": has_images.to(total)}
        state = {**state, **drop(merged, "class.")}
        classes = slice(ctx.task.start, ctx.task.stop)
        for name, value in fresh.items():
            table = state[f"all.{name}"].clone()
            table[classes][has_images] = value[has_images].to(table)
            state[f"all.{name}"], state[f"prototype.{name}"] = table, table[classes].clone()
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmin_c |f(x) - G_c| over the classes seen, or the linear head.
        features = self.features(backbone, state, batch)
        if self.infer == "head":
            return head_logits(state, features)[:, : task.stop]
        mean, has_prototype = state["all.mean"][: task.stop], state["all.known"][: task.stop]
        return nearest_mean(features, mean, has_prototype > 0, "euclid")
