"""FedCBDR: Class-wise Balancing Data Replay for Federated Class-Incremental Learning.

Qi et al., NeurIPS 2025.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.seeds import torch_stream
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Boundary, Context, LocalData, ServerContext, Task
from fczoo.functional.exemplars import NO_POSITIONS

BINS = 1024  # places in the draw: bins of waiting times, equally wide on a log scale
DECADES = (-6.0, 6.0)


@register_method("fedcbdr")
@dataclass(frozen=True)
class FedCBDR(TunedLinearHead):
    """Exemplars are drawn over all clients by leverage scores; the loss scales old and new logits.

    Clients train and send the linear head and, depending on ``tune``, LoRA pairs or all weights. As
    a task ends they send, once, the sum of outer products of their features and a histogram of
    their images' places in the draw. The server returns the inverse of the total and each class's
    last place. Exemplars stay at the client: ``per_task`` images per task, over all clients.
    Source: the paper's section on the method; no code is released.
    """

    paper = (
        'FedCBDR: Qi et al., "Class-wise Balancing Data Replay for Federated Class-Incremental '
        'Learning", NeurIPS 2025, arXiv 2507.07712'
    )
    formulas = r"""
    Leverage score of an image with feature $x$, where $X$ has the features of all clients:

    $$\tau = x^\top (X^\top X)^+ x$$

    Of each class the same number of images, drawn with probabilities $\propto \tau$, is kept. Then

    $$L = \omega_{old} \, \overline{L_{ce}(\tilde z)}^{\,replayed}
    + \omega_{new} \, \overline{L_{ce}(\tilde z)}^{\,new}, \qquad
    \tilde z = (z_{old} / \tau_{old}, \; z_{new} / \tau_{new})$$
    """
    dataset_options = {"digits": {"per_task": 40}}

    tune: Literal["full", "lora", "head"] = option(
        "lora", "tensors trained below the head: full, all weights; lora, LoRA pairs; head, none"
    )
    per_task: int = option(500, "exemplars of each task, over all clients together", low=0)
    sampling: Literal["leverage", "uniform"] = option(
        "leverage", "draw of images of a class: leverage, by leverage score; uniform, equal chances"
    )
    leading: int = option(
        0, "number of leading feature directions in the leverage scores; 0: all of them", low=0
    )
    tau_old: float = option(0.9, "temperature of old classes' logits", low=1e-6)
    tau_new: float = option(1.1, "temperature of new classes' logits", low=1e-6)
    weight_old: float = option(1.2, "weight of the replayed images' mean loss", low=0)
    weight_new: float = option(0.8, "weight of the new images' mean loss, after task 1", low=0)

    def training(self) -> Training:
        training = super().training()
        uploads = {**training.uploads, "places": whole_tensors("counts")}
        phases = {*training.collect_at}
        if self.sampling == "leverage":
            uploads["gram"] = whole_tensors("second moments", symmetric=True)
            phases.add("before_exemplars")
        note = f"keeps {self.per_task} images per task, over all clients together"
        training = replace(training, uploads=uploads, collect_at=phases, table_note=note)
        return replace(training, exemplars="exemplar.index")

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Last place of each class in the draw; images at later places are not exemplars.
        last_place = {"last_place": torch.full((task.classes,), BINS - 1)}
        seed = torch.randint(2**31, (1,), generator=rng)
        return {**last_place, **super().begin_task(state, task, backbone, rng), "draw_seed": seed}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        return self.scaled_loss(logits, batch, ctx.task.start), {}

    def scaled_loss(self, logits: Tensor, batch: Batch, old: int) -> Tensor:
        """Compute the task-aware temperature-scaled loss: means over replayed and over new images.

        Args:
            logits: Logits [B, C] over the classes seen.
            batch: Labels and weights of the images.
            old: Number of old classes; these are the first ones. 0: plain cross-entropy.

        Returns:
            The loss, a scalar.
        """
        if not old:
            return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        z = torch.cat([logits[:, :old] / self.tau_old, logits[:, old:] / self.tau_new], 1)  # z~
        per_image = F.cross_entropy(z, batch.y, reduction="none")
        is_old = (batch.y < old).to(batch.w)
        replay_loss = batch._replace(w=batch.w * is_old).mean(per_image)
        new_loss = batch._replace(w=batch.w * (1 - is_old)).mean(per_image)
        return self.weight_old * replay_loss + self.weight_new * new_loss

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, before the draw: X_k^T X_k of the task's features under the global model. Its sum
        # over clients gives the leverage scores exactly (paper: clients send rotated features).
        features = (self.features(backbone, tree, batch) * batch.w[:, None]).double()
        return {"gram": features.mT @ features}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Invert X^T X before the draw; after it, set the last place of each class.

        Args:
            phase: ``before_exemplars``, ``after_rounds``, or ``task_start`` for the head's means.
            state: Current state.
            sums: ``gram`` [D, D], or ``places`` [c, BINS] of the task's classes.
            ctx: Server context.

        Returns:
            The state with ``leverage`` [D, D], or with ``last_place`` [C].
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        if phase == "before_exemplars":
            return {**state, "leverage": pseudo_inverse(sums["gram"], self.leading).float()}
        task, last_place = ctx.task, state["last_place"].clone()
        # Class balance: per class the first images of the draw over all clients, up to the quota;
        # fewer if images that share a place would exceed it.
        images = sums["places"].double().round().cumsum(1)  # [c, BINS]
        quotas = self.quotas(task)[:, None].to(images)
        last_place[task.start : task.stop] = (images <= quotas).sum(1) - 1
        return {**drop(state, "leverage"), "last_place": last_place}

    def quotas(self, task: Task) -> Tensor:
        """Return the number of exemplars per class of a task [c], over all clients.

        Args:
            task: The task; its first classes get the remainder of ``per_task``, one each.
        """
        share, rest = divmod(self.per_task, task.size)
        return torch.tensor([share + (i < rest) for i in range(task.size)])

    def end_task_client(
        self, backbone: Backbone, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Draw exemplars of the new classes by leverage scores, and count their places.

        Weighted sampling without replacement (Efraimidis and Spirakis, 2006): each image gets an
        exponential waiting time with rate tau; the shortest times are drawn. Clients thus draw
        from all images together, and the server learns only the number of images per place.

        Args:
            backbone: The frozen backbone.
            data: Local data of the client.
            ctx: Memory of the client and the final global model of the task.

        Returns:
            The memory with up to a quota of images per class, which ``before_training`` shortens
                to the images within the last place; and the upload ``places`` [c, BINS].
        """
        memory, task = self.before_training(backbone, data, ctx), ctx.task
        labels = data.labels(data.index).cpu() - task.start
        held = torch.bincount(labels, minlength=task.size).tolist()  # the seed of the client's draw
        stream = torch_stream("fedcbdr", int(ctx.shared["draw_seed"]), *held)
        waits = torch.empty(len(labels), dtype=torch.float64).exponential_(generator=stream)
        if self.sampling == "leverage" and len(labels):
            inverse = ctx.shared["leverage"]
            scores = [
                leverage_scores(self.features(backbone, ctx.shared, batch), inverse)
                for batch in data.batches(data.index)
            ]
            waits = waits / torch.cat(scores).double().cpu().clamp(min=1e-12)  # rate tau_j
        places = places_of(waits)
        counts = torch.zeros(task.size, BINS)
        index, place = [memory["exemplar.index"]], [memory["exemplar.place"]]
        for label, quota in enumerate(self.quotas(task).tolist()):
            of_class = (labels == label).nonzero()[:, 0]
            chosen = of_class[waits[of_class].argsort()][:quota]
            counts[label] = torch.bincount(places[chosen], minlength=BINS)
            index.append(data.index.cpu()[chosen])
            place.append(places[chosen])
        kept = {"exemplar.index": torch.cat(index), "exemplar.place": torch.cat(place)}
        return kept, {"places": counts}

    def before_training(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Return the memory without images beyond the last place of their class."""
        index = ctx.memory.get("exemplar.index", NO_POSITIONS)
        place = ctx.memory.get("exemplar.place", NO_POSITIONS)
        stays = place.cpu() <= ctx.shared["last_place"].cpu()[data.labels(index).cpu()]
        return {"exemplar.index": index[stays], "exemplar.place": place[stays]}

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return ctx.memory, {}


def pseudo_inverse(gram: Tensor, leading: int = 0) -> Tensor:
    """Compute the pseudo-inverse of a matrix of second moments.

    Args:
        gram: Sum of outer products [D, D].
        leading: Number of largest eigenvalues to invert; 0: all above rounding error.

    Returns:
        The inverse [D, D] on the span of their eigenvectors, in float64.
    """
    values, vectors = torch.linalg.eigh(gram.double())
    smallest = values.max() * len(values) * torch.finfo(torch.float32).eps
    usable = values > smallest.clamp(min=0)
    if leading:
        usable[:-leading] = False
    values = torch.where(usable, 1 / torch.where(usable, values, 1), 0)
    inverse: Tensor = (vectors * values) @ vectors.mT
    return inverse


def leverage_scores(features: Tensor, inverse: Tensor) -> Tensor:
    """Compute the leverage score x^T (X^T X)^+ x of each image.

    Args:
        features: Features x [n, D].
        inverse: Pseudo-inverse of the second moments [D, D].

    Returns:
        Scores [n], from 0 to 1; their sum over all images is the rank.
    """
    return ((features.to(inverse) @ inverse) * features.to(inverse)).sum(1)


def places_of(waits: Tensor) -> Tensor:
    """Return the bins [n] of waiting times [n]."""
    low, high = DECADES
    bins = (waits.clamp(min=1e-300).log10() - low) / (high - low) * BINS
    return bins.floor().clamp(0, BINS - 1).long()
