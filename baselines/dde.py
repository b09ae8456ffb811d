"""DDE in federated learning: Distilling Causal Effect of Data in Class-Incremental Learning.

Hu et al., CVPR 2021.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines.lucir import LUCIR
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context, LocalData, Task
from fczoo.functional.cosine import cosines


def neighbours(features: Tensor, pool: Tensor, own: Tensor, number: int) -> Tensor:
    """Find the rows of a pool that are nearest to each feature, nearest first.

    Features and pool are normalised to length 1.

    Args:
        features: Features [n, D].
        pool: Features [m, D] to choose from.
        own: Row of each feature in the pool [n], which is excluded; -1 if the pool does not contain
            the feature.
        number: Number of neighbours.

    Returns:
        Row indices [n, K], with K = min(``number``, m - 1).
    """
    distance = torch.cdist(F.normalize(features, dim=-1), F.normalize(pool, dim=-1))
    itself = torch.arange(len(pool), device=own.device) == own[:, None]
    distance = distance.masked_fill(itself, torch.inf)
    return distance.topk(min(number, len(pool) - 1), dim=1, largest=False).indices


def colliding_effect(logits: Tensor, labels: Tensor, answers: Tensor) -> Tensor:
    """Compute the loss with the colliding effect: -log(p_y / 2 + mean_j q_jy / 2) of each image.

    p is the softmax of the logits, q_j that of neighbour j.

    Args:
        logits: Logits [B, C].
        labels: Labels y [B].
        answers: Softmax outputs q of the neighbours [B, K, C], without gradient.

    Returns:
        Losses [B]; with K = 0 the cross-entropy.
    """
    log_p = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    if not answers.shape[1]:
        return -log_p
    q_mean = answers.mean(1).gather(1, labels[:, None])[:, 0]
    return -torch.logaddexp(
        log_p, q_mean.clamp(min=torch.finfo(log_p.dtype).tiny).log()
    ) + math.log(2)


def remove_momentum_effect(
    features: Tensor, rows: Tensor, direction: Tensor, sigma: Tensor, part: float
) -> Tensor:
    """Compute logits without the momentum effect: z_c = sigma w_c^T (f - part (f^T h) h).

    f, w_c and h are normalised to length 1 here.

    Args:
        features: Features f [B, D].
        rows: Class weights W [C, D].
        direction: Momentum direction h [D]; a direction of 0 removes nothing.
        sigma: Scale of the cosines.
        part: Share of the component along h that is removed.

    Returns:
        Logits [B, C].
    """
    f, h = F.normalize(features, dim=-1), F.normalize(direction, dim=-1)
    logits: Tensor = sigma * (f - part * (f @ h)[:, None] * h) @ F.normalize(rows, dim=-1).mT
    return logits


@register_method("dde")
@dataclass(frozen=True)
class DDE(LUCIR):
    """LUCIR with the colliding effect in training, and without the momentum effect at test.

    Colliding effect: each image's probability is averaged with those of its nearest new images at
    the same client, by the teacher's features of the test view. The neighbours' outputs are those
    of the model at the start of the round (the released code computes them with the model of each
    step, on new views in each epoch). Momentum effect: at test a part of the component along h, the
    clients' mean feature of the last round, is removed from the logits. Only this variant, on
    LUCIR, was released. Clients train and send the tensors of LUCIR, and send the mean feature.
    Memory beyond the model: the teacher, one copy of the tensors trained below the head; at the
    client exemplars, and indices and outputs of neighbours.
    """

    paper = 'Hu et al., "Distilling Causal Effect of Data in Class-Incremental Learning", CVPR 2021'
    formulas = r"""
    In place of LUCIR's cross-entropy, with the $K$ nearest new images $j$:

    $$L_{ce} = -\log \Bigl( \frac{1}{2} p_y + \frac{1}{2 K} \sum_j q_{j,y} \Bigr)$$

    At test, with all vectors of length 1 and the mean feature $h$:

    $$z_c = \sigma w_c^\top (f - \alpha (f^\top h) h)$$
    """

    nearest: int = option(
        10, "number K of neighbours whose outputs are averaged with an image's own (0: off)", low=0
    )
    alpha: float = option(
        0.5, "alpha, share of the component along h that is removed at test (0: off)", low=0
    )

    def training(self) -> Training:
        training = super().training()
        return replace(
            training, uploads={**training.uploads, "momentum": whole_tensors("class means")}
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary as LUCIR; h restarts at 0.
        return {
            **super().begin_task(state, task, backbone, rng),
            "momentum": torch.zeros(backbone.dim),
        }

    def before_training(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Find neighbours once per task, and predict the client's new images once per round.

        Args:
            backbone: The frozen backbone.
            data: Local data of the client: new images and exemplars.
            ctx: Memory of the client and the broadcast tensors.

        Returns:
            The memory with ``near.position`` and ``near.row`` [n, K] of the neighbours, and
                ``near.answer`` [m, C], the softmax outputs of the m new images.
        """
        memory = ctx.memory
        if ctx.task.index == 0:
            return memory
        if "near.task" not in memory or int(memory["near.task"]) != ctx.task.index:
            # Colliding effect: find the K nearest other images of each image, by the old model's
            # normalised features. The pool has only new images; exemplars have row -1.
            exemplars = memory.get("exemplar.index", data.index[:0])
            position = torch.cat([data.index, exemplars])
            self_rows = torch.cat([torch.arange(len(data.index)), torch.full_like(exemplars, -1)])
            batches = data.batches(position)
            old = torch.cat(
                [self.teacher_outputs(backbone, ctx.shared, batch, ctx.task) for batch in batches]
            )
            pool = old[: len(data.index)]
            nearest_rows, order = (
                neighbours(old, pool, self_rows.to(old.device), self.nearest),
                position.argsort(),
            )
            memory = {
                **memory,
                "near.task": torch.tensor(ctx.task.index),
                "near.position": position[order].to(old.device),
                "near.row": nearest_rows[order.to(nearest_rows.device)],
            }
        # q_j: softmax outputs of all new images under the received model, without gradient.
        model, rows = ctx.shared, torch.cat([ctx.shared["head.old"], ctx.shared["head.new"]])
        answers = [
            model["sigma"] * cosines(self.features(backbone, model, batch), rows)
            for batch in data.batches(data.index)
        ]
        return {**memory, "near.answer": torch.cat(answers).softmax(-1)}

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return ctx.memory, {}

    def sums(self, features: Tensor, batch: Batch) -> Tree:
        # Momentum effect: sum and number of the features that local training sees.
        return {"sum": (features.detach() * batch.w[:, None]).sum(0), "count": batch.w.sum()}

    def classification(self, logits: Tensor, batch: Batch, ctx: Context) -> Tensor:
        # Colliding effect instead of LUCIR's cross-entropy: -log(p_y / 2 + mean_j q_{j,y} / 2).
        if ctx.task.index == 0:
            return super().classification(logits, batch, ctx)
        slots = torch.searchsorted(ctx.memory["near.position"], batch.position)
        return colliding_effect(
            logits, batch.y, ctx.memory["near.answer"][ctx.memory["near.row"][slots]]
        )

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        # Momentum effect: the client's mean feature of the round. The server averages these with
        # weights n_k to h.
        return {**train, "momentum": sums["sum"] / sums["count"]} if ctx.task.index else {**train}

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        memory, upload = super().end_task_client(backbone, data, ctx)
        return drop(memory, "near."), upload

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: z_c = sigma w_c^T (f - alpha (f^T h) h), with all vectors of length 1.
        features = F.normalize(self.features(backbone, state, batch), dim=-1)
        rows = torch.cat([state["head.old"], state["head.new"]])
        return remove_momentum_effect(features, rows, state["momentum"], state["sigma"], self.alpha)
