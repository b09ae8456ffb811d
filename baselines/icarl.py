"""iCaRL in federated learning: Incremental Classifier and Representation Learning.

Rebuffi et al., CVPR 2017.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import Tuned
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_seen_class
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData, ServerContext, Task, Training
from fczoo.functional.exemplars import Rehearsal, exemplar_sums
from fczoo.functional.heads import nearest_mean
from fczoo.functional.losses import taught_binary_cross_entropy


@register_method("icarl")
@dataclass(frozen=True)
class ICaRL(Tuned, Rehearsal):
    """Clients keep exemplars, distil the last model's sigmoids, and answer by the nearest mean of exemplars.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs; after a task, once, count
    and sum of every client's exemplar features of each class seen so far, of which the server makes the
    means of all clients together. Exemplars stay at the client. Memory beyond the model: the teacher, one
    copy of what is trained; exemplars at the client.
    """

    paper = "Rebuffi et al., iCaRL, CVPR 2017"
    formulas = r"""
    Binary cross-entropy of the sigmoids, mean over the classes seen:

    $$L = -\frac{1}{C} \sum_c \bigl( g_c \log \sigma(z_c) + (1 - g_c) \log (1 - \sigma(z_c)) \bigr)$$

    $g_c$ is the last model's sigmoid for an old class, else 1 for the label and 0 for the others. The answer
    is the class whose exemplars' mean feature is nearest.
    """
    private = ("mean", "count")
    tuned = {"digits": {"memory": 20}}

    infer: Literal["means", "head"] = option(
        "means", "answer by the nearest class mean of exemplars, or by the head, which sends no means"
    )

    def training(self) -> Training:
        training = self.rehearsing(super().training())
        if self.infer == "head":
            return training
        return replace(training, uploads={**training.uploads, "kept.": per_seen_class("count", "sum")})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        none = {"mean": torch.zeros(task.classes, backbone.dim), "count": torch.zeros(task.classes)}
        return self.with_teacher({**none, **super().begin_task(state, task, backbone, rng)}, task)

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        return self.recalled("teacher.", backbone, shared, batch)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        return taught_binary_cross_entropy(logits, batch, ctx.task.start), {}

    def conclude(self, backbone: Backbone, data: LocalData, ctx: Context) -> tuple[Tree, Tree]:
        """Choose exemplars, and send the sums of which class means are made."""
        memory, _ = super().conclude(backbone, data, ctx)
        if self.infer == "head":
            return memory, {}

        def features(batch: Batch) -> Tensor:
            return self.features(backbone, ctx.shared, batch)

        return memory, exemplar_sums(memory["exemplar.index"], data, features, ctx.task.stop)

    def concluded(self, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """The means of all clients' exemplars; a class that nobody keeps has none."""
        seen = ctx.task.stop
        mean, count = torch.zeros_like(state["mean"]), torch.zeros_like(state["count"])
        count[:seen] = sums["kept.count"]
        mean[:seen] = sums["kept.sum"] / sums["kept.count"][:, None].clamp(min=1)
        return {**state, "mean": mean, "count": count}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        if self.infer == "head":
            return super().predict(backbone, state, batch, task)
        features = F.normalize(self.features(backbone, state, batch), dim=-1)
        mean = F.normalize(state["mean"][: task.stop], dim=-1)
        return nearest_mean(features, mean, state["count"][: task.stop] > 0, "euclid")
