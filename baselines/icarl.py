"""iCaRL in federated learning: Incremental Classifier and Representation Learning.

Rebuffi et al., CVPR 2017.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_seen_class
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, LocalData, ServerContext, Task
from fczoo.functional.exemplars import Rehearsal, exemplar_sums
from fczoo.functional.heads import nearest_mean
from fczoo.functional.losses import teacher_binary_cross_entropy


@register_method("icarl")
@dataclass(frozen=True)
class ICaRL(TunedLinearHead, Rehearsal):
    """Exemplars, distillation of sigmoids, and prediction by the nearest mean of exemplars.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    After a task they send once, for each class seen so far, the number of their exemplars and the
    sum of the exemplars' normalised features. From these the server computes class means over all
    clients. Exemplars stay at the client. Memory beyond the model: the teacher, one copy of the
    trained tensors; exemplars at the client.
    """

    title = "iCaRL"
    paper = 'Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017'
    formulas = r"""
    Binary cross-entropy of the sigmoids, mean over the classes seen:

    $$L = -\frac{1}{C} \sum_c
    \bigl( g_c \log \sigma(z_c) + (1 - g_c) \log (1 - \sigma(z_c)) \bigr)$$

    $g_c$ is the last model's sigmoid for an old class, else 1 for the label and 0 for the others.
    The prediction is the class whose exemplars' mean feature is nearest.
    """
    server_only = ("mean", "count")
    dataset_options = {"digits": {"memory": 20}}

    infer: Literal["means", "head"] = option(
        "means",
        "prediction: means, class with the nearest mean of exemplars; head, linear head, without "
        "uploads for means",
    )

    def training(self) -> Training:
        training = self.rehearsing(super().training())
        if self.infer == "head":
            return training
        return replace(
            training,
            uploads={**training.uploads, "kept.": per_seen_class("count", "sum")},
            gives_logits=False,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the teacher is the global model at the end of the last task.
        none = {"mean": torch.zeros(task.classes, backbone.dim), "count": torch.zeros(task.classes)}
        return self.with_teacher({**none, **super().begin_task(state, task, backbone, rng)}, task)

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # The teacher's logits, whose sigmoids are the targets g_c of old classes.
        return self.earlier_logits("teacher.", backbone, shared, batch)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Binary cross-entropy over the classes seen, on new images and exemplars. Targets: the
        # teacher's sigmoids for old classes, labels for new ones.
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        return teacher_binary_cross_entropy(logits, batch, ctx.task.start), {}

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Choose exemplars, and compute the sums for the class means.

        Args:
            backbone: The frozen backbone.
            data: Local data of the client.
            ctx: Memory of the client and the final global model of the task.

        Returns:
            The memory with ``exemplar.index``, and the upload ``kept.count`` [c] and ``kept.sum``
                [c, D]; with ``infer=head`` the upload is empty.
        """
        # Herding under the final global model chooses exemplars of new classes; older lists lose
        # their last entries.
        memory, _ = super().end_task_client(backbone, data, ctx)
        if self.infer == "head":
            return memory, {}

        def features(batch: Batch) -> Tensor:
            return self.features(backbone, ctx.shared, batch)

        return memory, exemplar_sums(memory["exemplar.index"], data, features, ctx.task.stop)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Compute the class means of all clients' exemplars; a class without exemplars has none.

        Args:
            phase: ``after_rounds``, or ``task_start`` for the head's means.
            state: Current state.
            sums: ``kept.count`` [c] and ``kept.sum`` [c, D] of the classes seen.
            ctx: Server context.

        Returns:
            The state with ``mean`` [C, D] and ``count`` [C].
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # Server: mean of normalised features over all clients' exemplars of each class.
        classes = ctx.task.stop
        mean, count = torch.zeros_like(state["mean"]), torch.zeros_like(state["count"])
        count[:classes] = sums["kept.count"]
        mean[:classes] = sums["kept.sum"] / sums["kept.count"][:, None].clamp(min=1)
        return {**state, "mean": mean, "count": count}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        if self.infer == "head":
            return super().predict(backbone, state, batch, task)
        # Inference: nearest mean of exemplars; features and means are normalised to length 1.
        features = F.normalize(self.features(backbone, state, batch), dim=-1)
        mean = F.normalize(state["mean"][: task.stop], dim=-1)
        return nearest_mean(features, mean, state["count"][: task.stop] > 0, "euclid")
