"""DOLFIN: exemplar-free FCIL by low-rank adapters orthogonal to earlier tasks' inputs.

2025, arXiv 2510.13567.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.input_subspaces import extend_basis, layer_grams, remove_subspace, unpack_gram
from fczoo.functional.lora import (
    chosen_blocks,
    fix_down_projections,
    fixed_plugs,
    lora_pairs,
    next_pairs,
)
from fczoo.functional.losses import task_cross_entropy


@register_method("dolfin")
@dataclass(frozen=True)
class DOLFIN(LinearHead):
    """One LoRA pair per task on k and v, with A fixed and orthogonal to earlier tasks' inputs.

    Clients train and send B and the linear head. At the start and at the end of a task they send
    the Gram matrices of the inputs of the blocks' attention. From the first ones the server chooses
    A, the same for all clients, so that averaging B averages the product B A exactly. From the last
    ones it extends the subspace of inputs for which later tasks must not change the outputs. The
    paper released no code, and only a summary of it was read: the rule for A, rank and threshold
    are InfLoRA's, from memory of its paper; learning rates are fczoo's.
    """

    paper = (
        'Moussadek et al., "DOLFIN: Balancing Stability and Plasticity in Federated Continual '
        'Learning", ICIAP workshops 2025, arXiv 2510.13567; A chosen as in InfLoRA: Liang and Li, '
        '"InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning", CVPR 2024'
    )
    formulas = r"""
    With $G = \sum_k X_k X_k^\top$ of a layer's inputs and $M$ a basis of earlier tasks' inputs:

    $$A_t = \text{leading } r \text{ eigenvectors of } (I - M M^\top)\, G\, (I - M M^\top)$$

    $$W_t = W_0 + \sum_{s \le t} B_s A_s, \quad B_t = \sum_k \frac{n_k}{n} B_{t,k}$$
    """
    server_only: ClassVar[tuple[str, ...]] = ("basis.",)

    rank: int = option(10, "LoRA rank r", low=1)
    blocks: tuple[int, ...] | None = option(None, "blocks with LoRA; none: all blocks", low=0)
    threshold: float = option(
        0.98,
        "share of the inputs' energy inside the protected subspace, in the first task; it rises "
        "linearly towards 1 over the tasks",
        low=0,
        high=1,
    )
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    lr_lora: float = option(1e-3, "learning rate of B", low=0, tune=(1e-5, 1e-1, "log"))

    def training(self) -> Training:
        optims = {"lora.": self.optim(self.lr_lora), "head.": self.optim(self.lr)}
        uploads = {"gram.": whole_tensors("second moments")}
        training = Training(optims, uploads=uploads, collect_at={"task_start", "task_end"})
        return self.with_head_means(training)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: start a new pair on k and v with B_t = 0, and freeze earlier pairs.
        blocks = chosen_blocks(backbone, self.blocks)
        fresh = fix_down_projections(
            lora_pairs(backbone, blocks, self.rank, rng, "dolfin.blocks", "kv")
        )
        if not state:
            bases = {
                f"basis.{block}": torch.zeros(backbone.token_dim, 0, dtype=torch.float64)
                for block in blocks
            }
            return {**fresh, **bases, **self.start_head(task, backbone.dim, rng)}
        return next_pairs(state, fresh)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client: L_ce under W_t = W_0 + sum_s B_s A_s; only B_t and the head are trained.
        logits = head_logits(train, self.features(backbone, {**ctx.shared, **train}, batch))
        return task_cross_entropy(logits, batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features under W_t, with the pairs of all tasks.

        Args:
            backbone: The frozen backbone.
            tree: Tree with the pairs.
            batch: Images.

        Returns:
            Features [B, D].
        """
        return backbone(batch.x, fixed_plugs(tree))

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Client, as a task begins and as it ends: G_k = X_k X_k^T of each attention layer's inputs,
        # which k and v share.
        blocks = (name.split(".")[1] for name in select(tree, "lora.") if name.endswith(".k.b"))
        layers = {f"blocks.{block}.attn.qkv": block for block in blocks}
        _, inputs = backbone.features_and_taps(batch.x, list(layers), fixed_plugs(tree))
        grams = layer_grams({layers[layer]: x for layer, x in inputs.items()}, batch.w, gamma=1.0)
        means = phase == "task_start" and self.head_init == "means"
        return {**grams, **(super().collect(phase, backbone, tree, batch, ctx) if means else {})}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        state = super().update_from(phase, state, sums, ctx) if "class.sum" in sums else dict(state)
        # The threshold rises linearly over the tasks towards 1.
        threshold = self.threshold + (1 - self.threshold) * ctx.task.index / ctx.task.count
        for name, basis in select(state, "basis.").items():
            block = name.removeprefix("basis.")
            gram = unpack_gram(sums[f"gram.{block}"], len(basis))
            # As the task ends: extend M until it holds the threshold's share of the inputs' energy.
            if phase == "task_end":
                state[name] = extend_basis(basis, gram, threshold)
                continue
            # As the task begins: the rows of A_t are the r leading eigenvectors of
            # (I - M M^T) G (I - M M^T).
            for part in "kv":
                down = f"fixed.{block}.{part}.a"
                state[down] = leading_outside(gram, basis, self.rank).to(state[down])
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: W_t, argmax over the classes seen.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]


def leading_outside(gram: Tensor, basis: Tensor, rank: int) -> Tensor:
    """Compute the leading eigenvectors of (I - M M^T) G (I - M M^T).

    Args:
        gram: Gram matrix G [d, d].
        basis: Orthonormal columns M [d, m].
        rank: Number r of eigenvectors.

    Returns:
        Eigenvectors as rows [r, d]; the last rows are 0 if fewer than r directions are left.
    """
    outside = remove_subspace(remove_subspace(gram, basis).mT, basis)
    vectors = (
        torch.linalg.eigh((outside + outside.mT) / 2).eigenvectors.flip(1)[:, :rank].mT.clone()
    )
    vectors = remove_subspace(vectors, basis)
    vectors[len(basis) - basis.shape[1] :] = 0
    return torch.nn.functional.normalize(vectors, dim=-1)
