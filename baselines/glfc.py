"""GLFC: Federated Class-Incremental Learning, on a vision transformer as in FPPL.

Dong et al., CVPR 2022.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._glfc_proxy_server import BestOldModel
from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import samples
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, Task
from fczoo.functional.losses import teacher_binary_cross_entropy


@register_method("glfc")
@dataclass(frozen=True)
class GLFC(TunedLinearHead, BestOldModel):
    """Exemplars, balanced gradients of old and new classes, and distillation of the best old model.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    When a client detects a new task it also uploads, for each of its new classes, the gradient of a
    fixed network for one image. The server reconstructs the images and selects the old model by its
    accuracy on them: THIS UPLOAD CAN BE INVERTED to recover image and label. ``proxy=last`` needs
    no such upload. Memory beyond the model: old and best model, two copies of the trained tensors;
    exemplars at the client.
    """

    paper = 'Dong et al., "Federated Class-Incremental Learning", CVPR 2022'
    formulas = r"""
    $$L = (1 - \lambda) w L_{bce}(z, y) + \lambda L_{bce}(z, q), \quad
    w = (1 - \sigma(z_y)) / \operatorname{mean}_g (1 - \sigma(z_y))$$

    The mean is over the image's group in the batch: learned or new classes. The targets $q$ are the
    old model's sigmoids for old classes and the labels for the others. $\lambda$ is 0 in the first
    task.
    """
    server_only = ("best.", "monitor.")
    dataset_options = {"digits": {"memory": 20, "proxy": "last"}}

    relation: float = option(
        0.5,
        "lambda, weight of the distillation from the second task on; the compensated loss has "
        "weight 1 - lambda",
        low=0,
        high=1,
    )

    def training(self) -> Training:
        # Clients train on current images and exemplars; the server averages weights uniformly. When
        # a client detects a task, it uploads one gradient per new class for the proxy server
        # (``BestOldModel``).
        training = super().training()
        images, upload = ["images"], "uploads gradients that can be inverted to images"
        if self.proxy == "last":
            images, upload = [], "without reconstructions (proxy=last)"
        return replace(
            training,
            inputs={*training.inputs, *images},
            uploads={
                "image_gradient.": samples("gradients of single images"),
                **training.uploads,
            },
            averaging="uniform",
            exemplars="exemplar.index",
            table_note=f"keeps {self.memory} images per client, {upload}",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the best model of the last task becomes the old model of L_RD.
        return self.monitoring(super().begin_task(state, task, backbone, rng), task, rng)

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # Logits of the old model, the targets of L_RD for old classes.
        return self.earlier_logits("old.", backbone, shared, batch)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Class-aware gradient compensation loss L_GC, with one sigmoid per class seen.
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        none = torch.zeros(ctx.task.classes, dtype=torch.bool, device=logits.device)
        old_classes = ctx.memory.get("learned", none)
        balanced_loss = self.compensated_loss(logits, batch, old_classes)
        if ctx.task.index == 0:
            return balanced_loss, {}
        # Class-semantic relation distillation loss L_RD. The total is 0.5 L_GC + 0.5 L_RD in the
        # released code; the first task has only L_GC.
        relations = self.relations(logits, batch, ctx.task.start)
        return (1 - self.relation) * balanced_loss + self.relation * relations, {}

    def compensated_loss(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """Compute L_GC: binary cross-entropy over the classes seen, weighted by ``weights``.

        Args:
            logits: Logits [B, C] over the classes seen.
            batch: Labels and weights of the images.
            learned: True for classes that the client has learned before [C].

        Returns:
            The mean loss of the batch.
        """
        hot = F.one_hot(batch.y, logits.shape[1]).to(logits)
        per_image = F.binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(-1)
        return batch.mean(self.weights(logits, batch, learned) * per_image)

    def weights(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """Compute the weight of each image: w_i = g_i / (mean g of its group).

        g_i = |p_{i,y} - 1|, with the sigmoid p. A batch has two groups: images of old and of new
        classes.

        Args:
            logits: Logits [B, C] over the classes seen.
            batch: Labels and weights of the images.
            learned: True for classes that the client has learned before [C].

        Returns:
            Weights [B], without gradient; all 1 while the client has not learned an old class.
        """
        # Gradient measure g_i = |p_{i,y} - 1|, without gradient; padding has 0.
        gradient = (1 - logits.detach().sigmoid().gather(1, batch.y[:, None])[:, 0]) * batch.w
        old = learned[batch.y].to(gradient)
        new = 1 - old
        mean_old = (gradient * old).sum() / (batch.w * old).sum().clamp(min=1)
        mean_new = (gradient * new).sum() / (batch.w * new).sum().clamp(min=1)
        # Normalise by the mean of the group.
        tiny = torch.finfo(gradient.dtype).tiny
        weights = gradient / torch.where(old > 0, mean_old, mean_new).clamp(min=tiny)
        return torch.where(learned.any(), weights, torch.ones_like(weights))

    def relations(self, logits: Tensor, batch: Batch, old: int) -> Tensor:
        """Compute L_RD: binary cross-entropy with the old model's sigmoids as old classes' targets.

        Args:
            logits: Logits [B, C] over the classes seen.
            batch: Labels, weights and the old model's logits.
            old: Number of old classes, whose targets are the old model's sigmoids.

        Returns:
            The mean loss of the batch.
        """
        return teacher_binary_cross_entropy(logits, batch, old)
