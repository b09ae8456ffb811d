"""LGA: No One Left Behind: Real-World Federated Class-Incremental Learning.

Dong et al., TPAMI 2023.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines.glfc import GLFC
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.gaussians import moment_sums


@register_method("lga")
@dataclass(frozen=True)
class LGA(GLFC):
    """GLFC with both losses weighted by each image's gradient, relative to images of its task.

    Clients train and send the same as in GLFC, with gradients that can be inverted. After each task
    they also send count, sum and sum of squares of each class's features. From those of the first
    task the server computes the radius of the noise that it adds to features of reconstructed
    images when it evaluates models. The released server computes it from the training images
    themselves.
    """

    paper = (
        'Dong et al., "No One Left Behind: Real-World Federated Class-Incremental '
        'Learning", TPAMI 2023'
    )
    formulas = r"""
    $$L = \lambda w \bigl( L_{bce}(z, y) + L_{bce}(z, q) \bigr)$$

    $$w = \operatorname{clip}\Bigl( \frac{g}{\operatorname{mean} g},\;
    w_{min},\; w_{max} \Bigr), \quad g = (1 - \sigma(z_y))^{(t - 1) / t}$$

    The tasks are $t = 1, 2, \dots$. The mean is over a group of the batch's images: those of the
    classes of one past task, or all other images. The targets $q$ are the old model's sigmoids for
    old classes and the labels for the others. The term with $q$ is used from the second task on.
    """

    relation: float = option(
        1.0, "lambda, factor on the sum of compensated loss and distillation", low=0
    )
    lowest: float = option(0.5, "minimum weight of an image", low=0)
    highest: float = option(5.0, "maximum weight of an image", low=0)
    warmup: int = option(
        6,
        "rounds at the start of a task in which the latest model counts as the best",
        low=0,
    )
    augmentations: int = option(
        5, "noisy copies of the feature of each reconstructed image, to evaluate models", low=1
    )
    cumulative_groups: bool = option(
        False,
        "use overlapping groups to average gradients: group i has the learned classes of tasks 1 "
        "to i; an image's weights are summed over its groups",
        quirk="JiahuaDong/LGA",
    )

    def training(self) -> Training:
        training = super().training()
        uploads = {**training.uploads, "spread.": per_class("count", "sum", "squares")}
        return replace(training, uploads=uploads, collect_at={*training.collect_at, "task_end"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary as in GLFC; the radius of the first task is kept.
        sizes = [*state["sizes"].tolist(), task.size] if "sizes" in state else [task.size]
        radius = state.get("monitor.radius", torch.zeros(()))
        return {
            **super().begin_task(state, task, backbone, rng),
            "sizes": torch.tensor(sizes),
            "monitor.radius": radius,
        }

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, task end: count, sum and sum of squares of features per class, for the radius.
        sums = moment_sums(self.features(backbone, tree, batch), batch, ctx.task)
        return {k.replace("class.", "spread.", 1): v for k, v in sums.items()}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Set the radius of the noise after the first task.

        Args:
            phase: ``task_start`` for the head's means, ``task_end`` for the radius.
            state: Current state.
            sums: ``spread.count`` [c], ``spread.sum`` and ``spread.squares`` [c, D].
            ctx: Server context.

        Returns:
            The state with ``monitor.radius``.
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        has_spread = sums["spread.count"] > 1
        if ctx.task.index or not has_spread.any():
            return state
        # Server: radius = sqrt(mean over the first task's classes of trace(covariance) / D).
        count = sums["spread.count"][has_spread][:, None].double()
        total, squares = (
            sums["spread.sum"][has_spread].double(),
            sums["spread.squares"][has_spread].double(),
        )
        variance = (squares - total.square() / count) / (count - 1)
        return {
            **state,
            "monitor.radius": variance.clamp(min=0).mean().sqrt().to(state["monitor.radius"]),
        }

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L_GC: binary cross-entropy over the classes seen, weighted by w.
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        none = torch.zeros(ctx.task.classes, dtype=torch.bool, device=logits.device)
        old_classes = ctx.memory.get("learned", none)
        weights = self.group_weights(logits, batch, old_classes, ctx.shared["sizes"])
        hot = F.one_hot(batch.y, logits.shape[1]).to(logits)
        losses = F.binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(-1)
        # L_RD: targets of old classes are the old model's sigmoids; the same weights w as L_GC.
        if ctx.task.index:
            targets = torch.cat(
                [batch.teacher[:, : ctx.task.start].sigmoid(), hot[:, ctx.task.start :]], 1
            )
            losses = losses + F.binary_cross_entropy_with_logits(
                logits, targets, reduction="none"
            ).mean(-1)
        return self.relation * batch.mean(weights * losses), {}

    def group_weights(self, logits: Tensor, batch: Batch, learned: Tensor, sizes: Tensor) -> Tensor:
        """Compute the weight w of each image: g / (mean g of its group), clipped.

        g = |p_y - 1|^(t/(t+1)) in task t = 0, 1, .. A group is the classes of one past task that
        the client has learned; all other classes are one more group.

        Args:
            logits: Logits [B, C] over the classes seen.
            batch: Labels and weights of the images.
            learned: True for classes that the client has learned before [C].
            sizes: Classes of each task so far [t + 1].

        Returns:
            Weights [B] from ``lowest`` to ``highest``; all 1 before the client learns a class.
        """
        # g = |p_y - 1|^(t/(t+1)), without gradient.
        t, old = len(sizes) - 1, learned[batch.y]
        gradient = (1 - logits.detach().sigmoid().gather(1, batch.y[:, None])[:, 0]) ** (
            t / (t + 1)
        )
        task = torch.bucketize(batch.y, sizes.cumsum(0), right=True)

        def over_mean(group: Tensor) -> Tensor:
            inside = group.to(gradient)
            mean = (gradient * inside * batch.w).sum() / (inside * batch.w).sum().clamp(min=1)
            return inside * gradient / mean.clamp(min=torch.finfo(gradient.dtype).tiny)

        # One group of new classes, one group per past task.
        weights = over_mean(~old)
        for past in range(t):
            weights = weights + over_mean(
                old & ((task <= past) if self.cumulative_groups else (task == past))
            )
        final_weights = weights.clamp(self.lowest, self.highest)
        return torch.where(learned.any(), final_weights, torch.ones_like(final_weights))

    def monitor_accuracy(self, state: Tree, ctx: ServerContext) -> Tensor:
        # In the first rounds of a task the accuracy is 0, so that the latest model is the best.
        accuracy = super().monitor_accuracy(state, ctx)
        return torch.zeros_like(accuracy) if ctx.round < self.warmup else accuracy

    def augment_features(
        self, features: Tensor, labels: Tensor, state: Tree, ctx: ServerContext
    ) -> tuple[Tensor, Tensor]:
        """Return noisy copies of each feature: f + radius N(0, I).

        Args:
            features: Features [n, D] of reconstructed images.
            labels: Their labels [n].
            state: State with ``monitor.radius``.
            ctx: Server context, with the generator of the noise.

        Returns:
            Features [a n, D] and labels [a n], a = ``augmentations``.
        """
        copies = features.repeat(self.augmentations, 1)
        noise = torch.randn(
            copies.shape, generator=ctx.rng, device=copies.device, dtype=copies.dtype
        )
        return copies + state["monitor.radius"] * noise, labels.repeat(self.augmentations)
