"""DDE in federated learning: Distilling Causal Effect of Data in Class-Incremental Learning.

Hu et al., CVPR 2021.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from fczoo.baselines.lucir import LUCIR
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context, LocalData, Task, Training
from fczoo.functional.causal import colliding_effect, neighbours, without_momentum
from fczoo.functional.cosine import cosines


@register_method("dde")
@dataclass(frozen=True)
class DDE(LUCIR):
    """LUCIR whose images also learn from their neighbours' answers, and whose test forgets a direction.

    Each image's probability is mixed with those of its nearest new images of the same client, as the
    teacher sees them at the test view; their answers are those of the model with which the round began (the
    released code asks the model of each step, on new views in each epoch). At test a part of what points
    along h, the clients' mean feature of the last round, is taken out of the logits. Only this form, on
    LUCIR, was released. Trained and sent: as LUCIR, and the mean feature. Memory beyond the model: the
    teacher, one copy of what is trained beneath the head; at the client exemplars, and numbers of
    neighbours and their answers.
    """

    paper = "Hu et al., DDE, CVPR 2021"
    formulas = r"""
    In place of LUCIR's cross-entropy, with the $K$ nearest new images $j$:

    $$L_{ce} = -\log \Bigl( \frac{1}{2} p_y + \frac{1}{2 K} \sum_j q_{j,y} \Bigr)$$

    At test, with all vectors of length 1 and the mean feature $h$:

    $$z_c = \sigma w_c^\top (f - \alpha (f^\top h) h)$$
    """

    nearest: int = option(10, "K, neighbours whose answers are mixed in", low=0)
    alpha: float = option(0.5, "part of the direction h that is taken out at test", low=0)

    def training(self) -> Training:
        training = super().training()
        return replace(training, uploads={**training.uploads, "momentum": whole("class means")})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        return {**super().begin_task(state, task, backbone, rng), "momentum": torch.zeros(backbone.dim)}

    def prepare(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Neighbours, once a task, and the answers of the client's new images, once a round."""
        memory = ctx.memory
        if ctx.task.index == 0:
            return memory
        if "near.task" not in memory or int(memory["near.task"]) != ctx.task.index:
            kept = memory.get("exemplar.index", data.index[:0])
            position = torch.cat([data.index, kept])
            own = torch.cat([torch.arange(len(data.index)), torch.full_like(kept, -1)])
            batches = data.batches(position)
            old = torch.cat([self.teach(backbone, ctx.shared, batch, ctx.task) for batch in batches])
            pool = old[: len(data.index)]
            found, order = neighbours(old, pool, own.to(old.device), self.nearest), position.argsort()
            memory = {
                **memory,
                "near.task": torch.tensor(ctx.task.index),
                "near.position": position[order].to(old.device),
                "near.row": found[order.to(found.device)],
            }
        model, rows = ctx.shared, torch.cat([ctx.shared["head.old"], ctx.shared["head.new"]])
        answers = [
            model["sigma"] * cosines(self.features(backbone, model, batch), rows)
            for batch in data.batches(data.index)
        ]
        return {**memory, "near.answer": torch.cat(answers).softmax(-1)}

    def finish(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return ctx.memory, {}

    def sums(self, features: Tensor, batch: Batch) -> Tree:
        return {"sum": (features.detach() * batch.w[:, None]).sum(0), "count": batch.w.sum()}

    def classification(self, logits: Tensor, batch: Batch, ctx: Context) -> Tensor:
        if ctx.task.index == 0:
            return super().classification(logits, batch, ctx)
        place = torch.searchsorted(ctx.memory["near.position"], batch.position)
        return colliding_effect(logits, batch.y, ctx.memory["near.answer"][ctx.memory["near.row"][place]])

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        return {**train, "momentum": sums["sum"] / sums["count"]} if ctx.task.index else {**train}

    def conclude(self, backbone: Backbone, data: LocalData, ctx: Context) -> tuple[Tree, Tree]:
        memory, upload = super().conclude(backbone, data, ctx)
        return drop(memory, "near."), upload

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        features = F.normalize(self.features(backbone, state, batch), dim=-1)
        rows = torch.cat([state["head.old"], state["head.new"]])
        return without_momentum(features, rows, state["momentum"], state["sigma"], self.alpha)
