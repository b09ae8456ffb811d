"""GLFC: Federated Class-Incremental Learning. Dong et al., CVPR 2022; on a vision transformer as in FPPL."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import Tuned
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, samples
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, LocalData, ServerAggregator, ServerContext, Task, Training
from fczoo.functional.exemplars import mean_entropy, move_to_task, no_exemplars, store_last_task, warn_once
from fczoo.functional.heads import head_logits
from fczoo.functional.inversion import SIZE, image_gradient, lenet, reconstruct, to_lenet_size
from fczoo.functional.losses import taught_binary_cross_entropy
from fczoo.functional.pixels import normalised, raw_images

log = logging.getLogger("fczoo")


@register_method("glfc")
@dataclass(frozen=True)
class GLFC(Tuned):
    """Clients keep exemplars, balance gradients of old and new classes, and distil from the best old model.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs. When a client notices a new
    task it also uploads, for each of its new classes, the gradient of one image through a fixed network,
    from which the server reconstructs the image to pick the old model by: THIS UPLOAD CAN BE INVERTED,
    label and image. ``proxy=last`` goes without it. Memory beyond the model: old and best model, two copies
    of what is trained; exemplars at the client.
    """

    paper = "Dong et al., Federated Class-Incremental Learning, CVPR 2022"
    formulas = r"""
    $$L = (1 - \lambda) w L_{bce}(z, y) + \lambda L_{bce}(z, q), \quad
    w = (1 - \sigma(z_y)) / \operatorname{mean}_g (1 - \sigma(z_y))$$

    The mean is over the image's group in the batch, classes learned before or new ones; $q$ has the old
    model's sigmoids for old classes, the label for the others. In the first task $\lambda$ is 0.
    """
    private = ("best.", "monitor.")
    tuned = {"digits": {"memory": 20, "proxy": "last"}}

    memory: int = option(
        200, "images a client may keep (the paper's 2000, shared by ten clients as in FPPL)", low=0
    )
    detector: Literal["entropy", "oracle"] = option(
        "entropy", "how a client notices a new task: the entropy of its data jumps, or it is told"
    )
    threshold: float = option(
        1.2,
        "jump of the entropy, nats, that means a new task; scaled by ln(classes of the task) / ln(10)",
        low=0,
    )
    relation: float = option(
        0.5,
        "weight of the distillation where there is an old model; the compensated loss has the rest",
        low=0,
        high=1,
    )
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
    repeated_exemplars: bool = option(
        False, "let herding choose the same image again", quirk="conditionWang/FCIL"
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

    def remark(self) -> str:
        upload = "uploads gradients that can be inverted to images"
        if self.proxy == "last":
            upload = "without reconstructions (proxy=last)"
        return "; ".join(filter(None, [f"keeps {self.memory} images a client, {upload}", super().remark()]))

    def training(self) -> Training:
        training = super().training()
        images = ["images"] if self.proxy == "reconstruct" else []
        return replace(
            training,
            inputs={*training.inputs, *images},
            uploads={"image_gradient.": samples("gradients of single images"), **self.head_uploads()},
            averaging="uniform",
            exemplars="exemplar.index",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        accuracy = torch.zeros(())
        if not state:
            state = {**super().begin_task(state, task, backbone, rng), **lenet(task.classes, rng)}
            state |= self._best(state)
        else:
            if self.best_perf_no_reset:
                accuracy = state["best.accuracy"]
            # The best model of the last task is the old model of this one.
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

    def prepare(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Notice a new task, and turn the images of the last one into exemplars."""
        start = {
            **no_exemplars(ctx.task.classes, backbone.device),
            "entropy": torch.tensor(0.0),
            "noticed": torch.tensor(False),
        }
        memory = {**start, **ctx.memory}
        signal = int(memory["task"]) != ctx.task.index
        if signal:
            memory = {**move_to_task(memory, ctx.task.index, data), "noticed": torch.tensor(False)}
        if self.detector == "entropy":
            batches = data.batches(data.index)
            logits = [self.logits(backbone, ctx.shared, batch)[:, : ctx.task.stop] for batch in batches]
            entropy = mean_entropy(torch.cat(logits)).cpu()
            # The entropy is at most ln(classes), so the threshold grows with it.
            threshold = self.threshold * math.log(ctx.task.size) / math.log(10)
            signal = bool(entropy - memory["entropy"] > threshold)
            memory["entropy"] = entropy
        memory |= {"signal": torch.tensor(signal), "noticed": memory["noticed"] | signal}
        if ctx.round == ctx.rounds - 1 and not memory["noticed"]:
            warn_once(
                f"glfc: a client has not noticed task {ctx.task.index + 1} by its entropy: its memory stays "
                f"as it is (see --set glfc.detector=oracle)"
            )
        if signal and len(memory["last.index"]):
            memory = self._store(backbone, data, ctx, memory)
        return memory

    def _store(self, backbone: Backbone, data: LocalData, ctx: Context, memory: Tree) -> Tree:
        def features(index: Tensor) -> Tensor:
            return torch.cat([self.features(backbone, ctx.shared, batch) for batch in data.batches(index)])

        memory = store_last_task(memory, data, features, self.memory, self.repeated_exemplars)
        learned = int(memory["learned"].sum())
        if 0 < self.memory < learned:
            log.warning(
                "glfc.memory=%d has no room for one image of each of the client's %d classes: none is kept",
                self.memory,
                learned,
            )
        return memory

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        return self.recalled("old.", backbone, shared, batch)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        none = torch.zeros(ctx.task.classes, dtype=torch.bool, device=logits.device)
        learned = ctx.memory.get("learned", none)
        compensated = self.compensated(logits, batch, learned)
        if ctx.task.index == 0:
            return compensated, {}
        relations = self.relations(logits, batch, ctx.task.start)
        return (1 - self.relation) * compensated + self.relation * relations, {}

    def compensated(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """L_GC: binary cross-entropy of logits [B, C], image by image weighted by ``weights``."""
        hot = F.one_hot(batch.y, logits.shape[1]).to(logits)
        per_image = F.binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(-1)
        return batch.mean(self.weights(logits, batch, learned) * per_image)

    def weights(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """Weight [B] of each image: its gradient |p_y - 1| over the mean in its group, old or new classes.

        ``learned`` [C] is true for old classes. All weights are 1 while the client has learned no old class.
        """
        gradient = (1 - logits.detach().sigmoid().gather(1, batch.y[:, None])[:, 0]) * batch.w
        old = learned[batch.y].to(gradient)
        new = 1 - old
        mean_old = (gradient * old).sum() / (batch.w * old).sum().clamp(min=1)
        mean_new = (gradient * new).sum() / (batch.w * new).sum().clamp(min=1)
        tiny = torch.finfo(gradient.dtype).tiny
        weights = gradient / torch.where(old > 0, mean_old, mean_new).clamp(min=tiny)
        return torch.where(learned.any(), weights, torch.ones_like(weights))

    def relations(self, logits: Tensor, batch: Batch, old: int) -> Tensor:
        """L_RD: binary cross-entropy of logits [B, C] against the old model's answers and the labels.

        The old model answers for the first ``old`` classes, the labels for the others.
        """
        return taught_binary_cross_entropy(logits, batch, old)

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
