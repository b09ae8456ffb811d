"""FedProTIP: gradient projection at the clients and task identity prediction.

Cha et al., arXiv 2509.21606.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines.fot import FOT
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.heads import head_logits
from fczoo.functional.input_subspaces import extend_basis, layer_grams, remove_subspace, unpack_gram


@register_method("fedprotip")
@dataclass(frozen=True)
class FedProTIP(FOT):
    """Gradient projection at the clients, and prediction of the task of each test image.

    Clients project every step on the complement of the subspaces of earlier tasks' inputs. FOT
    projects once per round on the server instead; here the bases of the layers are broadcast. After
    a task clients also send, once, the Gram matrix of their final features. Each task keeps some of
    its leading directions, outside those of earlier tasks. The task whose directions hold most of
    an image's feature is predicted, and its classes compete. The released code predicts the task of
    a whole batch of test images of one task. That is another protocol and is not offered: here each
    image is predicted separately. Components that all features share, such as their mean, belong to
    the first task's directions, which can then hold most of every image: on digits every image is
    assigned to the first task. Compare with ``identity=off``.
    """

    paper = (
        'FedProTIP: Cha et al., "Task-Agnostic Federated Continual Learning via Replay-Free '
        'Gradient Projection", arXiv 2509.21606'
    )
    formulas = r"""
    In every step of a client, with $W_r$ the layer's weights as the round began:

    $$W \leftarrow W_r + (W - W_r)(I - U U^\top)$$

    $$\hat y(x) = \underset{c \in C_j}{\operatorname{argmax}}\; z_c, \quad
    j = \underset{i}{\operatorname{argmax}}\; \lVert M_i^\top f(x) \rVert^2$$

    The columns of $U$ span the layer's inputs in earlier tasks, those of $M_i$ the leading new
    directions of the final features in task $i$.
    """
    server_only = ("space", "owner")  # the server predicts the task of an image

    threshold: float = option(
        0.7, "share of the inputs' energy that the bases hold, in the first task", low=0, high=1
    )
    directions: int = option(
        20, "directions of the final features kept per task (at most D / number of tasks)", low=1
    )
    identity: Literal["hard", "soft", "off"] = option(
        "hard",
        "use of the predicted task: hard, only its classes compete; soft, add to the logits the "
        "log softmax, over tasks, of the share of the feature's energy in each task's subspace; "
        "off, none",
    )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: record which task owns the new classes; weights and bases continue.
        task_numbers = torch.full((task.size,), task.index)
        if not state:
            none = {
                "space": torch.zeros(backbone.dim, 0),
                "space_task": task_numbers[:0],
                "owner": task_numbers,
            }
            return {**super().begin_task(state, task, backbone, rng), **none}
        return {**state, "owner": torch.cat([state["owner"], task_numbers.to(state["owner"])])}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client, every step: project the gradient, g <- g - g U U^T, of the blocks' linear layers.
        return super().loss(backbone, project_change(train, ctx.shared), batch, ctx)

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        # Project the whole change W - W_r: weight decay and Adam would leave the complement.
        return {**project_change(train, ctx.shared), **sums}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # The clients have projected already; FOT's projection at the server is not needed.
        return {**state, **merged}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # As the task ends: FOT's Gram matrices, and that of the final features.
        sums = super().collect(phase, backbone, tree, batch, ctx)
        if phase == "task_start":
            return sums
        return {
            **sums,
            **layer_grams({"space": self.features(backbone, tree, batch)}, batch.w, gamma=1.0),
        }

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Extend the layers' bases as FOT does, and the space by its leading new directions.

        Args:
            phase: ``task_start`` for the head's means, ``task_end`` for the bases.
            state: Current state.
            sums: Gram matrices of the layers' inputs and ``gram.space`` of the final features.
            ctx: Server context.

        Returns:
            The state with the new ``basis.*``, ``space`` [D, m] and ``space_task`` [m].
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        grams = {k: v for k, v in sums.items() if k != "gram.space"}
        state, space = super().update_from(phase, state, grams, ctx), state["space"]
        number = max(min(self.directions, len(space) // ctx.task.count), 1)
        grown = extend_basis(space, unpack_gram(sums["gram.space"], len(space)), 0.0, least=number)
        new = state["owner"].new_full((grown.shape[1] - space.shape[1],), ctx.task.index)
        return {**state, "space": grown, "space_task": torch.cat([state["space_task"], new])}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Task identity prediction per image: j = argmax_i |M_i^T f|^2. Only classes of task j
        # compete; ``soft`` adds the log softmax of |M_i^T f|^2 / |f|^2 over tasks to the logits.
        features = self.features(backbone, state, batch)
        logits = head_logits(state, features)[:, : task.stop]
        if self.identity == "off":
            return logits
        energy = energy_per_task(features, state["space"], state["space_task"], task.index + 1)
        if self.identity == "soft":
            return logits + energy.log_softmax(1)[:, state["owner"]]
        outside = state["owner"] != energy.argmax(1, keepdim=True)
        return logits.masked_fill(outside, torch.finfo(logits.dtype).min)


def project_change(train: Tree, shared: Tree) -> Tree:
    """Project a client's change since the round's start on the complement of the bases.

    The gradient through the projection is g - g U U^T, so plain gradient descent stays in the
    complement. Other optimizers and weight decay leave it; the projection removes that part too.

    Args:
        train: Tensors that the client has trained.
        shared: Broadcast tensors: the weights W_r as the round began, and ``basis.LAYER`` U.

    Returns:
        The trained tensors with W_r + (W - W_r)(I - U U^T) for each layer with a basis.
    """
    tree = dict(train)
    for name, basis in select(shared, "basis.").items():
        weight = name.replace("basis.", "full.", 1) + ".weight"
        tree[weight] = shared[weight] + remove_subspace(train[weight] - shared[weight], basis)
    return tree


def energy_per_task(features: Tensor, space: Tensor, tasks: Tensor, count: int) -> Tensor:
    """Compute the share |M_j^T f|^2 / |f|^2 of each feature's energy in task j's directions.

    Args:
        features: Features f [B, D].
        space: Directions of all tasks as columns [D, m].
        tasks: Task j of each column [m].
        count: Number t of tasks.

    Returns:
        Shares [B, t], 0 to 1.
    """
    unit = F.normalize(features, dim=-1)
    return (unit @ space.to(unit)).square() @ F.one_hot(tasks, count).to(unit)
