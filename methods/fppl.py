"""FPPL: An Efficient and Non-IID Robust Federated Continual Learning Framework.

Follows the paper's Algorithm 1. In a round the client calls ``loss`` (prompt fusion, cross-entropy,
unified representation L_ur), then ``collect`` and ``make_upload`` (local prototypes). The server
calls ``aggregate`` (FedAvg) and ``server_update`` (prototype lists, global prototypes G, debiasing
of the head).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregators.prototypes import keep_latest, prototype_pool
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, rows
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop, stack_past
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.gaussians import class_sums
from fczoo.functional.heads import PromptedHead, fit_head, head_logits
from fczoo.functional.losses import task_cross_entropy


@register_method("fppl")
@dataclass(frozen=True)
class FPPL(PromptedHead):
    """One deep prompt per task; the server retrains (debiases) the head on class prototypes.

    The prompt of an image is a mixture of the tasks' prompts, weighted by its frozen feature.
    Clients train the current task's prompt, the fusion keys of all tasks so far, and the linear
    head; a contrastive loss aligns features with global prototypes. They send these tensors and the
    mean feature (prototype) of every local class. Memory beyond the model: the prototypes of all
    clients, at the server.
    """

    paper = (
        'He et al., "FPPL: An Efficient and Non-IID Robust Federated Continual Learning '
        'Framework", arXiv 2411.01904'
    )
    formulas = r"""
    An image's prompt, from its frozen feature $q$ and a key $\psi_i$ per task:

    $$P(x) = \sum_{i \le t} w_i P_i$$

    $$w = \operatorname{softmax}_i\bigl( \alpha \cos(q, \psi_i) \bigr)$$

    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P)) \bigr)_y
    - \lambda \log \frac{e^{\cos(f, G_y) / \tau}}{\sum_{c \in C_t} e^{\cos(f, G_c) / \tau}}$$

    $G_c$ is the plain mean of the clients' prototypes of a class.
    """
    append_only = ("past.",)
    server_only = ("local.",)
    dataset_options = {"digits": {"server_lr": 1e-2}}

    length: int = option(20, "number L_p of prompt tokens per block", low=1)
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), "blocks with a prompt", low=0)
    lr: float = option(
        1e-3, "learning rate of prompt, fusion keys and head", low=0, tune=(1e-4, 1e-1, "log")
    )
    support: Literal["task", "seen", "all"] = option(
        "task",
        "classes in the clients' softmax: task, the task's (code); seen, all seen so far; all, "
        "all of the run (eq. 7)",
    )
    unify: float = option(
        1.0, "lambda, weight of the contrastive loss against the global prototypes (0: off)", low=0
    )
    temperature: float = option(0.2, "tau, temperature of the contrastive loss", low=1e-6)
    fusion: Literal["soft", "hard"] = option(
        "soft",
        "prompt of an image: soft, softmax mixture of the tasks' prompts; hard, only the prompt "
        "with the largest weight (ablation)",
    )
    debias: bool = option(True, "retrain the head on the class prototypes after each round")
    pool: bool = option(True, "debias with prototypes of finished tasks, too (False: FPPL-WOP)")
    server_lr: float = option(
        1e-3, "learning rate of the debiasing (Adam)", low=0, tune=(1e-4, 1e-1, "log")
    )
    server_epochs: int = option(5, "epochs E_server of the debiasing", low=1)
    server_batch: int = option(128, "batch size of the debiasing", low=1)
    view: Literal["test", "train"] = option(
        "test", "image view for local prototypes (train: augmented)", quirk={"train": "ycheoo/FPPL"}
    )

    def training(self) -> Training:
        # Client: Adam with a constant learning rate on the prompt p_t, the fusion keys psi and the
        # head theta. After local training one pass computes the local prototypes.
        training = Training(
            optims=self.optims(self.optim(self.lr), "prompt.", "fusion."),
            inputs=["images", "query"],
            uploads={"local.": rows("mean")},
            collect_at={"after_training"},
            collect_view=self.view,
        )
        return self.with_head_means(training)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        backbone.check_blocks(self.blocks, "fppl.blocks")
        dim = backbone.dim
        unknown = {
            "prototype.mean": torch.zeros(task.size, dim),
            "prototype.known": torch.zeros(task.size),
        }
        # Task boundary: p_t starts as a copy of p_{t-1}, and p_{t-1} is frozen. New classes have no
        # global prototype yet.
        if state:
            return {**state, **unknown, **stack_past(state, "prompt.", "past.")}
        # Start of the run: psi from U(-1/sqrt D, 1/sqrt D), p_1 from U(-1, 1), the head and an
        # empty prototype pool.
        keys = torch.empty(task.count, dim).uniform_(-(dim**-0.5), dim**-0.5, generator=rng)
        prompts = {}
        for i in self.blocks:
            prompts[f"prompt.{i}"] = torch.empty(self.length, backbone.token_dim).uniform_(
                -1, 1, generator=rng
            )
        head = self.start_head(task, dim, rng)
        numbers = torch.empty(0, dtype=torch.int64)
        local = {"local.label": numbers, "local.client": numbers, "local.mean": torch.empty(0, dim)}
        return {
            **prompts,
            "fusion.key": keys,
            "fusion.scale": torch.ones(()),
            **head,
            **unknown,
            **local,
        }

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Prompt fusion: the feature c of each image under its fused prompt.
        features = self.features(backbone, {**ctx.shared, **train}, batch)
        # L = L_ce + lambda L_ur. L_ce is eq. 7; its softmax is over the current task's classes by
        # default.
        loss = task_cross_entropy(head_logits(train, features), batch, ctx.task, self.support)
        return loss + self.unify * self.contrast(features, batch, ctx), {}

    def contrast(self, features: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """Compute L_ur: InfoNCE against the known global prototypes of the current task.

        Args:
            features: Features c [B, D].
            batch: Labels y and weights of the images.
            ctx: Broadcast tensors, with ``prototype.mean`` [c, D] and ``prototype.known`` [c].

        Returns:
            The mean over images whose class has a prototype; 0 if there is none, as in the first
                round of a task.
        """
        # L_ur = -log exp(cos(c, G_y) / tau) / sum_a exp(cos(c, G_a) / tau), a over the current
        # classes that have a prototype.
        similarity = cosines(features, ctx.shared["prototype.mean"])
        has_prototype, labels = ctx.shared["prototype.known"], batch.y - ctx.task.start
        logits = torch.where(
            has_prototype > 0, similarity / self.temperature, torch.finfo(similarity.dtype).min
        )
        used = batch.w * has_prototype[labels]
        return (F.cross_entropy(logits, labels, reduction="none") * used).sum() / used.sum().clamp(
            min=1
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Local prototypes: per class the sum of features c under the trained prompt and fusion.
        return class_sums(self.features(backbone, {**ctx.shared, **tree}, batch), batch, ctx.task)

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        # Upload: p_t, psi, theta, and one prototype per local class, its mean feature.
        local_classes = sums["class.count"] > 0
        means = sums["class.sum"][local_classes] / sums["class.count"][local_classes, None]
        return {
            **train,
            "local.label": local_classes.nonzero()[:, 0] + ctx.task.start,
            "local.mean": means,
        }

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Algorithm 1: FedAvg of {p_t, psi, theta} with weights n_k. Prototypes are concatenated.
        return prototype_pool(payloads, average)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # Prototype lists: keep the latest prototype of each (client, class). Prototypes of finished
        # tasks form the pool C_g.
        state = {**state, **drop(merged, "local."), **keep_latest(state, merged, "local.")}
        label, mean = state["local.label"], state["local.mean"]
        current = label >= ctx.task.start
        # Global prototypes G_y: unweighted mean over the clients that hold class y.
        hot = F.one_hot(label[current] - ctx.task.start, ctx.task.size).to(mean)
        count = hot.sum(0)
        state["prototype.mean"] = hot.mT @ mean[current] / count[:, None].clamp(min=1)
        state["prototype.known"] = (count > 0).to(mean)
        if not self.debias:
            return state
        # Debiasing: train only theta, by Adam for E_server epochs. The training set has one
        # prototype per (client, class), from the pool C_g and the current task.
        used = slice(None) if self.pool else current
        head = fit_head(
            state,
            mean[used],
            label[used],
            self.server_epochs,
            self.server_lr,
            self.server_batch,
            ctx.rng,
        )
        return {**state, **head}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: query pass for q, fusion over the prompts of all tasks seen, prompted pass,
        # argmax over the classes seen.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]

    def fused_prompts(self, tree: Tree, query: Tensor) -> Tree:
        """Compute the fused prompts: P(x) = sum_i w_i p_i over the tasks i <= t.

        Args:
            tree: Tree with ``prompt.{block}`` [L_p, D], ``past.{block}`` [t - 1, L_p, D] and
                ``fusion.key`` [T, D].
            query: Frozen features q [B, D].

        Returns:
            ``deep.{block}`` [B, L_p, D], the prompt of each image.
        """
        # Fusion weights w = softmax_i(alpha cos(q, psi_i)). The learned scale alpha is only in the
        # released code.
        prompts = stack_past(tree, "prompt.", "past.")  # [t, L_p, D] each
        tasks = len(prompts[f"past.{self.blocks[0]}"])
        weights = (tree["fusion.scale"] * cosines(query, tree["fusion.key"][:tasks])).softmax(-1)
        if self.fusion == "hard":
            weights = F.one_hot(weights.argmax(-1), tasks).to(weights)
        # Deep prompts: each block appends its prompt after the patch tokens and drops the prompt's
        # outputs.
        mixtures = {k: torch.einsum("bt,tld->bld", weights, p) for k, p in prompts.items()}
        return {k.replace("past.", "deep.", 1): p for k, p in mixtures.items()}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, self.fused_prompts(tree, batch.query))
