"""FFA-LoRA: Improving LoRA in Privacy-preserving Federated Learning. Sun et al., ICLR 2024."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import OptimizerName, Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, Task
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.lora import (
    chosen_blocks,
    fix_down_projections,
    fixed_plugs,
    lora_pairs,
    next_pairs,
)
from fczoo.functional.losses import task_cross_entropy

PARTS = ("q", "k", "v", "proj", "fc1", "fc2")


@register_method("ffalora")
@dataclass(frozen=True)
class FFALoRA(LinearHead):
    """LoRA with fixed random A matrices, so that averaging B averages the product B A exactly.

    A is drawn once, or with ``merge=sum`` and ``merge=mean`` once per task, and is the same for all
    clients. Clients train and send B on all linear layers of the chosen blocks, and the linear
    head. q, k and v share one A. The paper uses language models; layers, rank, learning rate and
    weight decay are those of fed-mammoth for vision transformers.
    """

    title = "FFA-LoRA"
    paper = 'Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024'
    formulas = r"""
    $$B = \sum_k \frac{n_k}{n} B_k$$

    $$W_0 + B A = \sum_k \frac{n_k}{n} (W_0 + B_k A)$$

    $A$ is drawn once and the same for all clients.
    """
    dataset_options = {"digits": {"lr": 1e-2, "rank": 4}}

    rank: int = option(16, "LoRA rank r", low=1, tune=[4, 16])
    blocks: tuple[int, ...] | None = option(None, "blocks with LoRA; none: all", low=0)
    lr: float = option(3e-4, "learning rate", low=0, tune=(1e-4, 1e-1, "log"))
    optimizer: OptimizerName = option("adamw", "optimizer of the tensors that clients train")
    weight_decay: float = option(0.1, "weight decay of the tensors that clients train", low=0)
    merge: Literal["one", "sum", "mean"] = option(
        "one",
        "LoRA pairs over tasks: one, the same pair for all; sum, a new pair per task, all used; "
        "mean, a new pair per task, averaged only in testing",
        quirk={"mean": "fed-mammoth: training uses only the current task's pair"},
    )

    def training(self) -> Training:
        # A has the prefix ``fixed.``, which is not trained: clients train and send B and the head.
        optim = self.optim(self.lr)
        return self.with_head_means(Training({"lora.": optim, "head.": optim}))

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the pair continues (paper), or a new pair starts with another A and B = 0.
        if state and self.merge == "one":
            return state
        blocks = chosen_blocks(backbone, self.blocks)
        pairs = lora_pairs(backbone, blocks, self.rank, rng, "ffalora.blocks", PARTS)
        # q, k and v share one A.
        for block in blocks:
            for part in "kv":
                pairs[f"lora.{block}.{part}.a"] = pairs[f"lora.{block}.q.a"]
        if not state:
            return {**fix_down_projections(pairs), **self.start_head(task, backbone.dim, rng)}
        return next_pairs(state, fix_down_projections(pairs))

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client: L_ce under W_0 + B A. FedAvg of B is exact: sum_k p_k B_k A = (sum_k p_k B_k) A.
        features = self.trained_features(backbone, {**ctx.shared, **train}, batch)
        return task_cross_entropy(head_logits(train, features), batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, self.plugs(tree))

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the features in a client's forward pass.

        Args:
            backbone: The frozen backbone.
            tree: Tree with the pairs of all tasks.
            batch: Images.

        Returns:
            Features [B, D]; with ``merge=mean`` under only the current task's pair.
        """
        return backbone(batch.x, self.plugs(drop(tree, "past.") if self.merge == "mean" else tree))

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: W_0 plus the pairs as ``merge`` states, argmax over the classes seen.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]

    def plugs(self, tree: Tree) -> Tree:
        """Build LoRA plugs from the pairs of all tasks, as one pair per layer.

        Args:
            tree: Tree with the pairs of all t tasks.

        Returns:
            [B_1 .. B_t] and [A_1; ..; A_t] of each layer; with ``merge=mean`` B divided by t.
        """
        plugs = fixed_plugs(tree)
        if self.merge == "mean":
            tasks = 1 + max((len(v) for v in select(tree, "past.").values()), default=0)
            plugs = {k: v / tasks if k.endswith(".b") else v for k, v in plugs.items()}
        return plugs
