"""Base of methods whose server generates the images that clients replay (MFCL, LANDER).

The teacher is the model whose task has ended; the generator makes images that it classifies. The
papers also match the running statistics of the teacher's BatchNorm layers. A vision transformer has
no such layers; ``prior=survey`` matches moments of the clients' activations instead.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedLinearHead
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext
from fczoo.functional.heads import head_logits


class Moments(NamedTuple):
    """Mean and variance [D] of a layer's activations, over images and tokens."""

    mean: Tensor
    variance: Tensor


class Reply(NamedTuple):
    """A model's reply to a batch of images."""

    logits: Tensor  # [B, C] over the classes seen
    features: Tensor  # [B, D]
    moments: list[Moments]  # of the layers that are compared; empty without a prior


Model = Callable[[Tensor], Reply]
"""Function from images [B, 3, S, S], normalised as the model expects them, to its reply."""


@dataclass(frozen=True)
class DataFreeReplay(TunedLinearHead):
    """Base of methods whose clients replay images from a generator that the server trains."""

    tune: Literal["full", "lora", "head"] = option(
        "lora", "tensors trained below the head: full, all weights; lora, LoRA pairs; head, none"
    )
    ratio: int = option(1, "generated images per real image of a batch", low=1)
    side: int = option(
        32,
        "side of generated images, in pixels; they are enlarged to the input size of the backbone",
        low=4,
    )
    prior: Literal["none", "survey"] = option(
        "none",
        "statistics for generated images to match instead of BatchNorm's, which a ViT lacks: "
        "none; survey, moments of clients' activations at a task's end",
    )
    prior_blocks: tuple[int, ...] = option(
        (0, 3), "blocks, of whose outputs clients send moments with prior=survey", low=0
    )

    def training(self) -> Training:
        # Uniform mean of the weights, as in the released code of both methods.
        training = replace(super().training(), averaging="uniform")
        if self.prior == "none":
            note = "generates images without statistics of the clients' data"
            return replace(training, table_note=note)
        return replace(
            training,
            uploads={**training.uploads, "moments.": whole_tensors("second moments")},
            collect_at={*training.collect_at, "task_end"},
            table_note="generates images with the moments of the clients' activations",
        )

    @abstractmethod
    def synthesise(self, state: Tree, prior: Sequence[Moments], ctx: ServerContext) -> Tree:
        """Return the tensors of the state from which clients replay the classes seen so far.

        Args:
            state: State after the last round of a task.
            prior: Moments of the clients' activations; empty with ``prior=none``.
            ctx: Server context.
        """

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, as the task ends: sums of h and h^2 at the output of each chosen block, mean over
        # tokens.
        sums: Tree = {}
        plugs = select(tree, "full.", "lora.")
        tokens = backbone.features_and_taps(batch.x, self._taps(backbone), plugs)[1]
        for i, values in zip(self.prior_blocks, tokens.values(), strict=True):
            weights = batch.w[:, None].double()
            sums[f"moments.{i}.sum"] = (values.double().mean(1) * weights).sum(0)
            sums[f"moments.{i}.squares"] = (values.double().square().mean(1) * weights).sum(0)
        return sums

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Synthesise images as a task ends, with the moments of the clients' activations as prior.

        Args:
            phase: ``task_end``, or ``task_start`` for the head's means.
            state: Current state.
            sums: ``moments.B.sum`` and ``moments.B.squares`` [D] of each block.
            ctx: Server context.

        Returns:
            The state with the tensors of ``synthesise``, unless it was the last task.
        """
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # Mean and variance of the activations over all clients.
        prior = []
        for i in self.prior_blocks:
            mean = sums[f"moments.{i}.sum"] / ctx.num_samples
            variance = sums[f"moments.{i}.squares"] / ctx.num_samples - mean.square()
            prior.append(Moments(mean.float(), variance.clamp(min=0).float()))
        return self._with_synthesis(state, prior, ctx)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        """Synthesise images after a task's last round; with ``prior=survey`` at its end instead.

        Args:
            state: Current state.
            merged: Merged uploads of the clients.
            ctx: Server context.

        Returns:
            The state with the merged tensors and, after the last round, those of ``synthesise``.
        """
        state = {**state, **merged}
        is_last_round = ctx.round + 1 == ctx.rounds
        return (
            self._with_synthesis(state, [], ctx)
            if is_last_round and self.prior == "none"
            else state
        )

    def _with_synthesis(self, state: Tree, prior: Sequence[Moments], ctx: ServerContext) -> Tree:
        if ctx.task.stop == ctx.task.classes:  # no task follows
            return state
        return {**state, **self.synthesise(state, prior, ctx)}

    def _taps(self, backbone: Backbone) -> list[str]:
        backbone.check_blocks(self.prior_blocks, f"{self.name}.prior_blocks")
        return [f"blocks.{i}" for i in self.prior_blocks]

    def reply(self, backbone: Backbone, tree: Tree, images: Tensor, classes: int) -> Reply:
        """Compute a model's reply to generated images.

        Args:
            backbone: The frozen backbone.
            tree: Trained tensors of the model.
            images: Images [B, 3, side, side], normalised.
            classes: Number of classes seen.

        Returns:
            Logits of these classes, features and, with ``prior=survey``, the batch's moments.
        """
        images = enlarge(images, backbone.config.image_size)
        plugs, moments = select(tree, "full.", "lora."), []
        if self.prior == "none":
            features = backbone(images, plugs)
        else:
            features, tokens = backbone.features_and_taps(images, self._taps(backbone), plugs)
            moments = [batch_moments(values.flatten(0, 1)) for values in tokens.values()]
        return Reply(head_logits(tree, features)[:, :classes], features, moments)


def batch_moments(values: Tensor) -> Moments:
    """Return mean and biased variance [D] of activations [N, D]."""
    return Moments(values.mean(0), values.var(0, unbiased=False))


def layer_distance(
    moments: Sequence[Moments], prior: Sequence[Moments], averages: Sequence[Moments]
) -> Tensor | float:
    """Compute |v_prior - v| + |m_prior - m|, summed over layers.

    Args:
        moments: Mean m and variance v of the batch, by layer.
        prior: Target moments.
        averages: Moving averages of earlier rounds, with weight 0.9; empty in the first round.
    """
    total: Tensor | float = 0.0
    for batch, target in zip(mix_moments(moments, averages), prior, strict=True):
        total = total + (target.variance - batch.variance).norm()
        total = total + (target.mean - batch.mean).norm()
    return total


def mix_moments(moments: Sequence[Moments], averages: Sequence[Moments]) -> list[Moments]:
    """Return 0.1 moments + 0.9 averages; without averages the moments."""
    if not averages:
        return list(moments)
    return [
        Moments(*(0.1 * new + 0.9 * old for new, old in zip(batch, average, strict=True)))
        for batch, average in zip(moments, averages, strict=True)
    ]


def enlarge(images: Tensor, size: int) -> Tensor:
    """Resize images bilinearly to the input of the backbone.

    Args:
        images: Images [B, 3, s, s].
        size: Side of the backbone's input, pixels.

    Returns:
        Images [B, 3, size, size].
    """
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
