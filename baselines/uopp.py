"""UOPP: few-shot federated class-incremental learning with optimal prompts and prototypes.

Ma'sum et al., "Federated Few-Shot Class-Incremental Learning", ICLR 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregators.averaging import stack_uploads
from fczoo.baselines._uopp_prototypes import (
    ABSENT,
    merge_by_weight,
    moved_sums,
    query_loss,
    rectify_batch,
    start_rectifier,
)
from fczoo.baselines.pip import PIP
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload
from fczoo.core.registry import register_method
from fczoo.core.training import Optim, TaskPhase, Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Boundary, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import head_logits


@register_method("uopp")
@dataclass(frozen=True)
class UOPP(PIP):
    """PIP for few-shot streams: a linear head in the base task, class prototypes in later tasks.

    For few-shot streams (``--base-classes``, ``--ways``, ``--shots``). Clients train and send
    general prefixes, the task's expert prefixes and key; in the first task also the linear head, in
    later ones the rectifier (``rectify=ode``). In each round, and before the first, they send
    count, sum and sum of squares of the prompted features of each local class. Sources: the
    released code and the supplement, not the paper's text. The released main program never trains
    its rectifier, and its server and loader are missing.
    """

    paper = 'Ma\'sum et al., "Federated Few-Shot Class-Incremental Learning", ICLR 2025'
    formulas = r"""
    First task: the loss of PIP. Later tasks, over the classes seen that have a prototype $m_c$:

    $$L = -\log \operatorname{softmax}_c\bigl( s \cos(f(x), m_c) \bigr)_y
    - \lambda \cos(q, k_t) + \gamma \, L_{ode}$$

    A test image takes the prompt with the nearest key and the class of the largest cosine. With
    ``rectify=ode`` a client moves its class means $p$ by an ODE, with its images $S$ and copies $Q$
    of global prototypes, and sends them. $L_{ode}$ is the cross-entropy of the prototypes:

    $$\frac{dp}{dt} = 0.1^{1 + t/40} \, D(p, S, Q), \quad 0 \le t \le 39$$
    """
    append_only = (*PIP.append_only, "old_")
    dataset_options = {"digits": {"lr": 3e-2, "lr_few": 3e-2}}

    lr: float = option(
        1.5e-2,
        "learning rate in the first task, Adam (0.03 * batch size / 256, for batches of 128)",
        low=0,
        tune=(1e-4, 1e-1, "log"),
    )
    lr_few: float = option(
        0.2, "learning rate in later tasks, Adam", low=0, tune=(1e-4, 1.0, "log")
    )
    warm_start: bool = option(
        True, "initialise a task's expert prefixes from the last task's; its key at random"
    )
    scale: float = option(10.0, "s, scale of the cosines with prototypes", low=0)
    weights: Literal["images", "participations"] = option(
        "images",
        "weights of clients: images, number of images; participations, number of the task's rounds "
        "in which the client trained (released code for prompts, keys and prototypes)",
    )
    rectify: Literal["none", "ode"] = option(
        "none",
        "prototypes of later tasks: none, class means (released code); ode, means moved by the "
        "rectifier of the paper's supplement",
    )
    rectify_weight: float = option(0.5, "gamma, weight of L_ode, with rectify=ode", low=0)
    lr_rectifier: float = option(1e-3, "learning rate of the rectifier, with rectify=ode", low=0)
    head_width: int = option(
        8, "width of the rectifier's attention heads, with rectify=ode (released: 64)", low=1
    )
    ode_steps: int = option(39, "steps of the ODE solver, with rectify=ode", low=1)
    repeats: int = option(
        5, "copies of each global prototype in Q, with rectify=ode (released: shots)", low=1
    )
    squared_variance: bool = option(
        False,
        "shift copies of prototypes by u * variance^2, not u * standard deviation; do not combine "
        "it with code_variance, which includes this square",
        quirk="anwarmaxsum/FFSCIL",
    )
    batch_vote: bool = option(
        False,
        "choose one prompt per test batch, by vote. If it is the first prompt, the head of the "
        "first task predicts; else the nearest prototype among the classes up to the batch's true "
        "task, which is given",
        quirk="anwarmaxsum/FFSCIL",
    )
    reset_prompt: bool = option(
        False,
        "in later tasks, initialise expert prefixes from the last task's in every round, which "
        "discards what earlier rounds learned",
        quirk="anwarmaxsum/FFSCIL",
    )

    def training(self) -> Training:
        training = super().training()
        few = {prefix: self.optim(self.lr_few) for prefix in ("general.", "expert.")}
        if self.rectify == "ode":
            few["rectifier."] = self.optim(self.lr_rectifier)
        base = dict(training.optims)

        def active(task: Task, round: int) -> Mapping[str, Optim]:
            return few if task.index else base  # the head is frozen after the first task

        return replace(
            training,
            optims={**few, **base},
            active_prefixes=active,
            collect_at={*training.collect_at, "task_start"},
            averages_trained=self.weights == "images",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        old = {"old_mean": torch.empty(0, backbone.dim), "old_held": torch.empty(0)}
        if state:  # task boundary: prototypes of finished tasks are fixed
            old = {k: torch.cat([state[k], state[k.replace("old_", "")]]) for k in old}
        ends = state.get("task_ends", torch.empty(0, dtype=torch.int64))
        ends = torch.cat([ends, torch.tensor([task.stop], device=ends.device)])
        new = {"taken_part": torch.empty(0), "task_ends": ends}
        if self.rectify == "ode":
            new |= start_rectifier(backbone.dim, task.size, self.head_width, rng)
        return {**super().begin_task(state, task, backbone, rng), **old, **new}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Base task: PIP's loss. Few-shot tasks: L_ce over prototypes - lambda cos + gamma L_ode.
        if ctx.task.index == 0:  # base task: PIP's loss, prototypes at the head from round 2 on
            return super().loss(backbone, train, batch, ctx)
        features = self.trained_features(backbone, train, batch)  # later tasks: L of the formulas
        loss = self.few_shot_loss(features, batch, ctx.shared)
        if self.rectify == "ode":  # gamma L_ode
            rectified = rectify_batch(train, features, batch, ctx, self.repeats, self.ode_steps)
            loss = loss + self.rectify_weight * query_loss(*rectified, ctx.shared, self.scale)
        if self.no_key_loss:
            return loss, {}
        similarity = cosines(batch.query, train["expert.key"][None])[:, 0]  # lambda cos(q, k_t)
        return loss - self.pull * batch.mean(similarity), {}

    def prototype_loss(self, train: Tree, batch: Batch, ctx: Context) -> Tensor:
        if self.squared_variance:  # V = variance^2 instead of the deviation
            ctx = replace(ctx, shared={**ctx.shared, "spread": ctx.shared["spread"] ** 4})
        return super().prototype_loss(train, batch, ctx)

    def few_shot_loss(self, features: Tensor, batch: Batch, shared: Tree) -> Tensor:
        """Compute the cross-entropy of s cos(f, m_c) over all classes seen with a prototype.

        Args:
            features: Prompted features f [B, D].
            batch: Labels and weights; images of a class without prototype have weight 0.
            shared: Tree with the prototypes.
        """
        held = self.prototypes(shared)[1]
        per_image = F.cross_entropy(self.scores(features, shared), batch.y, reduction="none")
        return batch._replace(w=batch.w * held[batch.y]).mean(per_image)

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Local prototypes, before the first round and after local training: n, sum f, sum f^2. With
        # ``rectify=ode`` the class means move to the rectified prototypes.
        sums = super().collect("after_training", backbone, tree, batch, ctx)
        if self.rectify == "ode" and ctx.task.index:
            features = self.trained_features(backbone, tree, batch)
            prototypes = rectify_batch(tree, features, batch, ctx, self.repeats, self.ode_steps)[0]
            sums |= moved_sums(sums, prototypes)
        if phase == "task_start" and self.head_init == "means":
            sums |= class_sums(self.trained_features(backbone, tree, batch), batch, ctx.task)
        return sums

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if self.head_init == "means" and ctx.task.index == 0:
            state = super().update_from(phase, state, sums, ctx)
        return super().server_update(state, select(sums, "proto."), ctx)

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        if self.weights == "images":
            return super().aggregate(payloads, average)
        # Participation weights are known to the server only: it averages in ``server_update``.
        return stack_uploads(payloads)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Update prompts and prototypes; with ``weights=participations`` average them here.

        Args:
            state: Current state.
            merged: Merged uploads; with ``participations`` ``clients`` [K] and uploads [K, ...].
            ctx: Server context.
        """
        if self.weights == "participations":
            taken_part = state["taken_part"]
            if not len(taken_part):
                taken_part = torch.zeros(ctx.clients, device=taken_part.device)
            clients = merged.pop("clients")
            taken_part = taken_part.index_add(0, clients, torch.ones_like(clients).to(taken_part))
            merged = merge_by_weight(merged, taken_part[clients])
            state = {**state, "taken_part": taken_part}
        state = super().server_update(state, merged, ctx)
        if self.reset_prompt and ctx.task.index and ctx.round < ctx.rounds - 1:
            for name in drop(select(state, "expert."), "expert.key"):
                state[name] = state[name.replace("expert.", "past.", 1)][-1]
        return state

    def match(self, state: Tree, query: Tensor) -> Tensor:
        chosen = super().match(state, query)
        return chosen.mode().values.expand_as(chosen) if self.batch_vote else chosen

    def prototypes(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Return prototypes [C', D] of the classes seen, and which classes have one [C']."""
        mean = torch.cat([tree["old_mean"], tree["mean"]])
        return mean, torch.cat([tree["old_held"], tree["held"]])

    def scores(self, features: Tensor, tree: Tree) -> Tensor:
        """Compute s cos(f, m_c) [B, C'] over the classes seen; ABSENT without a prototype."""
        mean, held = self.prototypes(tree)
        return torch.where(held > 0, self.scale * cosines(features, mean), ABSENT)

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: prompt by key, then argmax of s cos(f, m_c) over all classes seen.
        features = self.features(backbone, state, batch)
        scores = self.scores(features, state)
        if not self.batch_vote:
            return scores
        if self.match(state, batch.query)[0] == 0:
            return head_logits(state, features)[:, : task.stop]
        ends = state["task_ends"]
        end = ends[(ends[:-1] <= batch.y.max()).sum()]  # of the images' own task
        return torch.where(torch.arange(task.stop, device=ends.device) < end, scores, ABSENT)
