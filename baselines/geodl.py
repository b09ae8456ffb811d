"""GeoDL in federated learning: On Learning the Geodesic Path for Incremental Learning.

Simon et al., CVPR 2021.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fczoo.baselines.cosine import CosineHead
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context
from fczoo.functional.kernel import flow_kernel, geodesic_loss, subspace


@register_method("geodl")
@dataclass(frozen=True)
class GeoDL(CosineHead):
    """Features are distilled along the geodesic between the subspaces of the old and the new ones.

    Its released base is LUCIR's head of cosines, without the margin ranking; GLFC's tables put it on iCaRL,
    which is not offered. Kept from the paper: the kernel of one mini-batch's two subspaces, on the class
    token (the code takes a map of a ResNet). Trained and sent: rows of the task's classes, the scale sigma
    and, by choice, all weights or LoRA pairs; before a task, once, count and sum of every local class's
    features of length 1. Memory beyond the model: the teacher, one copy of what is trained; exemplars at
    the client.
    """

    paper = "Simon et al., GeoDL, CVPR 2021"
    formulas = r"""
    $$L = -\log \operatorname{softmax}_c\bigl( \sigma \cos(f, w_c) \bigr)_y
    + \lambda \sqrt{C_{old} / C_{new}}\;
    \Bigl( 1 - \frac{a^\top G b}{\lVert G^{1/2} a \rVert \, \lVert G^{1/2} b \rVert} \Bigr)$$

    $$G = \int_0^1 \Phi(u) \Phi(u)^\top du$$

    $a$ and $b$ are the teacher's feature and this model's, of length 1; $\Phi$ is the geodesic from the
    subspace of the batch's old features to that of its new ones.
    """

    strength: float = option(
        10.0, "weight of the distillation, times the root of old over new classes (released command)", low=0
    )
    distance: bool = option(
        False,
        "distil the squared distance under the kernel in place of the cosine",
        quirk="chrysts/geodesic_continual_learning",
    )

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features, task = self.features(backbone, train, batch), ctx.task
        logits = train["sigma"] * self.scores(features, train, ctx)
        loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        if task.index == 0:
            return loss, {}
        weight = self.strength * math.sqrt(task.start / task.size)
        return loss + weight * batch.mean(self.geodesic(features, batch)), {}

    def geodesic(self, features: Tensor, batch: Batch) -> Tensor:
        """Distillation [B] of features [B, D]; 0 in a batch of less than three images, which span nothing."""
        size = batch.w.sum() - 2
        with torch.no_grad():
            old = subspace(batch.teacher, batch.w, size)  # P
            new = subspace(features, batch.w, size)  # Q
            kernel = flow_kernel(old, new)  # G
        return (size >= 1) * geodesic_loss(features, batch.teacher, kernel, self.distance)
