"""FFA-LoRA: Improving LoRA in Privacy-preserving Federated Learning. Sun et al., ICLR 2024."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, OptimizerName, Task, Training
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.lora import chosen_blocks, fixed_plugs, lora_pairs, next_pairs, with_fixed
from fczoo.functional.losses import task_cross_entropy

PARTS = ("q", "k", "v", "proj", "fc1", "fc2")


@register_method("ffalora")
@dataclass(frozen=True)
class FFALoRA(LinearHead):
    """LoRA whose A matrices are drawn once and stay: averaging B averages the product B A exactly.

    Trained and sent: B on all linear layers of the chosen blocks, and the linear head. q, k, v share an A.
    """

    paper = "Sun et al., ICLR 2024; form of fed-mammoth (Salami et al.)"
    formulas = r"""
    $$B = \sum_k \frac{n_k}{n} B_k$$

    $$W_0 + B A = \sum_k \frac{n_k}{n} (W_0 + B_k A)$$

    $A$ is drawn once and the same for all clients.
    """
    tuned = {"digits": {"lr": 1e-2, "rank": 4}}

    rank: int = option(16, "LoRA rank r", low=1, tune=[4, 16])
    blocks: tuple[int, ...] | None = option(None, "blocks with LoRA; none: all", low=0)
    lr: float = option(3e-4, "learning rate", low=0, tune=(1e-4, 1e-1, "log"))
    optimizer: OptimizerName = option("adamw", "optimizer of all that clients train")
    weight_decay: float = option(0.1, "weight decay of all that clients train", low=0)
    merge: Literal["one", "sum", "mean"] = option(
        "one",
        "one pair for all tasks; a new pair a task, earlier ones staying in every forward; or, in testing "
        "alone, the mean of the tasks' pairs",
        quirk={"mean": "fed-mammoth: training sees the current task's pair alone"},
    )

    def training(self) -> Training:
        optim = self.optim(self.lr)
        return Training({"lora.": optim, "head.": optim}, uploads=self.head_uploads())

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state and self.merge == "one":
            return state
        blocks = chosen_blocks(backbone, self.blocks)
        pairs = lora_pairs(backbone, blocks, self.rank, rng, "ffalora.blocks", PARTS)
        for block in blocks:
            for part in "kv":
                pairs[f"lora.{block}.{part}.a"] = pairs[f"lora.{block}.q.a"]
        if not state:
            return {**with_fixed(pairs), **self.start_head(task, backbone.dim, rng)}
        return next_pairs(state, with_fixed(pairs))

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = self.trained_features(backbone, {**ctx.shared, **train}, batch)
        return task_cross_entropy(head_logits(train, features), batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, self.plugs(tree))

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Features [B, D] in a client's forward; with ``merge=mean`` of the current task's pair alone."""
        return backbone(batch.x, self.plugs(drop(tree, "past.") if self.merge == "mean" else tree))

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]

    def plugs(self, tree: Tree) -> Tree:
        """LoRA of all tasks in ``tree`` as one pair a layer: [B_1 .. B_t] [A_1; ..; A_t], or 1/t of it."""
        plugs = fixed_plugs(tree)
        if self.merge == "mean":
            tasks = 1 + max((len(v) for v in select(tree, "past.").values()), default=0)
            plugs = {k: v / tasks if k.endswith(".b") else v for k, v in plugs.items()}
        return plugs
