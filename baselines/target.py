"""TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation.

Zhang et al., ICCV 2023.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fczoo.baselines._target_synthesis import SynthesisConfig, synthesise_images
from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, select, strip_prefix
from fczoo.core.types import Batch, Context, ServerContext, Task
from fczoo.functional.heads import head_logits
from fczoo.functional.losses import distillation, task_cross_entropy
from fczoo.protocols.registry import use_protocol_options


@register_method("target")
@use_protocol_options("hgp", "target")
@dataclass(frozen=True)
class TARGET(TunedLinearHead):
    """The server synthesises images of old classes; clients distil the old model on them.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    The server sends to clients once per task the synthetic images, one byte per colour value, and
    the old model. Memory beyond the model: both of them. No image of a client is kept.

    As in the paper: the generator, its first-order meta-updates, and the student as adversary,
    which makes the generator search for what the student has not learned yet. A vision transformer
    has no BatchNorm statistics to match, from which a generator learns most about the look of
    images. So only the teacher's predictions and the student's disagreement shape the images, as in
    HGP's tables, whose sizes are the defaults. The student starts from the pre-trained weights with
    a random head, as a transformer learns nothing from scratch here.
    """

    paper = (
        'Zhang et al., "TARGET: Federated Class-Continual Learning via Exemplar-Free '
        'Distillation", ICCV 2023'
    )
    formulas = r"""
    $$L = L_{ce}(x) - \lambda \sum_{c \in old} q_c(\tilde x) \log p_c(\tilde x)$$

    The server makes the images $\tilde x$ of label $c$ by a generator trained for

    $$L_G = \lambda_m L_{ce}(\tilde x, c) - \lambda_d \operatorname{KL}(p^T \,\Vert\, p^S)$$

    $q$ and $p$ are softmaxes, over the old classes, of the old model's and this model's logits
    divided by $\tau$. $L_{ce}(\tilde x, c)$ and $p^T$ are of the model whose task has ended, $p^S$
    of the student. KL counts only where both predict the same class.
    """
    dataset_options = {
        "digits": {  # for speed
            "synthesis_rounds": 10,
            "warmup": 5,
            "steps": 10,
            "student_steps": 5,
            "width": 16,
        }
    }

    strength: float = option(25.0, "lambda, distillation weight", low=0, tune=(1e-1, 1e2, "log"))
    temperature: float = option(
        2.0, "temperature tau of both softmaxes; the loss has no factor tau^2", low=1e-6
    )
    ratio: int = option(1, "synthetic images per real image of a batch", low=1)
    synthesis_rounds: int = option(30, "rounds of image synthesis per task", low=1)
    synthesis_batch: int = option(16, "images per round of synthesis", low=1)
    warmup: int = option(20, "round of synthesis from which the student is an adversary", low=0)
    steps: int = option(80, "optimizer steps of the generator per round of synthesis", low=1)
    lr_generator: float = option(2e-3, "learning rate of the generator, Adam", low=0)
    lr_noise: float = option(1e-2, "learning rate of the noise vectors, Adam", low=0)
    noise: int = option(256, "length of the noise vector of an image", low=1)
    width: int = option(64, "channels of the generator's last hidden layer", low=1)
    match: float = option(0.5, "lambda_m, weight of the teacher's cross-entropy", low=0)
    disagree: float = option(1.0, "lambda_d, weight of KL(p^T || p^S), which is maximised", low=0)
    student_steps: int = option(50, "training steps of the student per round after warmup", low=0)
    student_lr: float = option(2e-3, "learning rate of the student, SGD with momentum 0.9", low=0)
    exclude_last_label: bool = option(
        False,
        "synthesise no images of the newest class",
        quirk="fed-mammoth: the upper bound of its label range is exclusive",
    )

    @property
    def images(self) -> int:
        """Return the number of synthetic images that clients hold in a task."""
        return self.synthesis_rounds * self.synthesis_batch

    def training(self) -> Training:
        # Uniform mean as in released code; each image of a batch draws ``ratio`` synthetic ones.
        note = f"sends {self.images} synthetic images per client"
        return replace(super().training(), averaging="uniform", draws=self.ratio, table_note=note)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the teacher is the global model at the end of the last task.
        state = self.with_teacher(super().begin_task(state, task, backbone, rng), task)
        # Without synthetic images, as no client responded in the last round: black ones.
        if task.index and "synthetic" not in state:
            side = backbone.config.image_size
            state["synthetic"] = torch.zeros(self.images, 3, side, side, dtype=torch.uint8)
        return state

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client: L = L_ce of real images + lambda KD of synthetic images of the last task's pool.
        loss = task_cross_entropy(self.logits(backbone, train, batch), batch, ctx.task)
        if ctx.task.index == 0:
            return loss, {}
        pool, teacher = ctx.shared["synthetic"], strip_prefix(ctx.shared, "teacher.")
        picks = (batch.draws * len(pool)).long().clamp(max=len(pool) - 1)  # [B, ratio]
        images = pool[picks.flatten()].to(batch.draws) / 255
        with torch.no_grad():
            old = self.answers(backbone, teacher, images)
        # KD = -sum_{c in OLD} softmax(z_old / tau)_c log softmax(z / tau)_c, without factor tau^2.
        new, old_classes = self.answers(backbone, train, images), slice(0, ctx.task.start)
        teacher_loss = (
            distillation(new[:, old_classes], old[:, old_classes], self.temperature)
            .view(picks.shape)
            .mean(1)
        )
        return loss + self.strength * batch.mean(teacher_loss), {}

    def answers(self, backbone: Backbone, tree: Tree, images: Tensor) -> Tensor:
        """Compute logits of images in [0, 1], which are normalised here.

        Args:
            backbone: The frozen backbone.
            tree: Trained tensors of the model.
            images: Images [B, 3, S, S] in [0, 1].

        Returns:
            Logits [B, C] over all classes of the run.
        """
        features = backbone(backbone.normalise(images), select(tree, "full.", "lora."))
        return head_logits(tree, features)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Synthesise images after a task's last round, if another task follows.

        Args:
            state: Current state.
            merged: Merged uploads of the clients.
            ctx: Round, task, backbone and random generator.

        Returns:
            The state with ``synthetic`` [N, 3, S, S], bytes, after the last round.
        """
        state, task = {**state, **merged}, ctx.task
        if ctx.round + 1 < ctx.rounds or task.stop == task.classes:
            return state
        return {**state, "synthetic": self.synthetic_images(state, task, ctx.backbone, ctx.rng)}

    def synthetic_images(
        self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator
    ) -> Tensor:
        """Synthesise images that the model classifies as classes seen so far.

        Args:
            state: State with the model whose task has ended.
            task: The finished task.
            backbone: The frozen backbone.
            rng: Random generator.

        Returns:
            Images [N, 3, S, S], bytes.
        """
        # Teacher: the final global model. Student: pre-trained weights with a random head.
        model = {k: v.detach() for k, v in self.trained_part(state).items()}
        start = backbone.full_weights()
        for name, value in select(state, "head.").items():
            uniform = torch.rand(value.shape, generator=rng, device=rng.device).to(value)
            start[name] = (2 * uniform - 1) * backbone.dim**-0.5

        def student(weights: Tree, images: Tensor) -> Tensor:
            return self.answers(backbone, weights, images)[:, : task.stop]

        config = SynthesisConfig(
            **{field.name: getattr(self, field.name) for field in fields(SynthesisConfig)}
        )
        # Labels are drawn over the classes seen; fed-mammoth leaves out the newest one.
        classes = max(task.stop - 1, 1) if self.exclude_last_label else task.stop
        size = backbone.config.image_size
        return synthesise_images(
            config, lambda x: student(model, x), student, start, classes, size, rng
        )
