"""PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning.

Ma'sum et al., CIKM 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fczoo.baselines.dualprompt import DualPrompt
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import moment_sums
from fczoo.functional.heads import head_logits
from fczoo.functional.losses import task_cross_entropy
from fczoo.protocols.registry import use_protocol_options

GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are evenly distributed in [0, 1)


@register_method("pip")
@use_protocol_options("hgp", "pip")
@dataclass(frozen=True)
class PIP(DualPrompt):
    """DualPrompt whose head also trains on prototypes: class means and randomly shifted copies.

    Clients train and send the general prefixes, the current task's expert prefixes and key, and the
    linear head. In each round they also send count, sum and sum of squares of the prompted features
    of each local class, which the server pools. From a task's second round on, three prototypes per
    class join every batch at the head: mu, mu + u s and mu - u s, with the class mean mu, the
    standard deviation s and u from U(0, 1/3).
    """

    paper = (
        "Ma'sum et al., \"PIP: Prototypes-Injected Prompt for Federated Class Incremental "
        'Learning", CIKM 2024'
    )
    formulas = r"""
    From a task's second round on, over the batch $X$ and the $C$ classes that have a mean:

    $$L_{ce} = \frac{1}{|X| + 3 C} \Bigl( \sum_{x \in X} \ell(f(x), y)
    + \sum_c \sum_{p \in P_c} \ell(p, c) \Bigr)$$

    $$P_c = \{ \mu_c,\; \mu_c + u \odot s_c,\; \mu_c - u \odot s_c \}, \quad u \sim U(0, 1/3)$$

    $\ell$ is the head's cross-entropy over the task's classes, $s_c$ the standard deviation.
    """

    dataset_options = {"digits": DualPrompt.dataset_options["digits"]}

    expert_length: int = option(
        5, "length L_e of each expert key and value prefix, in tokens", low=1
    )
    reach: float = option(
        1 / 3, "maximum of u, shift from the class mean in standard deviations", low=0
    )
    code_variance: bool = option(
        False,
        "use s = mu^4 in place of the standard deviation, as the released code does by mistake",
        quirk="anwarmaxsum/PIP",
    )

    def training(self) -> Training:
        training = super().training()
        uploads = {**training.uploads, "proto.": per_class("count", "sum", "squares")}
        collect_at = {*training.collect_at, "after_training"}
        return replace(training, uploads=uploads, collect_at=collect_at, draws=1)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: as DualPrompt. New classes have no prototype yet.
        none = torch.zeros(task.size, backbone.dim)
        protos = {"mean": none, "spread": none, "held": torch.zeros(task.size)}
        return {**super().begin_task(state, task, backbone, rng), **protos}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L_ce of the real images.
        logits = head_logits(train, self.trained_features(backbone, train, batch))
        loss = task_cross_entropy(logits, batch, ctx.task)
        # From the task's second round on: prototypes join the batch at the head; L_ce is the mean
        # over real images and three prototypes per class.
        if ctx.round:
            real, prototype_loss = batch.w.sum(), self.prototype_loss(train, batch, ctx)
            copies = 3 * ctx.shared["held"].sum()
            loss = (real * loss + prototype_loss) / (real + copies)
        if self.no_key_loss:
            return loss, {}
        # Key term of DualPrompt: - lambda mean cos(q, k_t).
        return loss - self.pull * batch.mean(
            cosines(batch.query, train["expert.key"][None])[:, 0]
        ), {}

    def prototype_loss(self, train: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Compute the loss of the prototypes {mu, mu + u s, mu - u s} of each class with a mean.

        Args:
            train: Trained tensors, with the head.
            batch: The batch, with one uniform number of ``draws``.
            ctx: Broadcast tensors, with ``mean`` and ``spread`` [c, D] and ``held`` [c].

        Returns:
            The sum of the cross-entropies over the task's classes.
        """
        mean, spread = ctx.shared["mean"], ctx.shared["spread"]
        task, entry = ctx.task, torch.arange(mean.numel(), device=mean.device).view(mean.shape)
        u = self.reach * (
            (batch.draws[0, 0] + GOLDEN_RATIO * entry) % 1
        )  # uniform, different in each dimension
        protos = torch.stack([mean, mean + u * spread, mean - u * spread])  # [3, c, D]
        logits = head_logits(train, protos)[..., task.start : task.stop]
        loss = -logits.log_softmax(-1).diagonal(dim1=1, dim2=2)  # [3, c]
        return (loss * ctx.shared["held"]).sum()

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, after local training: n, sum f and sum f^2 of the prompted features per class.
        sums = moment_sums(self.trained_features(backbone, tree, batch), batch, ctx.task)
        return {k.replace("class.", "proto.", 1): v for k, v in sums.items()}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Server: average the trained tensors, add up the class sums.
        names = select(dict(payloads[0]), "proto.")
        sums = {k: torch.stack([p[k] for p in payloads]).sum(0) for k in names}
        return {**average([p.drop("proto.") for p in payloads]), **sums}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Update mean and standard deviation of each class with images in the round.

        Args:
            state: Current state.
            merged: Merged uploads, with ``proto.count`` [c], ``proto.sum`` and ``proto.squares``
                [c, D].
            ctx: Server context.

        Returns:
            The state with ``mean`` and ``spread`` [c, D] and ``held`` [c].
        """
        # Prototypes pooled over clients: mu = sum / n, s = sqrt(squares / n - mu^2). Released code:
        # s = mu^4.
        count = merged.pop("proto.count")[:, None]
        mean = merged.pop("proto.sum") / count.clamp(min=1)
        variance = merged.pop("proto.squares") / count.clamp(min=1) - mean.square()
        spread = mean**4 if self.code_variance else variance.clamp(min=0).sqrt()
        new = {"mean": mean, "spread": spread, "held": torch.ones_like(state["held"])}
        tables = {}
        for name, value in new.items():
            counts = count if value.dim() > 1 else count[:, 0]
            tables[name] = torch.where(counts > 0, value.to(state[name]), state[name])
        return {**state, **merged, **tables}
