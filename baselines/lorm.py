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
from fczoo.core.payload import Payload, whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, Moment, ServerAggregator, ServerContext, Task, Training
from fczoo.functional.grams import layer_grams, over, regression_mean, regression_mean_of_b, times
from fczoo.functional.heads import LinearHead, head_logits, kept_rows
from fczoo.functional.lora import by_turns, chosen_blocks, fused_pairs, fused_plugs, layer_of
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.past import joined_past


@register_method("lorm")
@dataclass(frozen=True)
class LoRM(LinearHead):
    """LoRA whose B and A are trained by turns, so that each has a closed-form merge over clients and tasks.

    Trained and sent: in a task's first round B of every linear layer, in the next A, and so on, and the
    linear head; besides, the Gram matrices of the layers' inputs. The server takes the factor whose outputs
    are nearest to all clients' on their own inputs. After a task clients send Gram matrices at the merged
    factors, from which the server merges the tasks in the same way. A new task starts a new pair on the
    pre-trained weights. ``--aggregator`` merges the head's bias alone.
    """

    paper = "Salami et al., ICLR 2025, arXiv 2410.17961"
    formulas = r"""
    $$B = \Bigl( \sum_k B_k A G_k \Bigr) A^\top (A G A^\top)^+, \quad G = \sum_k G_k$$

    $$A = \Bigl( \sum_k A_k G_k \Bigr) G^+$$

    $$W = W_0 + \Bigl( \sum_i B_i A_i G_i \Bigr) \Bigl( \sum_i G_i \Bigr)^+$$

    $B$ and $A$ by turns over the rounds, $W$ from the second task's end over tasks $i$; $G_k$ is the Gram
    matrix of the layer's inputs, its entries beside the diagonal multiplied by $\gamma$.
    """
    private = ("total.", "full.")
    tuned = {  # HGP, appendix H, its middle column
        "cifar100": {"lr": 1e-4, "rank": 16},
        "imagenet_r": {"lr": 1e-3, "rank": 32},
        "imagenet_a": {"lr": 1e-2, "rank": 4},
        "eurosat": {"lr": 3e-3, "rank": 1},
        "cars196": {"lr": 1e-2, "rank": 8},
        "cub200": {"lr": 3e-2, "rank": 1, "gamma_head": 0.3},
    }

    rank: int = option(4, "LoRA rank r", low=1, tune=[1, 4, 16])
    blocks: tuple[int, ...] | None = option(None, "blocks with LoRA; none: all", low=0)
    lr: float = option(3e-3, "learning rate", low=0, tune=(1e-4, 1e-1, "log"))
    lr_a: float | None = option(None, "learning rate of A; none: as the rest", low=0)
    lr_b: float | None = option(None, "learning rate of B; none: as the rest", low=0)
    gamma: float = option(0.0, "factor of the layers' Gram matrices beside their diagonals", low=0, high=1)
    gamma_head: float = option(0.5, "the same in the head", low=0, high=1)
    view: Literal["test", "train"] = option(
        "test", "view of the images whose Gram matrices are sent after a round (fed-mammoth: train)"
    )

    def training(self) -> Training:
        rates = {"lora_b.": self.lr_b, "lora_a.": self.lr_a, "head.": self.lr}
        optims = {k: self.optim(self.lr if rate is None else rate) for k, rate in rates.items()}
        uploads = {"gram.": whole("second moments"), **self.head_uploads()}
        return Training(optims, uploads=uploads, stats=self.view, active=by_turns)

    def surveys(self) -> frozenset[Moment]:
        return super().surveys() | {"end"}

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        blocks = chosen_blocks(backbone, self.blocks)
        fresh = fused_pairs(backbone, blocks, self.rank, rng, "lorm.blocks")
        if not state:
            return {**fresh, **self.start_head(task, backbone.dim, rng)}
        return {**drop(state, "full."), **joined_past(state, "lora_", "past_lora_"), **fresh}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = self.trained_features(backbone, {**ctx.shared, **train}, batch)
        return task_cross_entropy(head_logits(train, features), batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Features [B, D] under the merged weights; within a task under the mean of the tasks' pairs."""
        plugs: Mapping[str, Tensor] = select(tree, "full.") or fused_plugs(tree)
        return backbone(batch.x, plugs)

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Features [B, D] with the task's own pair alone."""
        return backbone(batch.x, fused_plugs(select(tree, "lora_")))

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        return self._grams(backbone, {**ctx.shared, **train}, batch, head=True)

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        if moment == "begin":
            return super().survey(moment, backbone, state, batch, task)
        return self._grams(backbone, state, batch, head=False)

    def _grams(self, backbone: Backbone, tree: Tree, batch: Batch, head: bool) -> Tree:
        """Gram matrices with the mean of the tasks' pairs in the network."""
        names = [layer_of(name) for name in select(tree, "lora_a.")]
        features, inputs = backbone.tapped(batch.x, names, fused_plugs(tree))
        grams = layer_grams(inputs, batch.w, self.gamma)
        return {**grams, **(layer_grams({"head": features}, batch.w, self.gamma_head) if head else {})}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        """What the merge needs: the clients' factors and Gram matrices side by side, the head merged."""
        sides = {k: torch.stack([p[k] for p in payloads]) for k in payloads[0].only("lora_", "gram.blocks.")}
        weight = regression_mean([p["head.weight"] for p in payloads], [p["gram.head"] for p in payloads])
        return {**sides, "head.weight": weight, **average([p.only("head.bias") for p in payloads])}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        state = {**state, **kept_rows(state, merged, ctx.task)}
        for name, factors in select(merged, "lora_").items():
            grams = merged[f"gram.{layer_of(name)}"]
            if name.startswith("lora_a."):
                state[name] = regression_mean(list(factors), list(grams))
            else:
                state[name] = regression_mean_of_b(factors, state[name.replace("lora_b.", "lora_a.")], grams)
        return state

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Task's end: W = W0 + (sum B A G) (sum G)^+, over all tasks."""
        if moment == "begin":
            return super().absorb(moment, state, sums, ctx)
        state = dict(state)
        for name, down in select(state, "lora_a.").items():
            layer = layer_of(name)
            delta, gram = state[name.replace("lora_a.", "lora_b.")] @ down, sums[f"gram.{layer}"].double()
            product = times(delta, gram)
            if ctx.task.index:
                product, gram = product + state[f"total.product.{layer}"], gram + state[f"total.gram.{layer}"]
                delta = over(product, gram)
            state |= {f"total.product.{layer}": product, f"total.gram.{layer}": gram}
            weight = ctx.backbone.weights[f"{layer}.weight"]
            state[f"full.{layer}.weight"] = (weight.double() + delta).to(down)
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]
