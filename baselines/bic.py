"""BiC in federated learning: Large Scale Incremental Learning. Wu et al., CVPR 2019."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import Tuned
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Context, LocalData, ServerContext, Task, Training
from fczoo.functional.bias import fit_bias, validation_split
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.losses import distillation


@register_method("bic")
@dataclass(frozen=True)
class BiC(Tuned, Rehearsal):
    """Distillation with exemplars; after a task two numbers put the new classes' logits on the old scale.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs; after a task, once, alpha
    and beta, which each client has fitted under the global model to images that it had held out of
    training. The server averages them by the clients' numbers of these images. As the corrected model
    teaches the next task, only the last task's logits are corrected. Memory beyond the model: the teacher,
    one copy of what is trained; exemplars at the client.
    """

    paper = "Wu et al., Large Scale Incremental Learning, CVPR 2019"
    formulas = r"""
    $$L = (1 - \lambda) L_{ce} - \lambda T^2 \sum_{c \in old} q_c \log p_c$$

    $$z_c \leftarrow \alpha z_c + \beta, \quad c \in C_t, \quad
    (\alpha, \beta) = \frac{\sum_k m_k (\alpha_k, \beta_k)}{\sum_k m_k}$$

    $\lambda$ is the old classes' share of those seen; $q$ and $p$ are softmaxes over the old classes of the
    teacher's corrected logits and of these, both divided by $T$. Client $k$ fits $\alpha_k$ and $\beta_k$ to
    $m_k$ images held out, after the task.
    """
    tuned = {"digits": {"memory": 20, "bias_lr": 0.02}}

    temperature: float = option(2.0, "T of both softmaxes; the distillation is multiplied by T^2", low=1e-6)
    validation: float = option(
        0.1, "part of a class's exemplars that is held out; of a new class as many images", low=0, high=0.5
    )
    bias_epochs: int = option(250, "epochs in which alpha and beta are fitted", low=1)
    bias_lr: float = option(1e-3, "their learning rate", low=0)

    def training(self) -> Training:
        def trained(data: LocalData, kept: Tensor) -> Tensor:
            return validation_split(data, kept, self.validation)[0]

        training = self.rehearsing(super().training())
        uploads = {"bias": whole("parameters"), "validated": whole("counts")}
        return replace(training, trains_on=trained, uploads={**training.uploads, **uploads})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        none = {"correction.scale": torch.ones(task.classes), "correction.shift": torch.zeros(task.classes)}
        state = {**none, **super().begin_task(state, task, backbone, rng)}
        state = self.with_teacher(state, task, *self.training().optims, "correction.")
        return {**state, **none}

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        logits = self.recalled("teacher.", backbone, shared, batch)
        if task.index == 0:
            return logits
        return logits * shared["teacher.correction.scale"] + shared["teacher.correction.shift"]

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits, old = self.logits(backbone, train, batch)[:, : ctx.task.stop], ctx.task.start
        loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        if not old:
            return loss, {}
        distilled = batch.mean(distillation(logits[:, :old], batch.teacher[:, :old], self.temperature))
        share = old / ctx.task.stop  # lambda
        return (1 - share) * loss + share * self.temperature**2 * distilled, {}

    def conclude(self, backbone: Backbone, data: LocalData, ctx: Context) -> tuple[Tree, Tree]:
        """Fit alpha and beta to the images held out, and choose exemplars."""
        _, held = validation_split(data, ctx.memory.get("exemplar.index", data.index[:0]), self.validation)
        memory, _ = super().conclude(backbone, data, ctx)
        if not len(held):
            return memory, {}
        batches = [
            (self.logits(backbone, ctx.shared, batch)[:, : ctx.task.stop], batch.y)
            for batch in data.batches(held)
        ]
        bias = fit_bias(batches, ctx.task.start, self.bias_epochs, self.bias_lr)
        return memory, {"bias": len(held) * bias, "validated": bias.new_tensor(len(held))}

    def concluded(self, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        scale, shift = state["correction.scale"].clone(), state["correction.shift"].clone()
        alpha, beta = sums["bias"] / sums["validated"]
        scale[ctx.task.start : ctx.task.stop] = alpha
        shift[ctx.task.start : ctx.task.stop] = beta
        return {**state, "correction.scale": scale, "correction.shift": shift}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        logits = self.logits(backbone, state, batch)
        return (logits * state["correction.scale"] + state["correction.shift"])[:, : task.stop]
