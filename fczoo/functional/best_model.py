"""The old model to distil from: the best on images that the server reconstructs from clients' gradients.

GLFC's proxy server (Dong et al., CVPR 2022). In the state: ``best.X`` and ``old.X``, what clients train as
it was in the best model of this task so far and of the last; ``best.accuracy``; ``monitor.image``
[n, 3, 32, 32] and ``monitor.label`` [n], the reconstructed images of the task.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, LocalData, ServerAggregator, ServerContext, Task
from fczoo.functional.heads import head_logits
from fczoo.functional.inversion import SIZE, image_gradient, lenet, reconstruct, to_lenet_size
from fczoo.functional.noticing import NoticedTasks
from fczoo.functional.pixels import normalised, raw_images


@dataclass(frozen=True)
class BestOldModel(NoticedTasks):
    """Base of methods with such a server, and a linear head over all or some weights, or LoRA pairs.

    A client that notices a new task uploads, for each of its classes, the gradient of one blurred image
    through a small fixed network. THIS UPLOAD CAN BE INVERTED, label and image; ``proxy=last`` goes without.
    """

    proxy: Literal["reconstruct", "last"] = option(
        "reconstruct", "old model: best on reconstructed images, or last of the task before (cheap)"
    )
    perturb_steps: int = option(
        50, "steps of gradient descent that blur an image before its gradient is taken", low=0
    )
    perturb_lr: float = option(0.1, "their rate (released code: 0.2)", low=0)
    inversion_steps: int = option(250, "steps of L-BFGS in a reconstruction", low=1)
    inversion_inner: int = option(
        20, "iterations in each step; one alone leaves the images unrecognisable", low=1
    )
    reconstructions: int = option(
        20, "last images of each reconstruction that are kept to monitor models", low=1
    )
    perturb_raw: bool = option(
        False,
        "blur with pixels in [0, 1] as they are, without the normalisation of training",
        quirk="conditionWang/FCIL",
    )
    best_perf_no_reset: bool = option(
        False,
        "reset the best accuracy neither at a new task nor when reconstructions arrive: later tasks "
        "may never get an old model of their own",
        quirk="conditionWang/FCIL",
    )

    @abstractmethod
    def trained(self, tree: Tree) -> Tree:
        """The part of a tree that clients train."""

    def monitoring(self, state: Tree, task: Task, rng: torch.Generator) -> Tree:
        """The state as a task begins: the best model of the last task is the old model of this one."""
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
        """What clients train, under the names of the best model."""
        return {f"best.{k}": v for k, v in self.trained(state).items()}

    # --- client

    def finish(
        self, backbone: Backbone, train: Tree, sums: Tree, data: LocalData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """The gradient of one blurred image of each local class, where a new task has just been noticed."""
        if self.proxy == "last" or not ctx.memory["signal"]:
            return ctx.memory, {}
        labels, gradients = data.labels(data.index).cpu(), []
        for c in labels.unique():
            typical = self._typical(backbone, train, data, data.index[labels == c])
            image = self.perturbed(backbone, train, typical, ctx.task.stop)
            small = to_lenet_size(image)[0].to(ctx.shared["lenet.linear.bias"])
            gradients.append(image_gradient(ctx.shared, small, c.to(small.device)))
        upload = {f"image_gradient.{k}": torch.stack([g[k] for g in gradients]) for k in gradients[0]}
        return ctx.memory, upload

    @torch.no_grad()
    def _typical(self, backbone: Backbone, train: Tree, data: LocalData, index: Tensor) -> Batch:
        """The one image of a class whose feature of length 1 is nearest to the mean of the class."""
        found = torch.cat([self.features(backbone, train, batch) for batch in data.batches(index)])
        features = F.normalize(found, dim=-1)
        nearest = int(torch.linalg.vector_norm(features - features.mean(0), dim=-1).argmin())
        return next(iter(data.batches(index[nearest : nearest + 1])))

    def perturbed(self, backbone: Backbone, train: Tree, batch: Batch, seen: int) -> Tensor:
        """The image [1, 3, S, S] in [0, 1] after gradient descent on its pixels towards its label."""
        image, plugs = raw_images(backbone, batch).x.float().requires_grad_(), select(train, "full.", "lora.")
        hot = F.one_hot(batch.y, seen)
        for _ in range(self.perturb_steps):
            fed = image if self.perturb_raw else normalised(backbone, image)
            logits = head_logits(train, backbone(fed, plugs))[:, :seen]
            loss = F.binary_cross_entropy_with_logits(logits, hot.to(logits))
            (gradient,) = torch.autograd.grad(loss, image)
            image = (image - self.perturb_lr * (gradient + 1e-5 * image)).detach().requires_grad_()
        return image.detach()

    # --- server

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        noticed = [p for p in (p.only("image_gradient.") for p in payloads) if p]
        pool = {k: torch.cat([g[k] for g in noticed]) for k in noticed[0]} if noticed else {}
        return {**average([p.drop("image_gradient.") for p in payloads]), **pool}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        pool, state = select(merged, "image_gradient."), {**state, **drop(merged, "image_gradient.")}
        for i in range(len(pool["image_gradient.lenet.linear.bias"]) if pool else 0):
            target = {k.removeprefix("image_gradient."): v[i] for k, v in pool.items()}
            images, label = reconstruct(
                state, target, self.inversion_steps, self.inversion_inner, self.reconstructions, ctx.rng
            )
            state["monitor.image"] = torch.cat([state["monitor.image"], images])
            state["monitor.label"] = torch.cat([state["monitor.label"], label.expand(len(images))])
        accuracy = self.monitored(state, ctx)
        if pool and not self.best_perf_no_reset:  # accuracies on other images do not compare
            state["best.accuracy"] = torch.zeros_like(accuracy)
        if accuracy < state["best.accuracy"]:
            return state
        return {**state, **self._best(state), "best.accuracy": accuracy}

    @torch.no_grad()
    def monitored(self, state: Tree, ctx: ServerContext) -> Tensor:
        """Accuracy on the reconstructed images of this task; 0 without any: the last model is the best."""
        images, labels = state["monitor.image"], state["monitor.label"]
        if not len(labels):
            return torch.zeros((), device=labels.device)
        backbone, right, size = ctx.backbone, [], ctx.backbone.config.image_size
        for i, y in zip(images.split(64), labels.split(64), strict=True):
            large = F.interpolate(i, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)
            features = backbone(normalised(backbone, large), select(state, "full.", "lora."))
            features, y = self.augmented(features, y, state, ctx)
            right.append(head_logits(state, features)[:, : ctx.task.stop].argmax(1) == y)
        return torch.cat(right).float().mean()

    def augmented(
        self, features: Tensor, labels: Tensor, state: Tree, ctx: ServerContext
    ) -> tuple[Tensor, Tensor]:
        """The features and labels on which a model is judged, of those of the reconstructed images."""
        return features, labels
