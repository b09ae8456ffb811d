"""GLFC: Federated Class-Incremental Learning. Dong et al., CVPR 2022, on a vision transformer as in FPPL's comparison."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
from fczoo.core.types import (
    Batch,
    Context,
    LocalData,
    ServerAggregator,
    ServerContext,
    Task,
    Training,
)
from fczoo.functional.heads import head_logits
from fczoo.functional.herding import herding
from fczoo.functional.inversion import SIZE, image_gradient, lenet, reconstruct
from fczoo.functional.pixels import normalised, raw_images

log = logging.getLogger("fczoo")


@lru_cache
def _warn_once(text: str) -> None:
    log.warning(text)


@register_method("glfc")
@dataclass(frozen=True)
class GLFC(Tuned):
    """Clients keep exemplars, balance the gradients of old and new classes and distil from the best old model.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs. When a client notices a new
    task it also uploads, for each of its new classes, the gradient of one image through a fixed network,
    from which the server reconstructs the image to pick the old model by: THIS UPLOAD CAN BE INVERTED,
    label and image. ``proxy=last`` goes without it. Memory beyond the model: old and best model, two copies
    of what is trained; exemplars at the client.
    """

    paper = "Dong et al., Federated Class-Incremental Learning, CVPR 2022"
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
    best_perf_no_reset: bool = option(
        False,
        "do not reset the best accuracy at a new task: later tasks may never get an old model of their own",
        quirk="conditionWang/FCIL",
    )

    def remark(self) -> str:
        upload = (
            "without reconstructions (proxy=last)"
            if self.proxy == "last"
            else "uploads gradients that can be inverted to images"
        )
        return "; ".join(filter(None, [f"keeps {self.memory} images a client, {upload}", super().remark()]))

    def training(self) -> Training:
        training = super().training()
        return replace(
            training,
            inputs={*training.inputs, *(["images"] if self.proxy == "reconstruct" else [])},
            uploads={"image_gradient.": samples("gradients of single images")},
            averaging="uniform",
            exemplars="exemplar.index",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if not state:
            state = {
                **super().begin_task(state, task, backbone, rng),
                **lenet(task.classes, rng),
                "best.accuracy": torch.zeros(()),
            }
        else:  # the best model of the last task is the old model of this one
            old = {
                k.replace("best.", "old.", 1): v
                for k, v in select(state, "best.").items()
                if k != "best.accuracy"
            }
            kept = state["best.accuracy"] if self.best_perf_no_reset else torch.zeros(())
            state = {**state, **old, "best.accuracy": kept}
        none = {
            "monitor.image": torch.empty(0, 3, SIZE, SIZE),
            "monitor.label": torch.empty(0, dtype=torch.int64),
        }
        return {
            **state,
            **{f"best.{k}": v for k, v in self.trained(state).items() if f"best.{k}" not in state},
            **none,
        }

    # --- client

    def prepare(self, backbone: Backbone, data: LocalData, ctx: Context) -> Tree:
        """Notice a new task, and turn the images of the last one into exemplars."""
        none = {
            "task": torch.tensor(-1),
            "entropy": torch.tensor(0.0),
            "learned": torch.zeros(ctx.task.classes, dtype=torch.bool),
        }
        empty = torch.empty(0, dtype=torch.int64)
        memory = {**none, "exemplar.index": empty, "current.index": empty, "last.index": empty, **ctx.memory}
        told = int(memory["task"]) != ctx.task.index
        if told:
            memory |= {
                "task": torch.tensor(ctx.task.index),
                "last.index": memory["current.index"],
                "current.index": data.index,
            }
            memory["noticed"] = torch.tensor(False)
        signal = told
        if self.detector == "entropy":
            logits = [
                self.logits(backbone, ctx.shared, batch)[:, : ctx.task.stop]
                for batch in data.batches(data.index)
            ]
            entropy = self.entropy(torch.cat(logits)).cpu()
            threshold = (
                self.threshold * math.log(ctx.task.size) / math.log(10)
            )  # entropy is at most ln(classes)
            signal = bool(entropy - memory["entropy"] > threshold)
            memory["entropy"] = entropy
        memory |= {"signal": torch.tensor(signal), "noticed": memory["noticed"] | signal}
        if ctx.round == ctx.rounds - 1 and not memory["noticed"]:
            _warn_once(
                f"glfc: a client has not noticed task {ctx.task.index + 1} by its entropy: its memory stays as it is (see --set glfc.detector=oracle)"
            )
        if signal and len(memory["last.index"]):
            memory |= self._store(backbone, data, ctx, memory)
        return memory

    def _store(self, backbone: Backbone, data: LocalData, ctx: Context, memory: Tree) -> Tree:
        """Room for every learned class: shorten the old lists, herd new ones."""
        index, kept = memory["last.index"], memory["exemplar.index"]
        labels, old = data.labels(index).cpu(), data.labels(kept).cpu()
        learned = memory["learned"].clone()
        learned[labels] = True
        room = self.memory // int(learned.sum())
        if self.memory and not room:
            log.warning(
                "glfc.memory=%d has no room for one image of each of the client's %d classes, so nothing is kept",
                self.memory,
                learned.sum(),
            )
        lists = [kept[old == c][:room] for c in old.unique()]
        for c in labels.unique():
            own = index[labels == c]
            features = torch.cat([self.features(backbone, ctx.shared, batch) for batch in data.batches(own)])
            lists.append(own[herding(features, room, self.repeated_exemplars)])
        return {"learned": learned, "exemplar.index": torch.cat(lists), "last.index": index[:0]}

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        return self.recalled("old.", backbone, shared, batch)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        logits = self.logits(backbone, train, batch)[:, : ctx.task.stop]
        learned = ctx.memory.get("learned", torch.zeros(ctx.task.classes, dtype=torch.bool)).to(logits.device)
        compensated = self.compensated(logits, batch, learned)
        if ctx.task.index == 0:
            return compensated, {}
        return (1 - self.relation) * compensated + self.relation * self.relations(
            logits, batch, ctx.task.start
        ), {}

    def compensated(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """L_GC: binary cross-entropy, each image weighted by its gradient |p_y - 1| over the mean in its group, old or new."""
        per_image = F.binary_cross_entropy_with_logits(
            logits, F.one_hot(batch.y, logits.shape[1]).to(logits), reduction="none"
        ).mean(-1)
        return batch.mean(self.weights(logits, batch, learned) * per_image)

    def weights(self, logits: Tensor, batch: Batch, learned: Tensor) -> Tensor:
        """Weight [B] of each image; 1 while the client has learned no old class."""
        gradient = (1 - logits.detach().sigmoid().gather(1, batch.y[:, None])[:, 0]) * batch.w
        old = learned[batch.y].to(gradient)
        mean_old, mean_new = (
            (gradient * group).sum() / (batch.w * group).sum().clamp(min=1) for group in (old, 1 - old)
        )
        tiny = torch.finfo(gradient.dtype).tiny
        weights = gradient / torch.where(old > 0, mean_old, mean_new).clamp(min=tiny)
        return torch.where(learned.any(), weights, torch.ones_like(weights))

    def relations(self, logits: Tensor, batch: Batch, old: int) -> Tensor:
        """L_RD: binary cross-entropy against the old model's answers for its classes and the labels for the others."""
        target = torch.cat(
            [batch.teacher[:, :old].sigmoid(), F.one_hot(batch.y, logits.shape[1])[:, old:].to(logits)], 1
        )
        return batch.mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1))

    def entropy(self, logits: Tensor) -> Tensor:
        """Mean entropy of the softmax, nats."""
        p = logits.softmax(-1)
        return -(p * (p + 1e-5).log()).sum(-1).mean()

    def finish(self, backbone: Backbone, train: Tree, data: LocalData, ctx: Context) -> Tree:
        """The gradient of one blurred image of each local class, if the client has just noticed a new task."""
        if self.proxy == "last" or not ctx.memory["signal"]:
            return {}
        labels, gradients = data.labels(data.index).cpu(), []
        for c in labels.unique():
            own = data.index[labels == c]
            with torch.no_grad():
                features = F.normalize(
                    torch.cat([self.features(backbone, train, batch) for batch in data.batches(own)]), dim=-1
                )
            nearest = int(torch.linalg.vector_norm(features - features.mean(0), dim=-1).argmin())
            image = self.perturbed(
                backbone, train, next(iter(data.batches(own[nearest : nearest + 1]))), ctx.task.stop
            )
            small = F.interpolate(
                image, (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False
            ).clamp(0, 1)[0]
            gradients.append(
                image_gradient(ctx.shared, small.to(ctx.shared["lenet.linear.bias"]), c.to(small.device))
            )
        return {f"image_gradient.{k}": torch.stack([g[k] for g in gradients]) for k in gradients[0]}

    def perturbed(self, backbone: Backbone, train: Tree, batch: Batch, seen: int) -> Tensor:
        """The image [1, 3, S, S] in [0, 1] after gradient descent on its pixels towards its label."""
        image, plugs = raw_images(backbone, batch).x.float().requires_grad_(), select(train, "full.", "lora.")
        for _ in range(self.perturb_steps):
            logits = head_logits(train, backbone(normalised(backbone, image), plugs))[:, :seen]
            (gradient,) = torch.autograd.grad(
                F.binary_cross_entropy_with_logits(logits, F.one_hot(batch.y, seen).to(logits)), image
            )
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
        accuracy = self._monitored(ctx.backbone, state, ctx.task)
        if accuracy < state["best.accuracy"]:
            return state
        return {
            **state,
            **{f"best.{k}": v for k, v in self.trained(state).items()},
            "best.accuracy": accuracy,
        }

    @torch.no_grad()
    def _monitored(self, backbone: Backbone, state: Tree, task: Task) -> Tensor:
        """Accuracy on the reconstructed images of this task; 0 for every model while there are none, so that the last is the best."""
        right, size = [torch.zeros(0, device=state["monitor.label"].device)], backbone.config.image_size
        for images, labels in zip(
            state["monitor.image"].split(64), state["monitor.label"].split(64), strict=True
        ):
            x = normalised(
                backbone, F.interpolate(images, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)
            )
            logits = head_logits(state, backbone(x, select(state, "full.", "lora.")))[:, : task.stop]
            right.append((logits.argmax(1) == labels).float())
        found = torch.cat(right)
        return found.mean() if len(found) else found.new_zeros(())
