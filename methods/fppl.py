"""FPPL: An Efficient and Non-IID Robust Federated Continual Learning Framework."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregators.rows import keep_latest, prototype_pool
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, rows
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task, Training
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import PromptedHead, fit_head, head_logits
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.past import joined_past


@register_method("fppl")
@dataclass(frozen=True)
class FPPL(PromptedHead):
    """One deep prompt a task, fused by the image's frozen feature; prototypes align clients, debias the head.

    Trained: the current task's prompt, the fusion keys of all tasks so far, and the linear head. Sent: the
    same, with the mean feature of every local class, on all of which the server retrains the head after
    each round.
    """

    paper = "He et al., FPPL (arXiv 2411.01904)"
    formulas = r"""
    An image's prompt, from its frozen feature $q$ and a key $\psi_i$ a task:

    $$P(x) = \sum_{i \le t} w_i P_i$$

    $$w = \operatorname{softmax}_i\bigl( \alpha \cos(q, \psi_i) \bigr)$$

    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P)) \bigr)_y
    - \lambda \log \frac{e^{\cos(f, G_y) / \tau}}{\sum_{c \in C_t} e^{\cos(f, G_c) / \tau}}$$

    $G_c$ is the plain mean of the clients' prototypes of a class.
    """
    frozen = ("past.",)
    private = ("local.",)
    tuned = {"digits": {"server_lr": 1e-2}}

    length: int = option(20, "tokens L_p of a prompt in each block", low=1)
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), "blocks with a prompt", low=0)
    lr: float = option(1e-3, "learning rate of prompt, fusion and head", low=0, tune=(1e-4, 1e-1, "log"))
    unify: float = option(1.0, "weight lambda of the contrast with the global prototypes (0: without)", low=0)
    temperature: float = option(0.2, "tau of that contrast", low=1e-6)
    fusion: Literal["soft", "hard"] = option(
        "soft", "mix the tasks' prompts by softmax, or take the best task's alone (ablation)"
    )
    debias: bool = option(True, "retrain the head on the prototypes after each round")
    pool: bool = option(True, "keep the prototypes of finished tasks for it (False: FPPL-WOP)")
    server_lr: float = option(1e-3, "learning rate of the debiasing, Adam", low=0, tune=(1e-4, 1e-1, "log"))
    server_epochs: int = option(5, "its epochs E_server", low=1)
    server_batch: int = option(128, "its batch size", low=1)
    view: Literal["test", "train"] = option(
        "test", "view of the images in the local prototypes", quirk={"train": "ycheoo/FPPL"}
    )

    def training(self) -> Training:
        return Training(
            optims=self.optims(self.optim(self.lr), "prompt.", "fusion."),
            inputs=["images", "query"],
            uploads={"local.": rows("mean"), **self.head_uploads()},
            stats=self.view,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        backbone.check_blocks(self.blocks, "fppl.blocks")
        dim = backbone.dim
        unknown = {"prototype.mean": torch.zeros(task.size, dim), "prototype.known": torch.zeros(task.size)}
        if state:  # the new prompt starts as a copy of the last one, which is frozen
            return {**state, **unknown, **joined_past(state, "prompt.", "past.")}
        keys = torch.empty(task.count, dim).uniform_(-(dim**-0.5), dim**-0.5, generator=rng)  # psi
        prompts = {}
        for i in self.blocks:
            prompts[f"prompt.{i}"] = torch.empty(self.length, dim).uniform_(-1, 1, generator=rng)
        head = self.start_head(task, dim, rng)
        numbers = torch.empty(0, dtype=torch.int64)
        local = {"local.label": numbers, "local.client": numbers, "local.mean": torch.empty(0, dim)}
        return {**prompts, "fusion.key": keys, "fusion.scale": torch.ones(()), **head, **unknown, **local}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = self.features(backbone, {**ctx.shared, **train}, batch)
        loss = task_cross_entropy(head_logits(train, features), batch, ctx.task)
        return loss + self.unify * self.contrast(features, batch, ctx), {}

    def contrast(self, features: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """L_ur: InfoNCE against the known global prototypes of the current task; 0 while none is known."""
        similarity = cosines(features, ctx.shared["prototype.mean"])
        known, own = ctx.shared["prototype.known"], batch.y - ctx.task.start
        logits = torch.where(known > 0, similarity / self.temperature, torch.finfo(similarity.dtype).min)
        used = batch.w * known[own]
        return (F.cross_entropy(logits, own, reduction="none") * used).sum() / used.sum().clamp(min=1)

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        return class_sums(self.features(backbone, {**ctx.shared, **train}, batch), batch, ctx.task)

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        held = sums["class.count"] > 0
        means = sums["class.sum"][held] / sums["class.count"][held, None]
        return {**train, "local.label": held.nonzero()[:, 0] + ctx.task.start, "local.mean": means}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        return prototype_pool(payloads, average)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        state = {**state, **drop(merged, "local."), **keep_latest(state, merged, "local.")}
        label, mean = state["local.label"], state["local.mean"]
        now = label >= ctx.task.start
        hot = F.one_hot(label[now] - ctx.task.start, ctx.task.size).to(mean)
        count = hot.sum(0)
        state["prototype.mean"] = hot.mT @ mean[now] / count[:, None].clamp(min=1)  # G: clients count equally
        state["prototype.known"] = (count > 0).to(mean)
        if not self.debias:
            return state
        used = slice(None) if self.pool else now
        head = fit_head(
            state, mean[used], label[used], self.server_epochs, self.server_lr, self.server_batch, ctx.rng
        )
        return {**state, **head}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]

    def fused_prompts(self, tree: Tree, query: Tensor) -> Tree:
        """Prompt of each image and block, [B, L_p, D], by the images' queries [B, D].

        The tasks' prompts are mixed by the softmax of the scaled cosine between query and key.
        """
        prompts = joined_past(tree, "prompt.", "past.")  # [t, L_p, D] each
        seen = len(prompts[f"past.{self.blocks[0]}"])
        weights = (tree["fusion.scale"] * cosines(query, tree["fusion.key"][:seen])).softmax(-1)
        if self.fusion == "hard":
            weights = F.one_hot(weights.argmax(-1), seen).to(weights)
        fused = {k: torch.einsum("bt,tld->bld", weights, p) for k, p in prompts.items()}
        return {k.replace("past.", "deep.", 1): p for k, p in fused.items()}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, self.fused_prompts(tree, batch.query))
