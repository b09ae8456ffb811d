"""LUCIR in federated learning: Learning a Unified Classifier Incrementally via Rebalancing.

Hou et al., CVPR 2019.
"""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._cosine_head import CosineHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context
from fczoo.functional.cosine import cosine_distance, margin_ranking


@register_method("lucir")
@dataclass(frozen=True)
class LUCIR(CosineHead):
    """Cosine head, distillation of feature directions, and a margin of exemplars to new classes.

    Clients train and send the head rows of the task's classes, the scale sigma and, depending on
    ``tune``, all weights or LoRA pairs. Before a task they send once count and sum of the
    normalised features of each local class, from which the server initialises its rows. Exemplars
    stay at the client. Memory beyond the model: the teacher, one copy of the tensors trained below
    the head; exemplars at the client.
    """

    paper = 'Hou et al., "Learning a Unified Classifier Incrementally via Rebalancing", CVPR 2019'
    formulas = r"""
    $$L = -\log \operatorname{softmax}_c\bigl( \sigma \cos(f, w_c) \bigr)_y
    + \lambda \sqrt{C_{old} / C_{new}}\; (1 - \cos(f, f_{old})) + \rho L_{mr}$$

    For an exemplar, with its $K$ nearest new classes $j$:

    $$L_{mr} = \frac{1}{K} \sum_j \max\bigl( 0,\; m - \cos(f, w_y) + \cos(f, w_j) \bigr)$$
    """

    distil: float = option(
        5.0,
        "lambda, weight of 1 - cos(f, f_old); multiplied by sqrt(old / new classes) (5: released "
        "code)",
        low=0,
    )
    ranking: float = option(1.0, "rho, weight of the margin ranking loss", low=0)
    hardest: int = option(
        2, "K, number of nearest new classes with which an exemplar is compared", low=1
    )
    margin: float = option(0.5, "m, margin between cosines in the ranking loss", low=0)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L_ce of sigma cos(f, w_c) over the classes seen.
        features, task = self.features(backbone, train, batch), ctx.task
        scores = self.scores(features, train, ctx)
        loss = batch.mean(self.classification(train["sigma"] * scores, batch, ctx))
        if task.index == 0:
            return loss, self.sums(features, batch)
        # Less-forget constraint: lambda sqrt(C_old / C_new) (1 - cos(f, f_old)), mean over images.
        weight = self.distil * math.sqrt(task.start / task.size)
        loss = loss + weight * batch.mean(cosine_distance(features, batch.teacher))
        # L_mr, margin ranking: exemplars of old classes against their K nearest new classes.
        ranking = margin_ranking(scores, batch, task.start, self.hardest, self.margin)
        return loss + self.ranking * ranking, self.sums(features, batch)

    def classification(self, logits: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """Compute the cross-entropy over all classes seen so far.

        Args:
            logits: Logits [B, C].
            batch: Labels of the images.
            ctx: Task and broadcast tensors.

        Returns:
            Losses [B].
        """
        return F.cross_entropy(logits, batch.y, reduction="none")

    def sums(self, features: Tensor, batch: Batch) -> Tree:
        """Return the sums of a step that the client uploads: none in LUCIR.

        Args:
            features: Features [B, D].
            batch: Labels and weights of the images.
        """
        return {}
