"""RegMean in federated learning: Dataless Knowledge Fusion by Merging Weights of Language Models.

Jin et al., ICLR 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import LAYERS, Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext
from fczoo.functional.heads import merge_task_rows
from fczoo.functional.input_subspaces import layer_grams
from fczoo.functional.regmean import regression_means


@register_method("regmean")
@dataclass(frozen=True)
class RegMean(TunedLinearHead):
    """FedAvg with linear layers merged so that outputs change least on the clients' own inputs.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs. In
    every round they also send the Gram matrix of the inputs of each trained linear layer, over all
    tokens of all their images. Other tensors, such as biases, norms and LoRA pairs, are averaged;
    ``--aggregator`` acts only on them. In the head only the rows of the task's classes change.
    """

    paper = (
        'Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023'
    )
    formulas = r"""
    For a linear layer with weights $W_k$ of client $k$ and its inputs $x$:

    $$W = \Bigl( \sum_k W_k G_k \Bigr) \Bigl( \sum_k G_k \Bigr)^{-1}$$

    $$G_k = \gamma \sum_x x x^\top + (1 - \gamma) \operatorname{diag}\Bigl( \sum_x x x^\top \Bigr)$$
    """

    gamma: float = option(
        0.9,
        "factor on off-diagonal entries of the layers' Gram matrices, with tune=full (paper: 0.9; "
        "HGP: 0.5 or 0.1 by data set)",
        low=0,
        high=1,
    )
    gamma_head: float = option(
        0.9, "factor on off-diagonal entries of the head's Gram matrix", low=0, high=1
    )
    view: Literal["test", "train"] = option(
        "test", "view of the images for Gram matrices: test; train, random views (fed-mammoth)"
    )

    def training(self) -> Training:
        # As FedAvg; in each round clients also send the Gram matrices of the layers' inputs.
        training = super().training()
        return replace(
            training,
            uploads={"gram.": whole_tensors("second moments"), **training.uploads},
            collect_at={*training.collect_at, "after_training"},
            collect_view=self.view,
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, after local training, per trained linear layer: G_k = sum x x^T over all tokens of
        # all local images, with off-diagonal entries multiplied by gamma.
        if self.tune != "full":
            return layer_grams(
                {"head": self.features(backbone, tree, batch)}, batch.w, self.gamma_head
            )
        layers = [f"blocks.{i}.{layer}" for i in range(backbone.depth) for layer in LAYERS]
        features, inputs = backbone.features_and_taps(batch.x, layers, select(tree, "full."))
        inside = layer_grams(inputs, batch.w, self.gamma)
        return {**inside, **layer_grams({"head": features}, batch.w, self.gamma_head)}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Server: W = (sum_k W_k G_k) (sum_k G_k)^+ for linear layers, FedAvg of biases and norms.
        layers = {name.removeprefix("gram.") for name in payloads[0].only("gram.")}
        weights = {"head.weight" if n == "head" else f"full.{n}.weight": n for n in layers}
        means = average([p.drop("gram.", *weights) for p in payloads])
        return {**means, **regression_means(payloads, weights)}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # The head changes only in the rows of the current task.
        return {**state, **merged, **merge_task_rows(state, merged, ctx.task)}
