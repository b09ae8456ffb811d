"""Base of most baselines: a linear head, with all weights, LoRA pairs or nothing trained below."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.training import Training
from fczoo.core.tree import Tree, drop, select, strip_prefix
from fczoo.core.types import Batch, Context, Task
from fczoo.functional.heads import LinearHead, OptimizerOptions, head_logits
from fczoo.functional.lora import lora_pairs
from fczoo.functional.losses import task_cross_entropy
from fczoo.protocols.registry import use_protocol_options


@dataclass(frozen=True)
class TunedBackbone(OptimizerOptions):
    """Base of methods that train their own head and, depending on ``tune``, weights below it.

    The papers disagree on what their baselines train: all weights (HGP; FPPL, with a low learning
    rate), or LoRA on the first block (PILoRA).
    """

    tune: Literal["full", "lora", "head"] = option(
        "full", "tensors trained below the head: full, all weights; lora, LoRA pairs; head, none"
    )
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    lr_backbone: float = option(
        1e-4,
        "learning rate of all weights or LoRA pairs (FPPL's fine-tuned baselines: 1e-4)",
        low=0,
        tune=(1e-6, 1e-3, "log"),
    )
    rank: int = option(4, "LoRA rank, with tune=lora", low=1)
    blocks: tuple[int, ...] = option((0,), "blocks with LoRA on q and v, with tune=lora", low=0)

    def tuning(self, *heads: str) -> Training:
        """Declare what is trained: the head and what ``tune`` adds.

        Args:
            *heads: Prefixes of the head's tensors.

        Returns:
            The declaration of the training. With ``tune=head`` it reads frozen features, which are
                computed once.
        """
        optims = {prefix: self.optim(self.lr) for prefix in heads}
        if self.tune == "head":
            return Training(optims, inputs=["query"])
        return Training({**optims, f"{self.tune}.": self.optim(self.lr_backbone)})

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features under the trained weights.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``full.*`` or ``lora.*``.
            batch: Images; with ``tune=head`` their frozen features are the result.

        Returns:
            Features [B, D].
        """
        return (
            batch.query
            if self.tune == "head"
            else backbone(batch.x, select(tree, "full.", "lora."))
        )

    def with_teacher(self, state: Tree, task: Task, *prefixes: str) -> Tree:
        """Add the global model at the end of the last task to the state, as the teacher.

        Args:
            state: State as the task begins.
            task: The task that begins; the first one has no teacher.
            *prefixes: Prefixes of the tensors to copy; without any, all that clients train.

        Returns:
            The state with ``teacher.X``.
        """
        if task.index == 0:
            return state
        model = select(state, *prefixes) if prefixes else self.trained_part(state)
        return {**drop(state, "teacher."), **{f"teacher.{k}": v for k, v in model.items()}}

    def trained_part(self, tree: Tree) -> Tree:
        """Return the part of a tree that clients train.

        Args:
            tree: State or broadcast.
        """
        return select(tree, *self.training().optims)

    def start_plugs(self, backbone: Backbone, rng: torch.Generator) -> Tree:
        """Create the plugs of ``tune`` at the start of a run.

        Args:
            backbone: The frozen backbone.
            rng: Random generator.

        Returns:
            All weights, LoRA pairs with B = 0, or an empty tree.
        """
        if self.tune == "full":
            return backbone.full_weights()
        return (
            lora_pairs(backbone, self.blocks, self.rank, rng, "blocks")
            if self.tune == "lora"
            else {}
        )


@use_protocol_options("hgp", "ewc")  # one rate for most methods that fine-tune all weights
@dataclass(frozen=True)
class TunedLinearHead(TunedBackbone, LinearHead):
    """Base of methods with a linear head; the loss is cross-entropy over the task's classes."""

    def training(self) -> Training:
        return self.with_head_means(self.tuning("head."))

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        return state or {
            **self.start_head(task, backbone.dim, rng),
            **self.start_plugs(backbone, rng),
        }

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L_ce: cross-entropy over the classes of the task; other head rows get no gradient.
        return task_cross_entropy(self.logits(backbone, train, batch), batch, ctx.task), {}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax over the classes seen.
        return self.logits(backbone, state, batch)[:, : task.stop]

    def logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute logits over all classes of the run.

        Args:
            backbone: The frozen backbone.
            tree: State or trained tensors of the model.
            batch: Images.

        Returns:
            Logits [B, C].
        """
        return head_logits(tree, self.features(backbone, tree, batch))

    def earlier_logits(self, prefix: str, backbone: Backbone, shared: Tree, batch: Batch) -> Tensor:
        """Compute logits of an earlier model that the server broadcasts, such as the teacher.

        Args:
            prefix: Prefix of the model's tensors.
            backbone: The frozen backbone.
            shared: Broadcast tensors.
            batch: Images.

        Returns:
            Logits [B, C]; [B, 0] without such a model.
        """
        model = strip_prefix(shared, prefix)
        return (
            self.logits(backbone, model, batch) if model else batch.query.new_empty(len(batch.y), 0)
        )


@dataclass(frozen=True)
class TunedWithStatistics(TunedLinearHead):
    """Base of methods whose clients also send statistics of their classes' features."""

    stats_unnormalised: bool = option(
        False,
        "compute statistics on whole images with pixels in [0, 1], without the normalisation of "
        "training",
        quirk="fed-mammoth",
    )

    def training(self) -> Training:
        training = super().training()
        return replace(training, collect_view="whole") if self.stats_unnormalised else training

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune == "head" and self.stats_unnormalised:
            raise FczooError(
                f"{self.name}.stats_unnormalised reads images again, but {self.name}.tune=head "
                "stores only features; set only one of the two"
            )

    def statistics_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the features for the statistics of classes.

        Args:
            backbone: The frozen backbone.
            tree: Trained tensors of the model.
            batch: Images.

        Returns:
            Features [B, D]; with ``stats_unnormalised`` of images in [0, 1].
        """
        if self.stats_unnormalised:
            batch = batch._replace(x=backbone.raw_pixels(batch.x))
        return self.features(backbone, tree, batch)
