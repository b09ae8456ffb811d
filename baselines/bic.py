"""BiC in federated learning: Large Scale Incremental Learning. Wu et al., CVPR 2019."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, LocalData, ServerContext, Task
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.losses import distillation


def fit_bias(
    batches: Sequence[tuple[Tensor, Tensor]],
    start: int,
    epochs: int,
    lr: float,
    weight_decay: float = 0.0,
) -> Tensor:
    """Fit the bias correction z' = alpha z + beta of the new classes' logits by Adam.

    Adam minimises the cross-entropy from (1, 0), with one step per batch and epoch.

    Args:
        batches: Logits [B, C] and labels [B] of each batch.
        start: First class to correct; all later ones are corrected as well.
        epochs: Passes over the batches.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of Adam.

    Returns:
        alpha and beta as one tensor [2].
    """
    # Bias correction layer: z'_c = alpha z_c + beta for c >= start, z_c for old classes.
    with torch.enable_grad():
        logits = batches[0][0]
        bias = logits.new_tensor([1.0, 0.0]).requires_grad_()
        optimizer = torch.optim.Adam([bias], lr, weight_decay=weight_decay)
        for _ in range(epochs):
            for z, y in batches:
                optimizer.zero_grad()
                logits_corrected = torch.cat([z[:, :start], bias[0] * z[:, start:] + bias[1]], 1)
                F.cross_entropy(logits_corrected, y).backward()
                optimizer.step()
    return bias.detach()


def validation_split(data: LocalData, kept: Tensor, part: float) -> tuple[Tensor, Tensor]:
    """Return the positions of a client's training images and of its held-out images.

    The client holds out the same number of images of every class: ``part`` of its shortest exemplar
    list, but at least one. It holds out none of a class with a single image, and none at all while
    it has no exemplars.

    Args:
        data: Local data of the client; ``data.index`` are the images of the current task.
        kept: Positions of the client's exemplars.
        part: Share of the shortest exemplar list that is held out, 0 to 1.

    Returns:
        Positions [n] of training images and [v] of held-out images; both mix new images and
            exemplars.
    """
    train_parts, validation_parts = [], []
    new, old = (
        _by_class(index, data.labels(index).to(index.device)) for index in (data.index, kept)
    )
    shortest = min(map(len, old), default=0)
    for positions in (*new, *old):
        number = min(max(int(part * shortest), 1), len(positions) - 1) if shortest else 0
        train_parts.append(positions[: len(positions) - number])
        validation_parts.append(positions[len(positions) - number :])
    return torch.cat(train_parts), torch.cat(validation_parts)


def _by_class(index: Tensor, labels: Tensor) -> list[Tensor]:
    return [index[labels == c] for c in labels.unique()]


@register_method("bic")
@dataclass(frozen=True)
class BiC(TunedLinearHead, Rehearsal):
    """Distillation with exemplars, and a correction of the new classes' logits after each task.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    After a task each client fits alpha and beta, under the global model, to validation images that
    were not trained on, and sends them once. The server averages them, weighted by the clients'
    numbers of these images. The corrected model is the teacher of the next task, so only the last
    task's logits are corrected. Memory beyond the model: the teacher, one copy of the trained
    tensors; exemplars at the client.
    """

    paper = 'Wu et al., "Large Scale Incremental Learning", CVPR 2019'
    formulas = r"""
    $$L = (1 - \lambda) L_{ce} - \lambda T^2 \sum_{c \in old} q_c \log p_c$$

    $$z_c \leftarrow \alpha z_c + \beta, \quad c \in C_t, \quad
    (\alpha, \beta) = \frac{\sum_k m_k (\alpha_k, \beta_k)}{\sum_k m_k}$$

    $\lambda$ is the old classes' share of those seen; $q$ and $p$ are softmaxes, over the old
    classes, of the teacher's corrected logits and of the model's logits, both divided by $T$.
    Client $k$ fits $\alpha_k$ and $\beta_k$ to $m_k$ images held out, after the task.
    """
    dataset_options = {"digits": {"memory": 20, "bias_lr": 0.02}}

    temperature: float = option(
        2.0,
        "T, temperature of both softmaxes of the distillation, which is multiplied by T^2",
        low=1e-6,
    )
    validation: float = option(
        0.1,
        "share of the shortest exemplar list: number of images of each class, old or new, that are "
        "held out to fit alpha and beta; at least one",
        low=0,
        high=0.5,
    )
    bias_epochs: int = option(250, "epochs for fitting alpha and beta", low=1)
    bias_lr: float = option(1e-3, "learning rate for fitting alpha and beta (Adam)", low=0)

    def training(self) -> Training:
        # Stage 1 trains without the images held out for stage 2.
        def training_split(data: LocalData, kept: Tensor) -> Tensor:
            return validation_split(data, kept, self.validation)[0]

        training = self.rehearsing(super().training())
        uploads = {
            "bias": whole_tensors("parameters"),
            "validated": whole_tensors("counts", of_images=True),
        }
        return replace(training, trains_on=training_split, uploads={**training.uploads, **uploads})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the teacher is the last global model with its correction. The new task
        # starts uncorrected.
        none = {
            "correction.scale": torch.ones(task.classes),
            "correction.shift": torch.zeros(task.classes),
        }
        state = {**none, **super().begin_task(state, task, backbone, rng)}
        state = self.with_teacher(state, task, *self.training().optims, "correction.")
        return {**state, **none}

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # Teacher: its logits with the last task's correction alpha z_c + beta.
        logits = self.earlier_logits("teacher.", backbone, shared, batch)
        if task.index == 0:
            return logits
        return logits * shared["teacher.correction.scale"] + shared["teacher.correction.shift"]

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Stage 1, on new images and exemplars: (1 - lambda) L_ce over the classes seen + lambda T^2
        # distillation over the old classes, with lambda = |OLD| / |SEEN|.
        logits, old = self.logits(backbone, train, batch)[:, : ctx.task.stop], ctx.task.start
        loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        if not old:
            return loss, {}
        teacher_loss = batch.mean(
            distillation(logits[:, :old], batch.teacher[:, :old], self.temperature)
        )
        share = old / ctx.task.stop  # lambda
        return (1 - share) * loss + share * self.temperature**2 * teacher_loss, {}

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Fit alpha and beta to the images held out, and choose exemplars.

        Args:
            backbone: The frozen backbone.
            data: Local data of the client.
            ctx: Memory of the client and the final global model of the task.

        Returns:
            The memory with ``exemplar.index``, and the upload: ``bias`` [2], m_k times (alpha_k,
                beta_k), and ``validated``, m_k. The upload is empty without images held out.
        """
        # Stage 2: fit alpha and beta of z_c <- alpha z_c + beta, for the new classes, under the
        # final global model.
        _, validation = validation_split(
            data, ctx.memory.get("exemplar.index", data.index[:0]), self.validation
        )
        memory, _ = super().end_task_client(backbone, data, ctx)
        if not len(validation):
            return memory, {}
        batches = [
            (self.logits(backbone, ctx.shared, batch)[:, : ctx.task.stop], batch.y)
            for batch in data.batches(validation)
        ]
        bias = fit_bias(batches, ctx.task.start, self.bias_epochs, self.bias_lr)
        return memory, {
            "bias": len(validation) * bias,
            "validated": bias.new_tensor(len(validation)),
        }

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # Server: average (alpha_k, beta_k) with weights m_k, the numbers of images held out.
        scale, shift = state["correction.scale"].clone(), state["correction.shift"].clone()
        alpha, beta = sums["bias"] / sums["validated"]
        scale[ctx.task.start : ctx.task.stop] = alpha
        shift[ctx.task.start : ctx.task.stop] = beta
        return {**state, "correction.scale": scale, "correction.shift": shift}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax of the corrected logits over the classes seen.
        logits = self.logits(backbone, state, batch)
        return (logits * state["correction.scale"] + state["correction.shift"])[:, : task.stop]
