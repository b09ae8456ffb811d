"""GLFC: Federated Class-Incremental Learning. Dong et al., CVPR 2022; on a vision transformer as in FPPL."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import Tuned
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import samples
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, Task, Training
from fczoo.functional.best_model import BestOldModel
from fczoo.functional.losses import taught_binary_cross_entropy


@register_method("glfc")
@dataclass(frozen=True)
class GLFC(Tuned, BestOldModel):
    """Clients keep exemplars, balance gradients of old and new classes, and distil from the best old model.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs. When a client notices a new
    task it also uploads, for each of its new classes, the gradient of one image through a fixed network,
    from which the server reconstructs the image to pick the old model by: THIS UPLOAD CAN BE INVERTED,
    label and image. ``proxy=last`` goes without it. Memory beyond the model: old and best model, two copies
    of what is trained; exemplars at the client.
    """

    paper = "Dong et al., Federated Class-Incremental Learning, CVPR 2022"
    formulas = r"""
    $$L = (1 - \lambda) w L_{bce}(z, y) + \lambda L_{bce}(z, q), \quad
    w = (1 - \sigma(z_y)) / \operatorname{mean}_g (1 - \sigma(z_y))$$

    The mean is over the image's group in the batch, classes learned before or new ones; $q$ has the old
    model's sigmoids for old classes, the label for the others. In the first task $\lambda$ is 0.
    """
    private = ("best.", "monitor.")
    tuned = {"digits": {"memory": 20, "proxy": "last"}}

    relation: float = option(
        0.5,
        "weight of the distillation where there is an old model; the compensated loss has the rest",
        low=0,
        high=1,
    )

    def remark(self) -> str:
        upload = "uploads gradients that can be inverted to images"
        if self.proxy == "last":
            upload = "without reconstructions (proxy=last)"
        return "; ".join(filter(None, [f"keeps {self.memory} images a client, {upload}", super().remark()]))

    def training(self) -> Training:
        training = super().training()
        images = ["images"] if self.proxy == "reconstruct" else []
        return replace(
            training,
            inputs={*training.inputs, *images},
            uploads={"image_gradient.": samples("gradients of single images"), **self.head_uploads()},
            averaging="uniform",
            exemplars="exemplar.index",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        return self.monitoring(super().begin_task(state, task, backbone, rng), task, rng)

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        return self.recalled("old.", backbone, shared, batch)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        none = torch.zeros(ctx.task.classes, dtype=torch.bool, device=logits.device)
        learned = ctx.memory.get("learned", none)
        compensated = self.compensated(logits, batch, learned)
        if ctx.task.index == 0:
            return compensated, {}
        relations = self.relations(logits, batch, ctx.task.start)
        return (1 - self.relation) * compensated + self.relation * relations, {}

    def compensated(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """L_GC: binary cross-entropy of logits [B, C], image by image weighted by ``weights``."""
        hot = F.one_hot(batch.y, logits.shape[1]).to(logits)
        per_image = F.binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(-1)
        return batch.mean(self.weights(logits, batch, learned) * per_image)

    def weights(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """Weight [B] of each image: its gradient |p_y - 1| over the mean in its group, old or new classes.

        ``learned`` [C] is true for old classes. All weights are 1 while the client has learned no old class.
        """
        gradient = (1 - logits.detach().sigmoid().gather(1, batch.y[:, None])[:, 0]) * batch.w
        old = learned[batch.y].to(gradient)
        new = 1 - old
        mean_old = (gradient * old).sum() / (batch.w * old).sum().clamp(min=1)
        mean_new = (gradient * new).sum() / (batch.w * new).sum().clamp(min=1)
        tiny = torch.finfo(gradient.dtype).tiny
        weights = gradient / torch.where(old > 0, mean_old, mean_new).clamp(min=tiny)
        return torch.where(learned.any(), weights, torch.ones_like(weights))

    def relations(self, logits: Tensor, batch: Batch, old: int) -> Tensor:
        """L_RD: binary cross-entropy of logits [B, C] against the old model's answers and the labels.

        The old model answers for the first ``old`` classes, the labels for the others.
        """
        return taught_binary_cross_entropy(logits, batch, old)
