"""FedProTIP: federated class-incremental learning with gradient projection and task identity prediction.

Cha et al., 2025.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from fczoo.baselines.fot import FOT
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment, ServerContext, Task
from fczoo.functional.grams import layer_grams, unpacked
from fczoo.functional.heads import head_logits
from fczoo.functional.subspaces import extended, outside_of


@register_method("fedprotip")
@dataclass(frozen=True)
class FedProTIP(FOT):
    """Clients step outside the subspaces of earlier inputs; the task of each test image is predicted.

    Which task's subspace holds most of an image's feature tells which classes compete for it. As FOT, with
    the projection in every step of a client instead of once a round on the server, so that the bases of the
    layers are broadcast. After a task clients also send, once, the Gram matrix of their final features, of
    which each task keeps some leading directions outside those of the tasks before. The released code asks
    for the task of a whole batch of test images that come from one task; that is another protocol and is not
    offered: here each image is asked alone. What all features share, such as their mean, falls to the first
    task's directions, which can then hold most of every image: on digits all answers are of the first task.
    Compare with ``identity=off``.
    """

    paper = "Cha et al., FedProTIP, 2025, arXiv 2509.21606"
    formulas = r"""
    In every step of a client, with $W_r$ the layer's weights as the round began:

    $$W \leftarrow W_r + (W - W_r)(I - U U^\top)$$

    $$\hat y(x) = \underset{c \in C_j}{\operatorname{argmax}}\; z_c, \quad
    j = \underset{i}{\operatorname{argmax}}\; \lVert M_i^\top f(x) \rVert^2$$

    The columns of $U$ span the layer's inputs in earlier tasks, those of $M_i$ the leading new directions of
    the final features in task $i$.
    """
    private = ("space", "owner")  # which task an image is of is predicted by the server

    threshold: float = option(0.7, "part of the inputs' energy to be kept, in the first task", low=0, high=1)
    directions: int = option(
        20, "directions of the final features that a task keeps, if all tasks' fit in", low=1
    )
    identity: Literal["hard", "soft", "off"] = option(
        "hard",
        "classes compete within the task whose directions hold most of the feature; over all, the log of a "
        "softmax over the tasks' parts added; or over all as they are",
    )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        own = torch.full((task.size,), task.index)
        if not state:
            none = {"space": torch.zeros(backbone.dim, 0), "space_task": own[:0], "owner": own}
            return {**super().begin_task(state, task, backbone, rng), **none}
        return {**state, "owner": torch.cat([state["owner"], own.to(state["owner"])])}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        return super().loss(backbone, projected(train, ctx.shared), batch, ctx)

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        return {**projected(train, ctx.shared), **sums}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        return {**state, **merged}

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        sums = super().survey(moment, backbone, state, batch, task)
        if moment == "begin":
            return sums
        return {**sums, **layer_grams({"space": self.features(backbone, state, batch)}, batch.w, gamma=1.0)}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Task's end: the layers' bases grow as FOT's, the space by its leading new directions."""
        if moment == "begin":
            return super().absorb(moment, state, sums, ctx)
        grams = {k: v for k, v in sums.items() if k != "gram.space"}
        state, space = super().absorb(moment, state, grams, ctx), state["space"]
        number = max(min(self.directions, len(space) // ctx.task.count), 1)
        grown = extended(space, unpacked(sums["gram.space"], len(space)), 0.0, least=number)
        new = state["owner"].new_full((grown.shape[1] - space.shape[1],), ctx.task.index)
        return {**state, "space": grown, "space_task": torch.cat([state["space_task"], new])}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        features = self.features(backbone, state, batch)
        logits = head_logits(state, features)[:, : task.stop]
        if self.identity == "off":
            return logits
        held = held_parts(features, state["space"], state["space_task"], task.index + 1)
        if self.identity == "soft":
            return logits + held.log_softmax(1)[:, state["owner"]]
        outside = state["owner"] != held.argmax(1, keepdim=True)
        return logits.masked_fill(outside, torch.finfo(logits.dtype).min)


def projected(train: Tree, shared: Tree) -> Tree:
    """What a client has trained, without what its change since the round's start has inside the bases.

    The gradient through it is g - g M M^T, so that plain gradient descent never leaves it; other optimizers
    and weight decay do, and what is inside is taken out of their steps as well.
    """
    tree = dict(train)
    for name, basis in select(shared, "basis.").items():
        weight = name.replace("basis.", "full.", 1) + ".weight"
        tree[weight] = shared[weight] + outside_of(train[weight] - shared[weight], basis)
    return tree


def held_parts(features: Tensor, space: Tensor, tasks: Tensor, count: int) -> Tensor:
    """|M_j^T f|^2 / |f|^2 [B, t] of features f [B, D]: M_j the columns of ``space`` [D, m] of task j."""
    unit = F.normalize(features, dim=-1)
    return (unit @ space.to(unit)).square() @ F.one_hot(tasks, count).to(unit)
