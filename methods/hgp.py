"""HGP: hierarchical generative prototypes. Salami et al., arXiv 2406.02447.

Follows the paper's Algorithm 1. A round calls these functions in order:

- Client: ``loss`` trains prefixes and head (eq. 1). ``collect`` and ``make_upload`` compute count,
  mean and variance of every local class under the trained model.
- Server: ``aggregate`` averages prefixes and head, weighted by the clients' images (eq. 3).
  ``server_update`` builds the mixture of each class (eqs. 4 and 5, section 3.2). It then rebalances
  the head on features drawn from the mixtures of all classes seen (eq. 6).

A task boundary freezes and resets nothing: ``begin_task`` returns the state. Mixtures of finished
tasks keep the values of their task's last round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.aggregators.prototypes import gaussian_mixture, keep_latest
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, rows
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.calibration import CalibratedHead
from fczoo.functional.gaussians import empty_gaussians, gaussians, moment_sums
from fczoo.functional.heads import PromptedHead, head_logits
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.prompts import init_prefixes
from fczoo.protocols.registry import use_protocol_options


@register_method("hgp")
@use_protocol_options("hgp", "hgp")
@dataclass(frozen=True)
class HGP(CalibratedHead, PromptedHead):
    """Clients train prefixes and a head; the server rebalances the head on generated features.

    Clients train key and value prefixes in the first blocks, one set for all tasks, and the linear
    head. They send both, and the count, mean and diagonal variance of every local class. The server
    draws features from these Gaussians and trains the head on them after each round. Memory beyond
    the model: the Gaussians of all classes seen, at the server.
    """

    paper = (
        'Salami et al., "Federated Class-Incremental Learning with Hierarchical Generative '
        'Prototypes", arXiv 2406.02447'
    )
    formulas = r"""
    Clients minimise cross-entropy over the classes of the task, $h$ being the head and $P$ the
    prefixes:

    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P)) \bigr)_y$$

    The server draws a class $c$, a client $m$ that holds it, and a feature, and trains the head on
    it:

    $$m \sim \pi_m = \frac{n_{m,c}}{\sum_k n_{k,c}}$$

    $$z \sim \mathcal N\bigl(\mu_{m,c},\; s\, \sigma^2_{m,c}\bigr)$$

    $$L_r = -\log \operatorname{softmax}\Bigl( \frac{h(z)}{\tau \lVert h(z) \rVert} \Bigr)_c$$
    """
    server_only = ("gauss.",)
    dataset_options = {"digits": {"server_lr": 1e-3}}

    prefix_len: int = option(
        100,
        "length L of each key prefix and each value prefix (code: 100; the paper read literally: "
        "200)",
        low=1,
    )
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), "blocks with a prefix", low=0)
    init: Literal["normal", "uniform", "zeros"] = option(
        "normal",
        "initialisation of prefixes: normal, N(0, 0.02^2); uniform, U(-1/sqrt(D), 1/sqrt(D)); "
        "zeros (released code), all rows stay equal",
        quirk={"zeros": "fed-mammoth: its Gram-Schmidt leaves all rows 0"},
    )
    lr: float = option(3e-3, "learning rate of prefixes and head", low=0, tune=(1e-4, 1e-1, "log"))
    schedule: Literal["constant", "cosine_local"] = option(
        "constant",
        "learning-rate schedule: constant; cosine_local, cosine over the steps of each round, as "
        "in early released code",
    )
    support: Literal["task", "seen", "all"] = option(
        "task",
        "classes in the clients' softmax: task, the task's (code); seen, all seen so far; all, "
        "all of the run (eq. 1)",
    )
    clip: float | None = option(
        1.0, "maximum gradient norm at clients; only in the released code (paper: none)", low=0
    )
    rebalance: Literal["all", "current", "old", "none"] = option(
        "all",
        "classes whose head rows the server rebalances (the paper's ablation): all, all seen; "
        "current, the task's; old, those of earlier tasks; none",
    )
    server_cosine: bool = option(
        True, "cosine schedule over the server's epochs (paper and early code; late code: none)"
    )
    draw: Literal["epoch", "round"] = option(
        "epoch",
        "when the server draws features: epoch, again in each of its epochs (code); round, once "
        "per round (Algorithm 1)",
    )
    spread: float = option(3.0, "factor s on the variance of the drawn features", low=0)
    class_weights: Literal["uniform", "counts"] = option(
        "uniform",
        "omega, probability of a class in the draw: uniform (code); counts, its share of the "
        "images (eq. 6)",
    )
    keep_single: bool = option(
        True,
        "keep classes of which a client has one image; they get the mean variance of the "
        "client's other classes (0 without others)",
        quirk={False: "fed-mammoth, which drops them"},
    )
    stats_unnormalised: bool = option(
        False,
        "compute statistics on whole images with pixels in [0, 1], without the normalisation of "
        "training",
        quirk="fed-mammoth",
    )

    def training(self) -> Training:
        # Client: by default Adam with one learning rate for prefixes and head. After training, a
        # pass over the deterministic test view computes the statistics.
        training = Training(
            optims=self.optims(self.optim(self.lr, self.schedule), "prefix."),
            uploads={"gauss.": rows("count", "mean", "var")},
            clip_norm=self.clip,
            collect_at={"after_training"},
            collect_view="whole" if self.stats_unnormalised else "test",
        )
        return self.with_head_means(training)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: prefixes, head and the mixtures of finished tasks continue unchanged.
        if state:
            return state
        backbone.check_blocks(self.blocks, "hgp.blocks")
        # Start of the run: P_k and P_v [L, D] of each block, the head, and no mixtures.
        return {
            **init_prefixes(self.blocks, self.prefix_len, backbone.token_dim, self.init, rng),
            **self.start_head(task, backbone.dim, rng),
            **empty_gaussians(backbone.dim),
        }

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client, eq. 1: cross-entropy, by default over the current task's classes (released code).
        logits = head_logits(train, self.features(backbone, train, batch))
        return task_cross_entropy(logits, batch, ctx.task, self.support), {}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, after local training: one pass without gradients sums f and f^2 per class.
        images = backbone.raw_pixels(batch.x) if self.stats_unnormalised else batch.x
        return moment_sums(backbone(images, select(tree, "prefix.")), batch, ctx.task)

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        # Client, upload: prefixes and head; per local class the count n_{m,c}, mean mu_{m,c} and
        # unbiased diagonal variance sigma^2_{m,c}.
        return {**train, **gaussians(sums, ctx.task.start, self.keep_single)}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # Server, eq. 3: average prefixes and head with weights |D_m| / |D|. The clients' Gaussians
        # are concatenated.
        return gaussian_mixture(payloads, average)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # Server, eqs. 4 and 5: mixture Q_c = sum_m pi_{m,c} N(mu_{m,c}, sigma^2_{m,c}) with
        # pi_{m,c} = n_{m,c} / sum_k n_{k,c}. The state stores one row per (client, class); a row of
        # this round replaces the earlier row of the same client and class.
        state = {**state, **drop(merged, "gauss."), **keep_latest(state, merged, "gauss.")}
        # Server, eq. 6: rebalance the head after every round. The broadcast is prefixes and head.
        return {**state, **self._rebalance(state, ctx.task, ctx.rng)}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: one prefixed forward pass, argmax over the classes seen.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        # Prefix tuning: each block prepends P_k and P_v to its projected keys and values.
        return backbone(batch.x, select(tree, "prefix."))

    def _rebalance(self, state: Tree, task: Task, rng: torch.Generator) -> Tree:
        """Train the head for E_r = ``server_epochs`` epochs on features drawn from the mixtures.

        Head rows of classes outside the range of ``rebalance`` keep their values.
        """
        # Classes to rebalance: all seen so far. Ablation: only the current ones, or only the old.
        first = task.start if self.rebalance == "current" else 0
        last = {"old": task.start, "none": 0}.get(self.rebalance, task.stop)
        inside = (state["gauss.label"] >= first) & (state["gauss.label"] < last)
        gauss = {k: v[inside] for k, v in select(state, "gauss.").items()}
        # Eq. 6: the class probability omega_c is the share of class c in the counts (released code:
        # uniform). Algorithm 1 draws the features once per round (released code: in each epoch).
        by_count, once = self.class_weights == "counts", self.draw == "round"
        # Draw c ~ omega, m ~ pi_c and z ~ N(mu_{m,c}, s sigma^2_{m,c}), on average ``per_class``
        # features per class. Train the head on (z, c) by SGD with momentum and the cross-entropy
        # L_r, of normalised logits as in the released code (paper: plain logits).
        return self.calibrated_head(
            state, gauss, (first, last), rng, self.spread, by_count, once, self.server_cosine
        )
