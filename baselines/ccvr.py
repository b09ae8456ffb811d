"""CCVR: No Fear of Heterogeneity, Classifier Calibration for Federated Learning with Non-IID Data.

Luo et al., NeurIPS 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from fczoo.baselines.finetune import TunedWithStatistics
from torch import Tensor

from fczoo.aggregators.rows import gaussian_mixture, keep_latest
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, rows
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import (
    Batch,
    Context,
    ServerAggregator,
    ServerContext,
    Task,
    Training,
)
from fczoo.functional.gaussians import draw_features, gaussians, moment_sums, no_gaussians, pooled
from fczoo.functional.heads import train_head
from fczoo.functional.losses import normalised_cross_entropy


@register_method("ccvr")
@dataclass(frozen=True)
class CCVR(TunedWithStatistics):
    """FedAvg whose server trains the head again after each round, on features drawn from class Gaussians.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs, with count, mean and
    variance of each local class of two images or more. By default the server calibrates the current task's
    head rows alone.
    """

    paper = "Luo et al., NeurIPS 2021; mixture, current task and normalised logits as in HGP's comparison"
    private = ("gauss.",)

    gaussian: Literal["mixture", "pooled"] = option(
        "mixture", "clients' Gaussians side by side, or one a class with their pooled moments (paper)"
    )
    covariance: Literal["diagonal", "full"] = option(
        "diagonal", "variance of each dimension, or all covariances (paper)"
    )
    calibrated: Literal["current", "all"] = option(
        "current", "classes drawn and calibrated: the task's, or all seen, as they were (paper)"
    )
    logit_norm: float | None = option(
        0.1, "temperature of normalised logits in the server's loss; none: plain logits (paper)", low=1e-6
    )
    per_class: int = option(256, "features drawn per class and epoch; also the batch size", low=1)
    server_epochs: int = option(5, "epochs of the calibration", low=1)
    server_lr: float = option(
        0.01, "its learning rate, SGD with momentum 0.9 and cosine over the epochs", low=0
    )
    triple_pass: bool = option(
        False,
        "with covariance=full, count each image three times: biased covariances; classes of one image stay",
        quirk="fed-mammoth",
    )

    def training(self) -> Training:
        spread = "cov" if self.covariance == "full" else "var"
        uploads = {"gauss.": rows("count", "mean", spread), **self.head_uploads()}
        return replace(super().training(), uploads=uploads, stats="test")

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        state = super().begin_task(state, task, backbone, rng)
        keep = self.calibrated == "all" and "gauss.label" in state
        return state if keep else {**state, **no_gaussians(backbone.dim, self.covariance == "full")}

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        features = self.statistics_features(backbone, train, batch)
        return moment_sums(features, batch, ctx.task, self.covariance == "full")

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        if self.triple_pass and self.covariance == "full":
            sums = {k: 3 * v for k, v in sums.items()}
        return {**train, **gaussians(sums, ctx.task.start, single=False)}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        return gaussian_mixture(payloads, average)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        state = {**state, **drop(merged, "gauss."), **keep_latest(state, merged, "gauss.")}
        gauss = select(state, "gauss.")
        if not len(gauss["gauss.label"]):  # no client has two images of any class
            return state
        if self.gaussian == "pooled":
            gauss = pooled(gauss)
        return {**state, **self.calibrate(state, gauss, ctx.task, ctx.rng)}

    def calibrate(self, head: Tree, gauss: Tree, task: Task, rng: torch.Generator) -> Tree:
        """The head trained on drawn features; rows of other classes keep their values."""
        number = self.per_class * len(gauss["gauss.label"].unique())

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return normalised_cross_entropy(logits, labels, self.logit_norm)

        classes = (0 if self.calibrated == "all" else task.start, task.stop)
        return train_head(
            head,
            classes,
            lambda: draw_features(gauss, number, rng),
            loss,
            self.server_epochs,
            self.server_lr,
            self.per_class,
        )
