"""Powder: Federated Continual Learning via Prompt-based Dual Knowledge Transfer.

Piao et al., ICML 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregators.averaging import stack_uploads
from fczoo.baselines._powder_correlation import (
    begin_client_tasks,
    client_rows,
    correlate,
    extend_weights,
    merge_clients,
    own_row,
    renew_profiles,
)
from fczoo.baselines._powder_prompts import (
    EXCLUDED,
    block_weights,
    mix,
    not_true_divergence,
    own_pool,
    own_rows,
    pool_of,
    start_prompts,
    start_rows,
    task_logits,
)
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, strip_prefix
from fczoo.core.types import Batch, Boundary, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import PromptedHead, head_logits
from fczoo.functional.prompts import top_positions


@register_method("powder")
@dataclass(frozen=True)
class Powder(PromptedHead):
    """Prompts per client and task, mixed with the prompts of correlated tasks of all clients.

    A task belongs to one client, so clients in different tasks (``--moving``) share prompts. The
    correlation of two tasks comes from the mean prompt weights on their images. Clients train and
    send the prompts of their task (prompt, key, attention) and the linear head. At a task's start
    and in its last round they send counts of images and sums of prompt weights per class. Source:
    the released code, not the paper's text.
    """

    paper = (
        'Piao et al., "Federated Continual Learning via Prompt-based Dual Knowledge Transfer", '
        "ICML 2024"
    )
    formulas = r"""
    Prompts of the client's task $i_0$; $S$ are the tasks $i$ with the largest $W_{i_0 i}$:

    $$p(x) = \sum_{i \in S} \sum_m \cos(q \odot A^i_m, K^i_m) \, P^i_m, \qquad
    K^i = \sum_j W_{ij} K_j, \quad A^i = \sum_j W_{ij} A_j, \quad
    P^i = \frac{1}{|S|} \sum_j W_{ij} P_j$$

    $$L = L_{ce} + \nu \sum_b s_b \, \mathrm{KL} \bigl( \sigma_{\neg y}(z_r / \tau) \,\|\,
    \sigma_{\neg y}(z / \tau) \bigr), \quad s = \sigma \bigl( 1 - \max_j V_{y j} \bigr)$$

    $z_r$ are the logits of the model that the client received, $\sigma_{\neg y}$ the softmax
    without the true class. $W$ compares tasks, $V$ compares classes: cosines of mean prompt weights
    to the power $\rho$.
    """
    server_only = ("profile.",)
    supports_recurring_classes = True
    dataset_options = {"digits": {"lr": 1e-2}}

    lr: float = option(5e-3, "learning rate, Adam", low=0, tune=(1e-4, 1e-1, "log"))
    components: int = option(10, "prompts per task and block", low=1)
    length: int = option(8, "tokens per prompt", low=1)
    blocks: tuple[int, ...] | None = option(
        None, "blocks with prompts; none: three from a third of the depth on (4, 5, 6 of 12)"
    )
    correlation: Literal["profiles", "none"] = option(
        "profiles", "mixing weights W: profiles, from mean prompt weights; none, no mixing of tasks"
    )
    power: int = option(30, "rho, exponent of the cosines", low=1)
    chosen: int = option(3, "number of tasks in S, whose prompts are mixed in training", low=1)
    classes: Literal["held", "task"] = option(
        "held", "classes of the task or stage in the losses: held, those the client has; task, all"
    )
    distil: float = option(9.0, "nu, weight of the distillation without the true class", low=0)
    temperature: float = option(3.0, "tau, temperature of the distillation", low=1e-6)
    task_rows: bool = option(
        False,
        "separate head rows per client and task; a test image is predicted by its task's rows: the "
        "task of a test image is given",
        quirk="piaohongming/Powder",
    )
    tasks_10_14: bool = option(
        False,
        "compare tasks 10 to 14 by the last five entries of their mean prompt weights",
        quirk="piaohongming/Powder",
    )

    def training(self) -> Training:
        uploads = {"class.": per_class("count", "sum", projected=True)}
        if self.head_init == "means":
            uploads["first."] = per_class("count", "sum")
        optims = self.optims(self.optim(self.lr), "own.")
        if self.task_rows:
            optims["rows."] = optims.pop("head.")
        return Training(
            optims,
            inputs=["images", "query"],
            uploads=uploads,
            collect_at={"task_start", "after_training"},
            per_client_statistics=True,
            averages_trained=False,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Start of the run: one draw from U(0, 1) for all tasks. Clients train the change from it.
        if state:
            return state
        sizes = (len(self.blocks_of(backbone)), self.components, self.length)
        head = self.start_head(task, backbone.dim, rng)
        state = start_prompts(sizes, task.classes, (backbone.dim, backbone.token_dim), rng)
        return {**state, **head, **(start_rows(head) if self.task_rows else {})}

    def blocks_of(self, backbone: Backbone) -> tuple[int, ...]:
        """Return the blocks that prompts enter."""
        first = backbone.depth // 3
        blocks = self.blocks or tuple(range(first, min(first + 3, backbone.depth)))
        backbone.check_blocks(blocks, f"{self.name}.blocks")
        return blocks

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        mask = self.class_mask(batch, ctx)
        tree = {**ctx.shared, **train}
        logits = torch.where(mask, self.client_logits(backbone, tree, batch), EXCLUDED)
        loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))  # L_ce
        # Not-true distillation from the received model, from the second round of the run on.
        if self.distil and (ctx.round or ctx.task.index):
            with torch.no_grad():
                received = self.client_logits(backbone, ctx.shared, batch)
            share = (own_row(ctx.shared, batch).to(received) @ ctx.shared["share"])[batch.y]
            scaled = logits / self.temperature, received / self.temperature
            loss = loss + self.distil * not_true_divergence(*scaled, share, mask, batch)
        return loss, {}

    def class_mask(self, batch: Batch, ctx: Context) -> Tensor:
        """Return the mask [C] of the classes in a client's losses."""
        if self.classes == "held":
            return own_row(ctx.shared, batch).to(ctx.shared["holds"]) @ ctx.shared["holds"] > 0
        number = torch.arange(ctx.task.classes, device=batch.y.device)
        return (number >= ctx.task.start) & (number < ctx.task.stop)

    def client_logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute logits [B, C] with the prompts of the client's task and of correlated tasks."""
        row = own_row(tree, batch)
        pool = own_pool(tree, row)  # only the client's own rows have a gradient
        # S: the tasks i with the largest W_{i0,i}; with ``correlation=none`` only i0.
        number = 1 if self.correlation == "none" else min(self.chosen, len(row))
        chosen = top_positions(row.to(tree["weight"])[None] @ tree["weight"], number)[0]
        mixture = mix(pool, F.embedding(chosen, tree["weight"]))  # K^i, A^i, P^i of i in S
        head = own_rows(tree, row) if self.task_rows else tree
        return head_logits(head, self.prompted_features(backbone, mixture, batch))

    def prompted_features(self, backbone: Backbone, mixture: Tree, batch: Batch) -> Tensor:
        """Compute features [B, D]; prompts stay in the sequence up to the last block."""
        tokens = {}
        for position, block in enumerate(self.blocks_of(backbone)):
            alpha = block_weights(batch.query, mixture, position)
            prompts = mixture["prompt"][:, position].flatten(0, 1) / len(mixture["prompt"])
            tokens[f"tokens.{block}"] = torch.einsum("bm,mld->bld", alpha, prompts)  # p(x)
        return backbone(batch.x, tokens)

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        # The server's forward pass belongs to no client: S has all tasks.
        return self.prompted_features(backbone, mix(pool_of(tree), tree["weight"]), batch)

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax over the classes seen (released code: the classes of the image's task).
        features = self.features(backbone, state, batch)
        if self.task_rows:
            return task_logits(state, features, batch.y)[:, : task.stop]
        return head_logits(state, features)[:, : task.stop]

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        """Sum the prompt weights alpha of all tasks per class, for the profiles.

        As a task begins, the start of new tasks' prompts counts as one more task. After training
        only the last round of a task returns sums.

        Returns:
            ``class.count`` [c] and ``class.sum`` [c, blocks T components].
        """
        pool, weight = pool_of(ctx.shared), ctx.shared["weight"]
        if phase == "task_start":
            pool = {k: torch.cat([v, ctx.shared[f"start.{k}"][None]]) for k, v in pool.items()}
            weight = extend_weights(weight, 1)
        elif ctx.round < ctx.rounds - 1:
            return {}
        mixture = mix(pool, weight)
        alpha = [block_weights(batch.query, mixture, i) for i in range(pool["key"].shape[1])]
        sums = class_sums(torch.cat(alpha, 1), batch, ctx.task)
        if phase == "task_start" and self.head_init == "means":
            features = class_sums(self.features(backbone, tree, batch), batch, ctx.task)
            sums |= {k.replace("class.", "first."): v for k, v in features.items()}
        return sums

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        # Begin a task for each client with new images: its prompts and profile; then W and V.
        if self.head_init == "means":
            means = {f"class.{k}": v.sum(0) for k, v in strip_prefix(sums, "first.").items()}
            state = super().update_from(phase, state, means, ctx)
        return self.correlate_tasks(begin_client_tasks(state, sums, ctx), ctx)

    def correlate_tasks(self, state: Tree, ctx: ServerContext) -> Tree:
        """Update W and V of the current tasks; with ``correlation=none`` return the state."""
        if self.correlation == "none":
            return state
        return correlate(state, self.power, ctx.clients if self.tasks_10_14 else 0)

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Prompts belong to one client's task, so the server needs each upload separately.
        return stack_uploads(payloads)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Store each client's prompts in its task's rows; average head rows over class holders.

        Args:
            state: Current state.
            merged: ``clients`` [K] and their uploads [K, ...].
            ctx: Server context.
        """
        share = client_rows(state, merged["clients"])  # [K, T]
        next_state = merge_clients(state, merged, share)
        if "class.count" not in merged:  # not the task's last round
            return next_state
        return self.correlate_tasks(renew_profiles(next_state, merged, share, ctx.task), ctx)
