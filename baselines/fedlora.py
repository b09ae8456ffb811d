"""FedLoRA, one LoRA for all tasks: Fed-TaLoRA with the residual of FedEx-LoRA. arXiv 2505.12318."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.lora import lora_pairs
from fczoo.functional.losses import task_cross_entropy

LAYERS = {
    "q": "attn.qkv",
    "v": "attn.qkv",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}  # part with LoRA -> its layer
FUSED_WEIGHT_INDEX = {"q": 0, "v": 2}  # of the fused weight of q, k and v


@register_method("fedlora")
@dataclass(frozen=True)
class FedLoRA(LinearHead):
    """One set of LoRA pairs for all tasks; the averaging error is added to the frozen weights.

    Clients train and send A and B on q, v and the feed-forward layers, and the linear head. The
    mean of the clients' products B A is not the product of the mean factors; with ``residual`` the
    server adds the difference to the weights, which it broadcasts. Rank, blocks and learning rates
    are not the paper's, whose text could not be read.
    """

    paper = (
        'Fed-TaLoRA: Yu et al., "Efficient Federated Class-Incremental Learning of Pre-Trained '
        'Models via Task-agnostic Low-rank Residual Adaptation", arXiv 2505.12318; residual as in '
        "FedEx-LoRA"
    )
    formulas = r"""
    $$B = \sum_k \frac{n_k}{n} B_k$$

    $$A = \sum_k \frac{n_k}{n} A_k$$

    $$W \leftarrow W + \sum_k \frac{n_k}{n} B_k A_k - B A$$
    """
    supports_recurring_classes = True

    residual: bool = option(
        True, "add the error of averaging A and B separately to the frozen weights"
    )
    rank: int = option(4, "LoRA rank r", low=1)
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4, 5), "blocks with LoRA", low=0)
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    lr_lora: float = option(
        1e-3, "learning rate of the LoRA pairs", low=0, tune=(1e-5, 1e-1, "log")
    )

    def training(self) -> Training:
        optims = {"head.": self.optim(self.lr), "lora.": self.optim(self.lr_lora)}
        return self.with_head_means(Training(optims))

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the same pairs continue; nothing is frozen or reset.
        if state:
            return state
        pairs = lora_pairs(backbone, self.blocks, self.rank, rng, "fedlora.blocks", tuple(LAYERS))
        weights: Tree = {}
        if self.residual:
            names = {weight_of(layer) for layer in layers_of(pairs)}
            weights = {name: v for name, v in backbone.full_weights().items() if name in names}
        return {**pairs, **weights, **self.start_head(task, backbone.dim, rng)}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client: L_ce under W + B A, where W has all residuals so far.
        logits = self._logits(backbone, {**ctx.shared, **train}, batch)
        return task_cross_entropy(logits, batch, ctx.task), {}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # FedAvg of the factors: B = sum_k p_k B_k, A = sum_k p_k A_k with p_k = n_k / n.
        means = average(payloads)
        if not self.residual:
            return means
        # Residual: dW = sum_k p_k B_k A_k - B A, layer by layer.
        layers = layers_of(means)
        products = average(
            [p.holding({name: lora_product(p.tensors, name) for name in layers}) for p in payloads]
        )
        residuals = {
            f"residual.{name}": products[name] - lora_product(means, name) for name in layers
        }
        return {**means, **residuals}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # W <- W + dW, which the server broadcasts. q and v are slices of the fused qkv weight.
        state = {**state, **drop(merged, "residual.")}
        for name, residual in select(merged, "residual.").items():
            layer = name.removeprefix("residual.")
            weight, first = (
                state[weight_of(layer)].clone(),
                FUSED_WEIGHT_INDEX.get(layer.partition(".")[2], 0) * len(residual),
            )
            weight[first : first + len(residual)] += residual.to(weight)
            state[weight_of(layer)] = weight
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: W + B A, argmax over the classes seen.
        return self._logits(backbone, state, batch)[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features under the corrected weights and the LoRA pairs.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``full.*`` and ``lora.*``.
            batch: Images.

        Returns:
            Features [B, D].
        """
        return backbone(batch.x, select(tree, "full.", "lora."))

    def _logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return head_logits(tree, self.features(backbone, tree, batch))


def layers_of(tree: Tree) -> list[str]:
    """Return the layers ``BLOCK.PART`` for which a tree holds a LoRA pair.

    Args:
        tree: Tree with ``lora.BLOCK.PART.a``.
    """
    return [
        name.removesuffix(".a").partition(".")[2]
        for name in select(tree, "lora.")
        if name.endswith(".a")
    ]


def lora_product(tree: Tree, layer: str) -> Tensor:
    """Compute the product B A of a layer's LoRA pair.

    Args:
        tree: Tree with ``lora.LAYER.a`` [r, in] and ``lora.LAYER.b`` [out, r].
        layer: Layer ``BLOCK.PART``.

    Returns:
        B A [out, in].
    """
    return tree[f"lora.{layer}.b"] @ tree[f"lora.{layer}.a"]


def weight_of(layer: str) -> str:
    """Return the name, as a plug, of the frozen weight to which a layer's LoRA is added.

    Args:
        layer: Layer ``BLOCK.PART``.
    """
    block, _, part = layer.partition(".")
    return f"full.blocks.{block}.{LAYERS[part]}.weight"
