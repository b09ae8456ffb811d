"""Fed-CPrompt: Contrastive Prompt for Rehearsal-Free Federated Continual Learning.

Bagwe et al., FL-ICML workshop 2023.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.baselines.codap import CODAPrompt
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context
from fczoo.functional.prompts import component_weights


@register_method("fedcprompt")
@dataclass(frozen=True)
class FedCPrompt(CODAPrompt):
    """CODA-Prompt whose features stay near the global model's and away from the last task's.

    The contrast acts on features, as in the released code, whose constants and sum over the batch
    it uses. Components of finished tasks are frozen, so the last task's model is the one with only
    these components, and no copy of it is stored. Clients train and send the current task's
    components (prompt, key, attention) in each prompted block, and the linear head.
    """

    title = "Fed-CPrompt"
    paper = (
        'Bagwe et al., "Fed-CPrompt: Contrastive Prompt for Rehearsal-Free Federated '
        'Continual Learning", FL-ICML 2023'
    )
    formulas = r"""
    $$L = L_{coda} + \max\Bigl( 0,\; \lambda_n \sum_x \lVert f - f_{global} \rVert^2
    - \lambda_f \sum_x \lVert f - f_{last} \rVert^2 + m \Bigr)$$

    $$\alpha_m = \cos(q \odot \operatorname{softmax}(A_m),\; K_m)$$

    $L_{coda}$ is CODA-Prompt's loss, the sums are over the batch; $f_{global}$ is computed with the
    model that the server sent, $f_{last}$ with the components of finished tasks only. First task:
    $\lambda_f = m = 0$.
    """
    dataset_options = {"digits": {"lr": 1e-2, "components": 50}}

    lr: float = option(
        1e-4, "learning rate of components and head", low=0, tune=(1e-5, 1e-1, "log")
    )
    attention_softmax: bool = option(
        True, "apply a softmax to the D entries of each attention vector, as in released code"
    )
    contrast: Literal["features", "off"] = option(
        "features", "contrastive loss: features, on features as in released code; off, none"
    )
    near: float = option(
        1e3,
        "lambda_n, weight of the squared distance to the features of the round's global model",
        low=0,
    )
    far: float = option(
        10.0,
        "lambda_f, weight of the squared distance to the features of the last task's model",
        low=0,
    )
    margin: float = option(1.0, "m, margin inside the hinge of the contrastive loss", low=0)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L = L_coda + C2, the contrast of the released code.
        loss, sums = super().loss(backbone, train, batch, ctx)
        if self.contrast == "off":
            return loss, sums
        # f: trained model; f_global: received model; f_last: components of finished tasks.
        # The last two have no gradient. All three see the same view.
        features = self.features(backbone, {**ctx.shared, **train}, batch)
        with torch.no_grad():
            global_features = self.features(backbone, ctx.shared, batch)
            last = None
            if ctx.task.index:
                last = self.features(backbone, drop(ctx.shared, "component."), batch)
        return loss + self.contrast_loss(features, global_features, last, batch.w), sums

    def contrast_loss(
        self, now: Tensor, received: Tensor, last: Tensor | None, weight: Tensor
    ) -> Tensor:
        """Compute C2 = [near sum |f - f_global|^2 - far sum |f - f_last|^2 + margin]_+.

        Args:
            now: Features f [B, D].
            received: Features f_global [B, D] of the model received this round.
            last: Features f_last [B, D] of finished tasks; None in the first task.
            weight: Weights [B] of the images; padding has weight 0.

        Returns:
            C2, a scalar; without ``last`` only the first sum.
        """
        to_global = self.near * ((now - received).square().sum(-1) * weight).sum()
        if last is None:
            return to_global
        to_last = self.far * ((now - last).square().sum(-1) * weight).sum()
        return (to_global - to_last + self.margin).clamp(min=0)

    def weights(self, tree: Tree, block: int, query: Tensor) -> Tensor:
        # alpha_m = cos(q * softmax(A_m), K_m), softmax over the D entries; CODA-Prompt has none.
        attention = self._rows(tree, block, "attention")
        if self.attention_softmax:
            attention = attention.softmax(-1)
        return component_weights(query, attention, self._rows(tree, block, "key"))
