"""CCVR: No Fear of Heterogeneity, Classifier Calibration for Federated Learning with Non-IID Data.

Luo et al., NeurIPS 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fczoo.aggregators.prototypes import gaussian_mixture, keep_latest
from fczoo.baselines._tuned_backbone import TunedWithStatistics
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class, rows
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Boundary, Context, ServerAggregator, ServerContext, Task
from fczoo.functional.calibration import CalibratedHead
from fczoo.functional.gaussians import empty_gaussians, gaussians, moment_sums, pool_gaussians


@register_method("ccvr")
@dataclass(frozen=True)
class CCVR(CalibratedHead, TunedWithStatistics):
    """FedAvg whose server retrains the head on features drawn from Gaussians of the classes.

    Clients train and send the linear head and, depending on ``tune``, all weights or LoRA pairs.
    After a task they send, once, count, sum and sum of products of the features of each class of
    the task under the final global model. From these the server computes each class's mean and
    covariance. With ``calibrate=each_round`` clients send their own Gaussians in every round, as in
    HGP's comparison; protocol hgp sets its other values.
    """

    paper = (
        'Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated '
        'Learning with Non-IID Data", NeurIPS 2021'
    )
    formulas = r"""
    After a task the server trains the head on features drawn for all classes seen:

    $$\mu_c = \frac{1}{n_c} \sum_k n_{k,c} \mu_{k,c}$$

    $$\Sigma_c = \frac{1}{n_c - 1} \Bigl( \sum_k (n_{k,c} - 1) \Sigma_{k,c}
    + \sum_k n_{k,c} \mu_{k,c} \mu_{k,c}^\top - n_c \mu_c \mu_c^\top \Bigr)$$

    $$z \sim \mathcal N(\mu_c, \Sigma_c), \qquad L_r = -\log \operatorname{softmax}( h(z) )_c$$
    """
    server_only = ("gauss.",)

    gaussian: Literal["mixture", "pooled"] = option(
        "pooled",
        "with calibrate=each_round: pooled, one Gaussian per class with the clients' pooled "
        "moments (paper); mixture, one per client and class (HGP)",
    )
    calibrate: Literal["each_round", "once"] = option(
        "once",
        "when the head is retrained: once, after a task, on pooled statistics under the final "
        "global model (paper); each_round, on those of the local models (HGP)",
    )
    covariance: Literal["diagonal", "full"] = option(
        "full", "full, covariance matrices (paper); diagonal, the variance of each dimension (HGP)"
    )
    calibrated: Literal["current", "all"] = option(
        "all",
        "classes that are drawn and calibrated: all, the classes seen so far, old ones from their "
        "stored Gaussians (paper); current, only the task's (HGP)",
    )
    logit_norm: float | None = option(
        None,
        "temperature of normalised logits in the server's loss (HGP); none: plain logits (paper)",
        low=1e-6,
    )
    triple_pass: bool = option(
        False,
        "with covariance=full, count each image three times; so covariances are biased, and a "
        "class with one image has a covariance of 0 instead of none",
        quirk="fed-mammoth",
    )

    def training(self) -> Training:
        # Client: L_ce and FedAvg. Statistics: once per task the feature moments under the final
        # global model (paper), or after each round Gaussians under each client's model (HGP).
        training = super().training()
        phase: TaskPhase = "task_end" if self.calibrate == "once" else "after_training"
        if phase == "task_end":
            spread = "products" if self.covariance == "full" else "squares"
            uploads = {"moment.": per_class("count", "sum", spread), **training.uploads}
        else:
            spread = "cov" if self.covariance == "full" else "var"
            uploads = {"gauss.": rows("count", "mean", spread), **training.uploads}
        return replace(training, uploads=uploads, collect_at={*training.collect_at, phase})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: keep the Gaussians of finished tasks unchanged (``calibrated=all``), or
        # discard them.
        state = super().begin_task(state, task, backbone, rng)
        keep = self.calibrated == "all" and "gauss.label" in state
        return (
            state if keep else {**state, **empty_gaussians(backbone.dim, self.covariance == "full")}
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client: feature moments per class, under its own model after local training, or once per
        # task under the final global model.
        features = self.statistics_features(backbone, tree, batch)
        sums = moment_sums(features, batch, ctx.task, self.covariance == "full")
        if phase == "after_training":
            return sums
        return {k.replace("class.", "moment.", 1): v for k, v in sums.items()}

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        if self.calibrate == "once":
            return train
        # Upload per local class: n_{k,c}, mu_{k,c}, unbiased variance or covariance. The uploaded
        # counts are the true ones, also with ``triple_pass``.
        rows = self._gaussians(sums, ctx.task, single=self.gaussian == "pooled")
        rows["gauss.count"] = rows["gauss.count"] / self._passes
        return {**train, **rows}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        if self.calibrate == "once":
            return average(payloads)
        # FedAvg of the weights; the clients' Gaussians are concatenated.
        mixture = gaussian_mixture(payloads, average)
        return {**mixture, "gauss.count": mixture["gauss.count"] * self._passes}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # Calibrate on this round's Gaussians: per class a mixture over clients with weights
        # n_{k,c} / n_c, or one Gaussian with the pooled moments (eqs. 3 and 4).
        if self.calibrate == "once":
            return {**state, **merged}
        state = {**state, **drop(merged, "gauss."), **keep_latest(state, merged, "gauss.")}
        gauss = select(state, "gauss.")
        if self.gaussian == "pooled":
            gauss = pool_gaussians(gauss)
        return {**state, **self._calibrate_head(state, gauss, ctx)}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        sums = {k.replace("moment.", "class.", 1): v for k, v in sums.items()}
        # Eqs. 3 and 4: moments summed over clients give the mean and covariance of each class.
        new = self._gaussians(sums, ctx.task, single=False)
        new["gauss.client"] = torch.full_like(new["gauss.label"], -1)  # -1: of all clients
        gauss = keep_latest(state, new, "gauss.")
        return {**state, **gauss, **self._calibrate_head(state, gauss, ctx)}

    @property
    def _passes(self) -> int:
        return 3 if self.triple_pass and self.covariance == "full" else 1

    def _gaussians(self, sums: Tree, task: Task, single: bool) -> Tree:
        """Return the rows of ``gaussians``; ``triple_pass`` counts each image three times."""
        sums = {k: self._passes * v for k, v in sums.items()}
        return gaussians(sums, task.start, single)

    def _calibrate_head(self, head: Tree, gauss: Tree, ctx: ServerContext) -> Tree:
        """Calibrate the head on virtual features of classes with at least two images.

        A single image gives no covariance.
        """
        # Draw a class c, a client with probability n_{k,c} / n_c, and z ~ N(mu, Sigma). Train the
        # head on (z, c) with the cross-entropy L_r.
        gauss = {k: v[gauss["gauss.count"] > 1] for k, v in gauss.items()}
        first = 0 if self.calibrated == "all" else ctx.task.start
        return self.calibrated_head(head, gauss, (first, ctx.task.stop), ctx.rng)
