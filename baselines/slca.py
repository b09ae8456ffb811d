"""SLCA: Slow Learner with Classifier Alignment, in federated learning. Zhang et al., ICCV 2023."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop, select, strip_prefix
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.gaussians import draw_per_gaussian, gaussians, moment_sums
from fczoo.functional.heads import train_head
from fczoo.functional.losses import cross_entropy_by_task_norm


@register_method("slca")
@dataclass(frozen=True)
class SLCA(TunedLinearHead):
    """FedAvg with a slow backbone, and a head that the server aligns on features from Gaussians.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    After a task they send once, per class, count, sum and sum of outer products of features. From
    these the server computes mean and covariance of each class, exactly as if all images were
    in one place. After each task but the first it aligns the head on features drawn from these
    Gaussians. The aligned head predicts; training resumes from the head before the alignment.
    """

    paper = (
        'Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a '
        "Pre-trained Model\", ICCV 2023; federated in FPPL's comparison"
    )
    formulas = r"""
    After each task $t$ except the first, the server trains the head on features
    that it draws for each class $c$; $i$ is the task of this class:

    $$z \sim \mathcal N\bigl( (a + (1 - a) i / t) \mu_c,\; \Sigma_c + \epsilon I \bigr)$$

    $$L = -\log \operatorname{softmax}\Bigl(
    \frac{h(z)}{\tau \operatorname{mean}_j \lVert h_j(z) \rVert} \Bigr)_c$$

    $h_j(z)$ are the logits of task $j$'s classes.
    """
    server_only = ("gauss.", "aligned.", "sizes")
    dataset_options = {}  # the defaults are its own two learning rates

    per_class: int = option(
        256, "features drawn per class and epoch of the alignment; also its batch size", low=1
    )
    server_epochs: int = option(5, "epochs of the alignment", low=1)
    server_lr: float = option(
        0.01, "learning rate of the alignment, SGD with momentum 0.9, cosine over the epochs", low=0
    )
    server_decay: float = option(5e-4, "weight decay of the alignment", low=0)
    temperature: float = option(0.1, "tau, temperature of the alignment's loss", low=1e-6)
    jitter: float = option(1e-4, "epsilon, added to the variances of the Gaussians", low=0)
    ageing: float = option(
        0.9,
        "a: means of task i of t are multiplied by a + (1 - a) i / t, so old ones are shorter; 1: "
        "unchanged",
        low=0,
    )

    def training(self) -> Training:
        training = super().training()
        uploads = {"moment.": per_class("count", "sum", "products"), **training.uploads}
        return replace(training, uploads=uploads, collect_at={*training.collect_at, "task_end"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: drop the aligned head; training resumes from the head before the alignment.
        state = drop(super().begin_task(state, task, backbone, rng), "aligned.")
        sizes = [*state["sizes"].tolist(), task.size] if "sizes" in state else [task.size]
        return {**state, "sizes": torch.tensor(sizes)}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, as the task ends, under the final global model: n, sum f and sum f f^T per class.
        sums = moment_sums(self.features(backbone, tree, batch), batch, ctx.task, full=True)
        return {k.replace("class.", "moment.", 1): v for k, v in sums.items()}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        sums = {k.replace("moment.", "class.", 1): v for k, v in sums.items()}
        # Server: pooled mean and covariance of each new class; old classes keep theirs.
        new = gaussians(sums, ctx.task.start, single=True)
        old = select(state, "gauss.")
        if old:  # labels may recur: use their latest moments
            stay = ~torch.isin(old["gauss.label"], new["gauss.label"])
            new = {k: torch.cat([old[k][stay], v]) for k, v in new.items()}
        # Classifier alignment, from the second task on. The aligned head answers; the next task
        # trains the head before the alignment.
        head = select(state, "head.")
        if ctx.task.index:
            head = self.align_head(head, new, state["sizes"].tolist(), ctx)
        return {**state, **new, **{f"aligned.{k}": v for k, v in head.items()}}

    def align_head(self, head: Tree, gauss: Tree, sizes: list[int], ctx: ServerContext) -> Tree:
        """Align the head on features drawn for all classes seen.

        Args:
            head: ``head.weight`` [C, D] and ``head.bias`` [C].
            gauss: Gaussians of all classes seen, with covariances.
            sizes: Number of classes of each task so far.
            ctx: Current task and random generator.

        Returns:
            The aligned head.
        """
        # Gaussian of class c: mean scaled by a + (1 - a) i / t for a class of task i = 1 .. t, with
        # a = ``ageing``; covariance + epsilon I.
        task = torch.bucketize(
            gauss["gauss.label"], torch.tensor(sizes).cumsum(0).to(ctx.rng.device), right=True
        )
        age = self.ageing + (1 - self.ageing) * (task + 1) / len(sizes)
        mean, cov = gauss["gauss.mean"], gauss["gauss.cov"]
        targets = {
            **gauss,
            "gauss.mean": mean * age[:, None].to(mean),
            "gauss.cov": cov + self.jitter * torch.eye(cov.shape[-1]).to(cov),
        }
        # Draw ``per_class`` features per class and epoch. SGD, momentum 0.9, cosine over epochs.
        # L: cross-entropy of logits divided by tau and by the mean over tasks of their norms.
        return train_head(
            head,
            (0, ctx.task.stop),
            lambda: draw_per_gaussian(targets, self.per_class, ctx.rng),
            lambda logits, labels: cross_entropy_by_task_norm(
                logits, labels, sizes, self.temperature
            ),
            self.server_epochs,
            self.server_lr,
            self.per_class,
            weight_decay=self.server_decay,
        )

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: the aligned head, argmax over the classes seen.
        head = strip_prefix(state, "aligned.")
        return self.logits(backbone, {**state, **head}, batch)[:, : task.stop]
