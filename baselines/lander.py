"""LANDER: Text-Enhanced Data-free Approach for Federated Class-Incremental Learning.

Tran et al., CVPR 2024.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._data_free_replay import Moments, Reply
from fczoo.baselines._lander_anchors import AnchoredReplay
from fczoo.baselines._lander_synthesis import SynthesisOptions, synthesise_images
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, drop, select, strip_prefix
from fczoo.core.types import Batch, Context, ServerContext, Task
from fczoo.functional.heads import head_logits
from fczoo.functional.losses import distillation, task_cross_entropy


@register_method("lander")
@dataclass(frozen=True)
class LANDER(SynthesisOptions, AnchoredReplay):
    """Features are pulled towards class anchors; clients replay images that the server synthesises.

    Clients train and send the linear head, a linear projection from features to anchors and,
    depending on ``tune``, LoRA pairs or all weights. The server sends to clients once per task
    the synthetic images, one byte per colour value, and the old model; once per run the anchors.
    Memory beyond the model: all of these. No image of a client is kept.

    The paper's anchors are text embeddings of class names (``anchor_file``). By default they are
    random; ``frozen_means`` also sends sums of frozen features. Source: the released code, not the
    paper's text; it does not name its text encoder. A vision transformer has no BatchNorm
    statistics to match (``prior=none``): anchors, the teacher's predictions and the student's
    disagreement shape the images. The student starts from the pre-trained weights and a new head.
    """

    paper = (
        'LANDER: Tran et al., "Text-Enhanced Data-free Approach for Federated Class-Incremental '
        'Learning", CVPR 2024, arXiv 2403.14101'
    )
    formulas = r"""
    With $a$, the feature in the space of the anchors $E$, and synthetic images $\tilde x$:

    $$B = \bigl[ \overline{(a - E_y)^2} - r \bigr]_+, \qquad L = w_{new} (L_{ce} + \lambda B)
    + w_{old} \bigl( L_{kd}(\tilde x) + \overline{(a(\tilde x) - a_{old}(\tilde x))^2} \bigr)$$

    $$w_{new} = 0.2 \, (1 + 1 / \alpha) / \beta, \quad w_{old} = 0.4 \, \alpha \beta, \quad
    \alpha = \log_2(|seen| / 2 + 1), \quad \beta = \sqrt{|old| / |seen|}$$

    The server makes the images by a generator trained for

    $$L_G = w_{prior} \, d(layers) + w_{match} L_{ce}(\tilde x, y)
    - w_{dis} \operatorname{KL}(p^T \Vert p^S) + \lambda B(\tilde x)$$
    """
    server_only = ("kept.",)
    dataset_options = {
        "digits": {  # for speed
            "images": 512,
            "synthesis_rounds": 12,
            "synthesis_batch": 64,
            "warmup": 5,
            "steps": 10,
            "student_steps": 5,
            "width": 16,
        }
    }

    temperature: float = option(2.0, "distillation temperature; loss not scaled by T^2", low=1e-6)
    weight_new: float = option(0.2, "loss weight of new images; times (1 + 1/alpha) / beta", low=0)
    weight_old: float = option(
        0.4, "loss weight of synthetic images; times alpha * beta", low=0, tune=(0.04, 40, "log")
    )
    keep: Literal["last", "lowest_loss"] = option(
        "last",
        "model at the end of a task: last, the last average; lowest_loss, the model that the "
        "server sent in the round with the lowest training loss",
        quirk={"lowest_loss": "tmtuan1307/LANDER"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup > self.synthesis_rounds:
            raise FczooError(
                f"lander.warmup={self.warmup} exceeds lander.synthesis_rounds="
                f"{self.synthesis_rounds}, so no synthetic image is kept; lower lander.warmup"
            )

    def training(self) -> Training:
        training = super().training()
        note = f"{training.table_note}; sends {self.pool_size} images to each client"
        training = replace(training, draws=self.ratio, table_note=note)
        # ``lowest_loss`` needs each client's loss in its first local epoch.
        if self.keep == "last":
            return training
        uploads = {**training.uploads, "first_epoch_loss": whole_tensors("losses")}
        return replace(training, uploads=uploads)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        lowest = {"kept.loss": torch.tensor(torch.finfo(torch.float32).max)}
        if not state:
            state = super().begin_task(state, task, backbone, rng)
            return {**state, **self.start_anchors(task, backbone.dim, rng), **lowest}
        # Task boundary: the teacher is the model kept for the last task. Without synthetic images,
        # as no client responded in the last round, clients replay black ones.
        pool = {"synthetic": torch.zeros(self.pool_size, 3, *2 * [self.side], dtype=torch.uint8)}
        return {**pool, **self.with_teacher(drop(state, "kept."), task), **lowest}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # z = head(f) and a = A f; the anchors act on a only.
        features = self.features(backbone, train, batch)
        table = ctx.shared["anchors"], ctx.shared["radius"]
        logits, attached = head_logits(train, features), attach(train, features)
        # First task: L = L_ce + lambda B (released: LANDER._local_update). Later tasks: the same on
        # new images, times w_new, plus w_old times the replay terms.
        loss = self.new_loss(logits, attached, table, batch, ctx.task)
        if ctx.task.index:  # L of a later task (released: LANDER._local_finetune)
            weight_new, weight_old = self.weights(ctx.task)
            replay_loss = self.replay_loss(backbone, train, batch, ctx)
            loss = weight_new * loss + weight_old * replay_loss
        if self.keep == "last":
            return loss, {}
        return loss, {"first_epoch_loss": loss.detach() * (batch.epoch[0] == 0)}

    def new_loss(
        self,
        logits: Tensor,
        attached: Tensor,
        table: tuple[Tensor, Tensor],
        batch: Batch,
        task: Task,
    ) -> Tensor:
        """Compute L_ce over the new classes + lambda B, the hinge on the distance of a to anchors.

        Args:
            logits: Logits [B, C].
            attached: Features a [B, e] in the space of the anchors.
            table: Anchors [C, e] and the radius.
            batch: Labels and weights of the new images.
            task: The current task.
        """
        anchors, radius = table
        bound = self.anchor_loss(attached, anchors[batch.y], radius, batch)
        return task_cross_entropy(logits, batch, task) + self.anchor_weight * bound

    def weights(self, task: Task) -> tuple[float, float]:
        """Return w_new and w_old, the weights of new and of synthetic images in a later task.

        Args:
            task: The task, with its numbers of old classes and of classes seen.
        """
        # w_new = 0.2 (1 + 1 / alpha) / beta falls and w_old = 0.4 alpha beta grows over the tasks.
        alpha = math.log2(task.stop / 2 + 1)
        beta = math.sqrt(task.start / task.stop)
        return self.weight_new * (1 + 1 / alpha) / beta, self.weight_old * alpha * beta

    def replay_loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Compute L_kd + the mean squared difference of a to a_old, on synthetic images."""
        # Each image of the batch takes ``ratio`` synthetic images at random.
        pool, teacher = ctx.shared["synthetic"], strip_prefix(ctx.shared, "teacher.")
        picks = (batch.draws * len(pool)).long().clamp(max=len(pool) - 1)  # [B, ratio]
        images = backbone.normalise(pool[picks.flatten()].to(batch.draws) / 255)
        with torch.no_grad():
            old = self.attached_reply(backbone, teacher, images, ctx.task.start)
        new = self.attached_reply(backbone, train, images, ctx.task.start)
        return batch.mean(self.distance(new, old).view(picks.shape).mean(1))

    def distance(self, new: Reply, old: Reply) -> Tensor:
        """Compute -sum_{c in OLD} q_c log p_c + mean (a - a_old)^2 of each image [R]."""
        outputs = distillation(new.logits, old.logits, self.temperature)
        return outputs + (new.features - old.features).square().mean(1)

    def attached_reply(self, backbone: Backbone, tree: Tree, images: Tensor, classes: int) -> Reply:
        """Compute a model's reply to generated images, with a [B, e] instead of the features.

        Args:
            backbone: The frozen backbone.
            tree: Trained tensors of the model.
            images: Images [B, 3, side, side], normalised.
            classes: Number of classes whose logits are returned.
        """
        reply = self.reply(backbone, tree, images, classes)
        return reply._replace(features=attach(tree, reply.features))

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Select the model of the task, and synthesise images after its last round.

        Args:
            state: Current state, with the model from which the round started.
            merged: Merged uploads of the clients.
            ctx: Server context.

        Returns:
            The state with the merged tensors or, with ``keep=lowest_loss`` after the last round,
                the model from which the round with the lowest sum of losses started.
        """
        merged = dict(merged)
        if self.keep == "lowest_loss":
            # s_r: sum of the clients' losses in the first local epoch of round r. The lowest s_r
            # keeps the model from which round r started; the earlier one if equal.
            total = merged.pop("first_epoch_loss") * ctx.participants
            if total < state["kept.loss"]:
                model = {f"kept.{k}": v for k, v in self.trained_part(state).items()}
                state = {**state, **model, "kept.loss": total}
            if ctx.round + 1 == ctx.rounds:
                merged = drop(strip_prefix(state, "kept."), "loss")
        return super().server_update(state, merged, ctx)

    def synthesise(self, state: Tree, prior: Sequence[Moments], ctx: ServerContext) -> Tree:
        backbone, classes = ctx.backbone, ctx.task.stop
        # Teacher: the kept model. Student: pre-trained weights, random head and map A.
        model = {k: v.detach() for k, v in self.trained_part(state).items()}
        start = backbone.full_weights()
        for name, value in select(state, "head.", "projection.").items():
            uniform = torch.rand(value.shape, generator=ctx.rng, device=ctx.rng.device).to(value)
            start[name] = (2 * uniform - 1) * backbone.dim**-0.5

        def reply_of(weights: Tree, images: Tensor) -> Reply:
            return self.attached_reply(backbone, weights, images, classes)

        images = synthesise_images(
            self,
            partial(reply_of, model),
            reply_of,
            start,
            (state["anchors"], state["radius"]),
            classes,
            prior,
            self.side,
            backbone.normalise,
            ctx.rng,
        )
        return {"synthetic": images[: self.images]}


def attach(tree: Tree, features: Tensor) -> Tensor:
    """Map features [B, D] to the space of the anchors: a = A f [B, e]."""
    return F.linear(features, tree["projection.weight"], tree["projection.bias"])
