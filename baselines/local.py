"""Local training without communication: the reference of personalised federated learning."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Context, LocalData
from fczoo.functional.gaussians import class_sums


@register_method("local")
@dataclass(frozen=True)
class Local(TunedLinearHead):
    """Each client trains its own model without communication: the reference for federated methods.

    Clients train the linear head and, depending on ``tune``, all weights or LoRA pairs, on one task
    after another, and send nothing. All clients start from the same pre-trained weights. Accuracies
    are means over the clients' models on all test images; a model predicts among the classes that
    its client has had. ``client_mean`` weights each model's accuracies by its own client's classes.
    No global model exists that could be kept or exported.
    """

    paper = "reference of personalised federated learning: clients do not communicate"
    formulas = r"""
    $$w_k \leftarrow w_k - \eta \nabla L_{ce}(w_k; D_{k,t}), \quad
    A_t = \frac{1}{K} \sum_k A_t(w_k)$$

    $D_{k,t}$ are the images of client $k$ in task $t$; $L_{ce}$ is the cross-entropy over the
    task's classes.
    """
    supports_recurring_classes = True

    def training(self) -> Training:
        note = "clients do not communicate: accuracies are means over the clients' models"
        return replace(self.tuning("head."), own_models=True, table_note=note)

    def before_training(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        # The client resumes from its own model; in its first round from the pre-trained weights.
        model: Tree = {**(ctx.memory or self.trained_part(ctx.shared))}
        if self.head_init == "means":
            model["head.weight"] = self._with_means(model, backbone, data, ctx)
        return model

    def _with_means(self, model: Tree, backbone: Backbone, data: LocalData, ctx: Context) -> Tensor:
        """Set rows that were never trained to the mean features of the client's own images."""
        weight, new = model["head.weight"].clone(), slice(ctx.task.start, ctx.task.stop)
        untrained = (weight[new] == 0).all(1)
        if not untrained.any():
            return weight
        sums = [
            class_sums(self.features(backbone, model, batch), batch, ctx.task)
            for batch in data.batches(data.index)
        ]
        count = torch.stack([part["class.count"] for part in sums]).sum(0)
        total = torch.stack([part["class.sum"] for part in sums]).sum(0)
        means = F.normalize(total, dim=-1)
        start = untrained & (count > 0)
        weight[new][start] = means[start].to(weight)
        return weight

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        # Nothing is sent; ``after_training`` keeps the trained model in the client's memory.
        return {}

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {**train}, {}
