"""FedLoRA, one LoRA for all tasks: Fed-TaLoRA (arXiv 2505.12318), with the residual of FedEx-LoRA."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task, Training
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.lora import lora_pairs
from fczoo.functional.losses import task_cross_entropy

LAYERS = {"q": "attn.qkv", "v": "attn.qkv", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}  # part with LoRA -> its layer
THIRD = {"q": 0, "v": 2}  # of the fused weight of q, k and v


@register_method("fedlora")
@dataclass(frozen=True)
class FedLoRA(LinearHead):
    """One LoRA through all tasks; what averaging its factors loses is added to the frozen weights.

    Trained and sent: A and B on q, v and the feed-forward layers, and the linear head. The mean of the
    clients' products B A is not the product of the mean factors; with ``residual`` the server adds the
    difference to the weights, which it broadcasts. Rank, blocks and rates are not the paper's, whose text
    could not be read.
    """

    paper = "Fed-TaLoRA, arXiv 2505.12318; residual as in FedEx-LoRA"
    formulas = r"""
    $$B = \sum_k \frac{n_k}{n} B_k$$

    $$A = \sum_k \frac{n_k}{n} A_k$$

    $$W \leftarrow W + \sum_k \frac{n_k}{n} B_k A_k - B A$$
    """
    returning = True

    residual: bool = option(True, "add to the frozen weights what averaging A and B apart loses")
    rank: int = option(4, "LoRA rank r", low=1)
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4, 5), "blocks with LoRA", low=0)
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    lr_lora: float = option(1e-3, "learning rate of LoRA", low=0, tune=(1e-5, 1e-1, "log"))

    def training(self) -> Training:
        optims = {"head.": self.optim(self.lr), "lora.": self.optim(self.lr_lora)}
        return Training(optims, uploads=self.head_uploads())

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state:
            return state
        pairs = lora_pairs(backbone, self.blocks, self.rank, rng, "fedlora.blocks", tuple(LAYERS))
        weights: Tree = {}
        if self.residual:
            names = {weight_of(layer) for layer in layers_of(pairs)}
            weights = {name: v for name, v in backbone.full_weights().items() if name in names}
        return {**pairs, **weights, **self.start_head(task, backbone.dim, rng)}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits = self._logits(backbone, {**ctx.shared, **train}, batch)
        return task_cross_entropy(logits, batch, ctx.task), {}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        merged = average(payloads)
        if not self.residual:
            return merged
        layers = layers_of(merged)
        products = average([p.holding({name: product(p.tensors, name) for name in layers}) for p in payloads])
        lost = {f"residual.{name}": products[name] - product(merged, name) for name in layers}  # dW
        return {**merged, **lost}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        state = {**state, **drop(merged, "residual.")}
        for name, lost in select(merged, "residual.").items():
            layer = name.removeprefix("residual.")
            weight, first = state[weight_of(layer)].clone(), THIRD.get(layer.partition(".")[2], 0) * len(lost)
            weight[first : first + len(lost)] += lost.to(weight)
            state[weight_of(layer)] = weight
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return self._logits(backbone, state, batch)[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Features [B, D] under the corrected weights and the LoRA pairs of ``tree``."""
        return backbone(batch.x, select(tree, "full.", "lora."))

    def _logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return head_logits(tree, self.features(backbone, tree, batch))


def layers_of(tree: Tree) -> list[str]:
    """The layers ``BLOCK.PART`` of which a tree holds a LoRA pair."""
    return [
        name.removesuffix(".a").partition(".")[2] for name in select(tree, "lora.") if name.endswith(".a")
    ]


def product(tree: Tree, layer: str) -> Tensor:
    """B A [out, in] of a layer."""
    return tree[f"lora.{layer}.b"] @ tree[f"lora.{layer}.a"]


def weight_of(layer: str) -> str:
    """Name of the frozen weight, as a plug, to which a layer's LoRA is added."""
    block, _, part = layer.partition(".")
    return f"full.blocks.{block}.{LAYERS[part]}.weight"
