"""TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation. Zhang et al., ICCV 2023."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from fczoo.baselines.finetune import Tuned
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, ServerContext, Task, Training
from fczoo.functional.heads import head_logits
from fczoo.functional.losses import distillation, task_cross_entropy
from fczoo.functional.pixels import normalised
from fczoo.functional.synthesis import Making, synthesised

RATES: dict[str, dict[str, Any]] = {  # HGP, appendix H; digits: ours
    **{name: {"lr": 1e-5, "lr_backbone": 1e-5} for name in ("cifar100", "imagenet_r", "eurosat")},
    **{name: {"lr": 1e-4, "lr_backbone": 1e-4} for name in ("imagenet_a", "cars196", "cub200")},
    "digits": {
        "synthesis_rounds": 10,
        "warmup": 5,
        "steps": 10,
        "student_steps": 5,
        "width": 16,
    },  # for speed
}


@register_method("target")
@dataclass(frozen=True)
class TARGET(Tuned):
    """The server makes images that the last model takes for its classes; clients distil it on them.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs. Sent to each client once a
    task: the synthetic images, a byte a colour, and the old model. Memory beyond the model: both of them. No
    image of a client is kept.

    Of the paper is kept: generator, first-order meta-updates, the student that makes the generator look for
    what it has not learned yet. Not kept on a vision transformer: the statistics of BatchNorm layers, which
    tell a generator most of what images look like; it has none, so the teacher's classes and the student's
    disagreement are all that is left (as in HGP's tables, whose sizes are the defaults). The student starts
    at the pre-trained weights with a random head, since a transformer learns nothing from scratch here.
    """

    paper = "Zhang et al., TARGET, ICCV 2023"
    formulas = r"""
    $$L = L_{ce}(x) - \lambda \sum_{c \in old} q_c(\tilde x) \log p_c(\tilde x)$$

    The server makes the images $\tilde x$ of label $c$ by a generator trained for

    $$L_G = \lambda_m L_{ce}(\tilde x, c) - \lambda_d \operatorname{KL}(p^T \,\Vert\, p^S)$$

    $q$ and $p$ are softmaxes over the old classes of the old model's logits and of these, divided by $\tau$.
    $L_{ce}(\tilde x, c)$ and $p^T$ are of the model whose task has ended, $p^S$ of the student. KL counts
    where both give the same answer.
    """
    tuned = RATES

    strength: float = option(25.0, "weight of the distillation", low=0, tune=(1e-1, 1e2, "log"))
    temperature: float = option(2.0, "of both softmaxes; the loss is not multiplied by its square", low=1e-6)
    ratio: int = option(1, "synthetic images beside each image of a batch", low=1)
    synthesis_rounds: int = option(30, "batches of synthetic images a task", low=1)
    synthesis_batch: int = option(16, "images in each", low=1)
    warmup: int = option(20, "rounds of synthesis before the student takes part", low=0)
    steps: int = option(80, "steps of the generator in each round of synthesis", low=1)
    lr_generator: float = option(2e-3, "its learning rate, Adam", low=0)
    lr_noise: float = option(1e-2, "that of the noise from which the images are made", low=0)
    noise: int = option(256, "numbers of which an image is made", low=1)
    width: int = option(64, "channels of the generator's last layers", low=1)
    match: float = option(0.5, "weight of the teacher's cross-entropy on the labels drawn", low=0)
    disagree: float = option(1.0, "weight of the student's disagreement with the teacher", low=0)
    student_steps: int = option(50, "steps of the student after a round of synthesis", low=0)
    student_lr: float = option(2e-3, "its learning rate, SGD with momentum 0.9", low=0)
    exclude_last_label: bool = option(
        False, "make no image of the newest class", quirk="fed-mammoth, whose upper end is exclusive"
    )

    @property
    def images(self) -> int:
        """Synthetic images that clients hold in a task."""
        return self.synthesis_rounds * self.synthesis_batch

    def remark(self) -> str:
        return "; ".join(filter(None, [f"sends {self.images} synthetic images a client", super().remark()]))

    def training(self) -> Training:
        return replace(super().training(), averaging="uniform", draws=self.ratio)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        state = self.with_teacher(super().begin_task(state, task, backbone, rng), task)
        if task.index and "synthetic" not in state:  # nobody was heard of in the last round: black images
            side = backbone.config.image_size
            state["synthetic"] = torch.zeros(self.images, 3, side, side, dtype=torch.uint8)
        return state

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        loss = task_cross_entropy(self.logits(backbone, train, batch), batch, ctx.task)
        if ctx.task.index == 0:
            return loss, {}
        pool, teacher = ctx.shared["synthetic"], select(ctx.shared, "teacher.")
        drawn = (batch.draws * len(pool)).long().clamp(max=len(pool) - 1)  # [B, ratio]
        images = pool[drawn.flatten()].to(batch.draws) / 255
        with torch.no_grad():
            old = self.answers(backbone, {k.removeprefix("teacher."): v for k, v in teacher.items()}, images)
        new, seen = self.answers(backbone, train, images), slice(0, ctx.task.start)
        distilled = distillation(new[:, seen], old[:, seen], self.temperature).view(drawn.shape).mean(1)
        return loss + self.strength * batch.mean(distilled), {}

    def answers(self, backbone: Backbone, tree: Tree, images: Tensor) -> Tensor:
        """Logits [B, C] over all classes of the run of images [B, 3, S, S] in [0, 1]."""
        features = backbone(normalised(backbone, images), select(tree, "full.", "lora."))
        return head_logits(tree, features)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """After a task's last round, if another task follows: the images for it."""
        state, task = {**state, **merged}, ctx.task
        if ctx.round + 1 < ctx.rounds or task.stop == task.classes:
            return state
        return {**state, "synthetic": self.synthetic_images(state, task, ctx.backbone, ctx.rng)}

    def synthetic_images(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tensor:
        """Images [N, 3, S, S], bytes, that the model of ``state`` takes for classes seen so far."""
        model = {k: v.detach() for k, v in self.trained(state).items()}
        start = backbone.full_weights()
        for name, value in select(state, "head.").items():
            drawn = torch.rand(value.shape, generator=rng, device=rng.device).to(value)
            start[name] = (2 * drawn - 1) * backbone.dim**-0.5

        def student(weights: Tree, images: Tensor) -> Tensor:
            return self.answers(backbone, weights, images)[:, : task.stop]

        making = Making(**{field.name: getattr(self, field.name) for field in fields(Making)})
        classes = max(task.stop - 1, 1) if self.exclude_last_label else task.stop
        size = backbone.config.image_size
        return synthesised(making, lambda x: student(model, x), student, start, classes, size, rng)
