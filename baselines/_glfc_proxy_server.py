"""Proxy server of GLFC, which selects the old model to distil from (Dong et al., CVPR 2022).

It evaluates models on images reconstructed from clients' gradients. The state holds the trained
tensors of two models: ``best.X`` of this task so far, ``old.X`` of the last task. It also holds
``best.accuracy``, ``monitor.image`` [n, 3, 32, 32] and ``monitor.label`` [n], both of this task.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._glfc_inversion import (
    SIZE,
    image_gradient,
    lenet,
    lenet_shapes,
    reconstruct,
    to_lenet_size,
)
from fczoo.baselines._glfc_task_detection import TaskDetection
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, LocalData, ServerAggregator, ServerContext, Task
from fczoo.functional.heads import head_logits


@dataclass(frozen=True)
class BestOldModel(TaskDetection):
    """Base of methods with a proxy server that selects the old model.

    A client that detects a new task uploads one gradient for each of its new classes: that of a
    small fixed network for one perturbed image. THIS UPLOAD CAN BE INVERTED to recover image and
    label. ``proxy=last`` does not need it.
    """

    proxy: Literal["reconstruct", "last"] = option(
        "reconstruct",
        "old model: reconstruct, best on reconstructed images; last, final one of a task (cheap)",
    )
    perturb_steps: int = option(
        50,
        "gradient-descent steps that perturb an image before its gradient is computed",
        low=0,
        repeats=True,
    )
    perturb_lr: float = option(0.1, "learning rate of the perturbation (released code: 0.2)", low=0)
    inversion_steps: int = option(250, "L-BFGS steps per reconstruction", low=1)
    inversion_inner: int = option(
        20, "iterations per L-BFGS step; with 1 the images stay unrecognisable", low=1
    )
    reconstructions: int = option(
        20, "last iterates of each reconstruction that the server keeps to evaluate models", low=1
    )
    perturb_raw: bool = option(
        False,
        "perturb with pixels in [0, 1] as model input, without the normalisation of training",
        quirk="conditionWang/FCIL",
    )
    best_perf_no_reset: bool = option(
        False,
        "do not reset the best accuracy at a new task or for new reconstructions: the old model "
        "may then stay that of an earlier task",
        quirk="conditionWang/FCIL",
    )

    @abstractmethod
    def trained_part(self, tree: Tree) -> Tree:
        """Return the part of a tree that clients train.

        Args:
            tree: State of the run.
        """

    def monitoring(self, state: Tree, task: Task, rng: torch.Generator) -> Tree:
        """Return the state at the start of a task: the last task's best model becomes the old one.

        Args:
            state: State after the previous task.
            task: The task that starts.
            rng: Generator of the small network, in the first task.

        Returns:
            The state with ``best.accuracy``, and without reconstructed images.
        """
        accuracy = torch.zeros(())
        if "best.accuracy" not in state:
            state = {**state, **lenet(task.classes, rng)}
            state |= self._best(state)
        else:
            if self.best_perf_no_reset:
                accuracy = state["best.accuracy"]
            best = drop(select(state, "best."), "best.accuracy")
            state = {**state, **{k.replace("best.", "old.", 1): v for k, v in best.items()}}
        return {
            **state,
            "best.accuracy": accuracy,
            "monitor.image": torch.empty(0, 3, SIZE, SIZE),
            "monitor.label": torch.empty(0, dtype=torch.int64),
        }

    def _best(self, state: Tree) -> Tree:
        """Return the trained tensors under the names of the best model."""
        return {f"best.{k}": v for k, v in self.trained_part(state).items()}

    # --- client

    def after_training(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Compute one prototype gradient per local class when the client detects a new task.

        Args:
            backbone: The frozen backbone.
            train: Tensors that the client has trained.
            sums: Sums of the training; they are not used.
            data: Local data of the client.
            ctx: Memory of the client and the broadcast tensors.

        Returns:
            The memory and the upload ``image_gradient.X``, one row per class. The upload is empty
                with ``proxy=last``, and unless the client detects a new task in this round.
        """
        if self.proxy == "last" or not ctx.memory["signal"]:
            return ctx.memory, {}
        labels, gradients = data.labels(data.index).cpu(), []
        # Per class: take the prototype image, perturb it, and compute its gradient in the LeNet.
        for c in labels.unique():
            typical = self._typical(backbone, train, data, data.index[labels == c])
            image = self.perturb_image(backbone, train, typical, ctx.task.stop)
            small = to_lenet_size(image)[0].to(ctx.shared["lenet.linear.bias"])
            gradients.append(image_gradient(ctx.shared, small, c.to(small.device)))
        upload = {
            f"image_gradient.{k}": torch.stack([g[k] for g in gradients]) for k in gradients[0]
        }
        return ctx.memory, upload

    @torch.no_grad()
    def _typical(self, backbone: Backbone, train: Tree, data: LocalData, index: Tensor) -> Batch:
        """Return the image whose normalised feature is nearest to the class mean."""
        outputs = torch.cat(
            [self.features(backbone, train, batch) for batch in data.batches(index)]
        )
        features = F.normalize(outputs, dim=-1)
        nearest = int(torch.linalg.vector_norm(features - features.mean(0), dim=-1).argmin())
        return next(iter(data.batches(index[nearest : nearest + 1])))

    def perturb_image(self, backbone: Backbone, train: Tree, batch: Batch, seen: int) -> Tensor:
        """Perturb an image by SGD on its pixels, which minimises its binary cross-entropy.

        Args:
            backbone: The frozen backbone.
            train: Tensors that the client has trained.
            batch: The image and its label.
            seen: Number of classes seen so far.

        Returns:
            The perturbed image [1, 3, S, S], with pixels on the scale [0, 1].
        """
        image, plugs = (
            backbone.raw_pixels(batch.x).float().requires_grad_(),
            select(train, "full.", "lora."),
        )
        hot = F.one_hot(batch.y, seen)
        for _ in range(self.perturb_steps):
            inputs = image if self.perturb_raw else backbone.normalise(image)
            logits = head_logits(train, backbone(inputs, plugs))[:, :seen]
            loss = F.binary_cross_entropy_with_logits(logits, hot.to(logits))
            (gradient,) = torch.autograd.grad(loss, image)
            image = (image - self.perturb_lr * (gradient + 1e-5 * image)).detach().requires_grad_()
        return image.detach()

    # --- server

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Gradient pool of the round. A gradient with missing tensors cannot be inverted: drop it.
        names = {f"image_gradient.{name}" for name in lenet_shapes(1)}
        gradients = [p for p in (p.only("image_gradient.") for p in payloads) if p.keys() == names]
        pool = {k: torch.cat([g[k] for g in gradients]) for k in gradients[0]} if gradients else {}
        return {**average([p.drop("image_gradient.") for p in payloads]), **pool}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        pool, state = (
            select(merged, "image_gradient."),
            {**state, **drop(merged, "image_gradient.")},
        )
        # Reconstruct the image behind each gradient; the last iterates join the monitor set.
        for i in range(len(pool["image_gradient.lenet.linear.bias"]) if pool else 0):
            target = {k.removeprefix("image_gradient."): v[i] for k, v in pool.items()}
            images, label = reconstruct(
                state,
                target,
                self.inversion_steps,
                self.inversion_inner,
                self.reconstructions,
                ctx.rng,
            )
            state["monitor.image"] = torch.cat([state["monitor.image"], images])
            state["monitor.label"] = torch.cat([state["monitor.label"], label.expand(len(images))])
        # Best model: the latest one with at least the best accuracy on the monitor set.
        accuracy = self.monitor_accuracy(state, ctx)
        if pool and not self.best_perf_no_reset:  # accuracies on other images are not comparable
            state["best.accuracy"] = torch.zeros_like(accuracy)
        if accuracy < state["best.accuracy"]:
            return state
        return {**state, **self._best(state), "best.accuracy": accuracy}

    @torch.no_grad()
    def monitor_accuracy(self, state: Tree, ctx: ServerContext) -> Tensor:
        """Compute the accuracy on the reconstructed images of this task.

        Args:
            state: State with the model and the reconstructed images.
            ctx: The backbone and the current task.

        Returns:
            The accuracy, 0 to 1; without images 0, so that the latest model is the best.
        """
        images, labels = state["monitor.image"], state["monitor.label"]
        if not len(labels):
            return torch.zeros((), device=labels.device)
        backbone, right, size = ctx.backbone, [], ctx.backbone.config.image_size
        for i, y in zip(images.split(64), labels.split(64), strict=True):
            large = F.interpolate(i, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)
            features = backbone(backbone.normalise(large), select(state, "full.", "lora."))
            features, y = self.augment_features(features, y, state, ctx)
            right.append(head_logits(state, features)[:, : ctx.task.stop].argmax(1) == y)
        return torch.cat(right).float().mean()

    def augment_features(
        self, features: Tensor, labels: Tensor, state: Tree, ctx: ServerContext
    ) -> tuple[Tensor, Tensor]:
        """Return features and labels on which a model is evaluated; methods can extend them.

        Args:
            features: Features [n, D] of reconstructed images.
            labels: Their labels [n].
            state: State of the run.
            ctx: Server context.

        Returns:
            Features and labels on which the server evaluates a model.
        """
        return features, labels
