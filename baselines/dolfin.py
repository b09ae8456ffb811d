"""DOLFIN: exemplar-free FCIL by low-rank adapters outside earlier tasks' inputs. 2025, arXiv 2510.13567."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment, ServerContext, Task, Training
from fczoo.functional.grams import layer_grams, unpacked
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.lora import chosen_blocks, fixed_plugs, lora_pairs, next_pairs, with_fixed
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.subspaces import extended, outside_of


@register_method("dolfin")
@dataclass(frozen=True)
class DOLFIN(LinearHead):
    """One LoRA pair a task on keys and values, whose A stays and lies outside of earlier tasks' inputs.

    Trained and sent: B, and the linear head. As a task begins and as it ends, clients send the Gram matrices
    of what their images give the blocks' attention to read. From the first ones the server chooses A, the
    same for all clients, so that averaging B averages the product B A exactly; from the last ones it learns
    which inputs later tasks must leave alone. Built from a summary of the paper, which released no code: rank
    and threshold are those recalled of InfLoRA, whose rule for A this is; rates are ours.
    """

    paper = "DOLFIN, ICIAP 2025 workshops, arXiv 2510.13567; A chosen as in InfLoRA (Liang and Li, CVPR 2024)"
    formulas = r"""
    With $G = \sum_k X_k X_k^\top$ of a layer's inputs and $M$ a basis of earlier tasks' inputs:

    $$A_t = \text{leading } r \text{ eigenvectors of } (I - M M^\top)\, G\, (I - M M^\top)$$

    $$W_t = W_0 + \sum_{s \le t} B_s A_s, \quad B_t = \sum_k \frac{n_k}{n} B_{t,k}$$
    """
    private: ClassVar[tuple[str, ...]] = ("basis.",)

    rank: int = option(10, "LoRA rank r", low=1)
    blocks: tuple[int, ...] | None = option(None, "blocks with LoRA; none: all", low=0)
    threshold: float = option(
        0.98,
        "part of the inputs' energy that later tasks leave alone; rises with the tasks towards 1",
        low=0,
        high=1,
    )
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    lr_lora: float = option(1e-3, "learning rate of B", low=0, tune=(1e-5, 1e-1, "log"))

    def training(self) -> Training:
        optims = {"lora.": self.optim(self.lr_lora), "head.": self.optim(self.lr)}
        return Training(optims, uploads={"gram.": whole("second moments"), **self.head_uploads()})

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin", "end"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        blocks = chosen_blocks(backbone, self.blocks)
        fresh = with_fixed(lora_pairs(backbone, blocks, self.rank, rng, "dolfin.blocks", "kv"))
        if not state:
            bases = {f"basis.{block}": torch.zeros(backbone.dim, 0, dtype=torch.float64) for block in blocks}
            return {**fresh, **bases, **self.start_head(task, backbone.dim, rng)}
        return next_pairs(state, fresh)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits = head_logits(train, self.features(backbone, {**ctx.shared, **train}, batch))
        return task_cross_entropy(logits, batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Features [B, D] with the pairs of all tasks."""
        return backbone(batch.x, fixed_plugs(tree))

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        blocks = (name.split(".")[1] for name in select(state, "lora.") if name.endswith(".k.b"))
        layers = {f"blocks.{block}.attn.qkv": block for block in blocks}
        _, inputs = backbone.tapped(batch.x, list(layers), fixed_plugs(state))
        grams = layer_grams({layers[layer]: x for layer, x in inputs.items()}, batch.w, gamma=1.0)
        means = moment == "begin" and self.head_init == "means"
        return {**grams, **(super().survey(moment, backbone, state, batch, task) if means else {})}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        state = super().absorb(moment, state, sums, ctx) if "class.sum" in sums else dict(state)
        kept = self.threshold + (1 - self.threshold) * ctx.task.index / ctx.task.count
        for name, basis in select(state, "basis.").items():
            block = name.removeprefix("basis.")
            gram = unpacked(sums[f"gram.{block}"], len(basis))
            if moment == "end":
                state[name] = extended(basis, gram, kept)
                continue
            for part in "kv":
                down = f"fixed.{block}.{part}.a"
                state[down] = leading_outside(gram, basis, self.rank).to(state[down])
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]


def leading_outside(gram: Tensor, basis: Tensor, rank: int) -> Tensor:
    """The leading ``rank`` eigenvectors [rank, d] of a Gram matrix G [d, d] outside of a basis M [d, m].

    Those of (I - M M^T) G (I - M M^T), as rows. Where fewer directions are left, the last rows are 0, and
    change nothing.
    """
    outside = outside_of(outside_of(gram, basis).mT, basis)
    vectors = torch.linalg.eigh((outside + outside.mT) / 2).eigenvectors.flip(1)[:, :rank].mT.clone()
    vectors = outside_of(vectors, basis)
    vectors[len(basis) - basis.shape[1] :] = 0
    return torch.nn.functional.normalize(vectors, dim=-1)
