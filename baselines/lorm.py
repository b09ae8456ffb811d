"""LoRM: Closed-form Merging of Parameter-Efficient Modules for federated continual learning.

Salami et al., ICLR 2025.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop, select, stack_past
from fczoo.core.types import Batch, Boundary, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.heads import LinearHead, head_logits, merge_task_rows
from fczoo.functional.input_subspaces import layer_grams
from fczoo.functional.lora import (
    alternate_factors,
    chosen_blocks,
    fused_pairs,
    fused_plugs,
    layer_of,
)
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.regmean import (
    divide_by_gram,
    multiply_gram,
    regression_mean,
    regression_mean_of_b,
)
from fczoo.protocols.registry import use_protocol_options


@register_method("lorm")
@use_protocol_options("hgp", "lorm", column=1)
@dataclass(frozen=True)
class LoRM(LinearHead):
    """LoRA with alternately trained B and A, merged in closed form over clients and tasks.

    In a task's first round clients train and send B of every linear layer, in the next A, and so
    on. In every round they also train and send the linear head, and send the Gram matrices of the
    layers' inputs. The server computes the factor whose outputs are nearest to those of all clients
    on their own inputs. After a task clients send Gram matrices at the merged factors, by which the
    server merges the tasks in the same way. A new task starts a new pair on the pre-trained
    weights. ``--aggregator`` merges only the head's bias.
    """

    paper = (
        'Salami et al., "Closed-form Merging of Parameter-Efficient Modules for Federated '
        'Continual Learning", ICLR 2025, arXiv 2410.17961'
    )
    formulas = r"""
    $$B = \Bigl( \sum_k B_k A G_k \Bigr) A^\top (A G A^\top)^+, \quad G = \sum_k G_k$$

    $$A = \Bigl( \sum_k A_k G_k \Bigr) G^+$$

    $$W = W_0 + \Bigl( \sum_i B_i A_i G_i \Bigr) \Bigl( \sum_i G_i \Bigr)^+$$

    $B$ and $A$ alternate over the rounds. From the end of the second task on, $W$ is the merge over
    all tasks $i$ so far. $G_k$ is the Gram matrix of the layer's inputs with off-diagonal entries
    multiplied by $\gamma$.
    """
    server_only = ("total.", "full.")

    rank: int = option(4, "LoRA rank r", low=1, tune=[1, 4, 16])
    blocks: tuple[int, ...] | None = option(None, "blocks with LoRA; none: all", low=0)
    lr: float = option(3e-3, "learning rate of head, A and B", low=0, tune=(1e-4, 1e-1, "log"))
    lr_a: float | None = option(None, "learning rate of A; none: lr", low=0)
    lr_b: float | None = option(None, "learning rate of B; none: lr", low=0)
    gamma: float = option(
        0.0, "factor on off-diagonal entries of the layers' Gram matrices", low=0, high=1
    )
    gamma_head: float = option(
        0.5, "factor on off-diagonal entries of the head's Gram matrix", low=0, high=1
    )
    view: Literal["test", "train"] = option(
        "test", "view of the images for Gram matrices: test; train, random views (fed-mammoth)"
    )
    passes: int = option(
        1,
        "passes over the images for Gram matrices, with view=train (fed-mammoth: regmean_rounds)",
        low=1,
    )

    def training(self) -> Training:
        # Alternation: B trains in the first round of a task, A in the next, and so on; the head in
        # every round.
        rates = {"lora_b.": self.lr_b, "lora_a.": self.lr_a, "head.": self.lr}
        optims = {k: self.optim(self.lr if rate is None else rate) for k, rate in rates.items()}
        training = Training(
            optims,
            uploads={"gram.": whole_tensors("second moments")},
            collect_at={"after_training", "task_end"},
            collect_view=self.view,
            collect_passes=self.passes,
            active_prefixes=alternate_factors,
            averages_trained=False,
        )
        return self.with_head_means(training)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: start a new pair on the pre-trained weights. B = 0; the server draws A.
        blocks = chosen_blocks(backbone, self.blocks)
        fresh = fused_pairs(backbone, blocks, self.rank, rng, "lorm.blocks")
        if not state:
            return {**fresh, **self.start_head(task, backbone.dim, rng)}
        return {**drop(state, "full."), **stack_past(state, "lora_", "past_lora_"), **fresh}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client: L_ce under W_0 + B A, without the pairs of earlier tasks.
        features = self.trained_features(backbone, {**ctx.shared, **train}, batch)
        return task_cross_entropy(head_logits(train, features), batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features under the merged W; within a task under the mean of the tasks' pairs.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``full.*`` after a task, else with the tasks' pairs.
            batch: Images.

        Returns:
            Features [B, D].
        """
        plugs: Mapping[str, Tensor] = select(tree, "full.") or fused_plugs(tree)
        return backbone(batch.x, plugs)

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features with only the current task's pair.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``lora_a.*`` and ``lora_b.*``.
            batch: Images.

        Returns:
            Features [B, D].
        """
        return backbone(batch.x, fused_plugs(select(tree, "lora_")))

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client: G_k of each layer's inputs under W_0 plus the mean of the tasks' pairs. In a round
        # the current pair is the client's; as the task ends it is the merged one.
        tree = {**ctx.shared, **tree}
        names = [layer_of(name) for name in select(tree, "lora_a.")]
        features, inputs = backbone.features_and_taps(batch.x, names, fused_plugs(tree))
        weight = batch.w / self.passes if self.view == "train" else batch.w
        grams = layer_grams(inputs, weight, self.gamma)
        if phase == "task_end":
            return grams
        return {**grams, **layer_grams({"head": features}, weight, self.gamma_head)}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """Stack the clients' factors and Gram matrices for the merge, and merge the head.

        Args:
            payloads: Uploads of the clients.
            average: Merges the head's bias.

        Returns:
            Factors and Gram matrices [K, ..], and the merged head.
        """
        sides = {
            k: torch.stack([p[k] for p in payloads])
            for k in payloads[0].only("lora_", "gram.blocks.")
        }
        # Head, RegMean: W = (sum_k W_k G_k) (sum_k G_k)^+.
        weight = regression_mean(
            [p["head.weight"] for p in payloads], [p["gram.head"] for p in payloads]
        )
        return {**sides, "head.weight": weight, **average([p.only("head.bias") for p in payloads])}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # The head changes only in the rows of the current task.
        state = {**state, **merge_task_rows(state, merged, ctx.task)}
        for name, factors in select(merged, "lora_").items():
            grams = merged[f"gram.{layer_of(name)}"]
            # Merge after a round that trained A: A = (sum_k A_k G_k) G^+ with G = sum_k G_k.
            if name.startswith("lora_a."):
                state[name] = regression_mean(list(factors), list(grams))
            # Merge after a round that trained B: B = (sum_k B_k A G_k) A^T (A G A^T)^+.
            else:
                state[name] = regression_mean_of_b(
                    factors, state[name.replace("lora_b.", "lora_a.")], grams
                )
        return state

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Merge the tasks as a task ends.

        Args:
            phase: ``task_start`` for the head's means, ``task_end`` for the merge.
            state: Current state.
            sums: ``gram.LAYER`` of all clients, at the merged factors.
            ctx: Server context, with the pre-trained weights.

        Returns:
            The state with ``full.*`` W, and the running sums ``total.*``.
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        state = dict(state)
        for name, down in select(state, "lora_a.").items():
            layer = layer_of(name)
            delta, gram = (
                state[name.replace("lora_a.", "lora_b.")] @ down,
                sums[f"gram.{layer}"].double(),
            )
            # Merge of tasks i: W = W_0 + (sum_i B_i A_i G_i) (sum_i G_i)^+; first task: W_0 + B A.
            product = multiply_gram(delta, gram)
            if ctx.task.index:
                product, gram = (
                    product + state[f"total.product.{layer}"],
                    gram + state[f"total.gram.{layer}"],
                )
                delta = divide_by_gram(product, gram)
            state |= {f"total.product.{layer}": product, f"total.gram.{layer}": gram}
            weight = ctx.backbone.weights[f"{layer}.weight"]
            state[f"full.{layer}.weight"] = (weight.double() + delta).to(down)
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: the merged W, argmax over the classes seen.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]
