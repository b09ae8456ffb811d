"""CCVR: No Fear of Heterogeneity, Classifier Calibration for Federated Learning with Non-IID Data.

Luo et al., NeurIPS 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from fczoo.baselines.finetune import TunedWithStatistics

from fczoo.aggregators.rows import gaussian_mixture, keep_latest
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class, rows
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import Batch, Context, Moment, ServerAggregator, ServerContext, Task, Training
from fczoo.functional.calibration import Calibrated
from fczoo.functional.gaussians import gaussians, moment_sums, no_gaussians, pooled


@register_method("ccvr")
@dataclass(frozen=True)
class CCVR(Calibrated, TunedWithStatistics):
    """FedAvg whose server trains the head again, on features drawn from Gaussians of the clients' classes.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs, with count, mean and
    variance of each local class of two images or more (with ``pooled``, of one, too). By default the head is
    trained after each round, and the current task's rows alone.
    """

    paper = "Luo et al., NeurIPS 2021; mixture, current task and normalised logits as in HGP's comparison"
    formulas = r"""
    Each round the server trains the head on features drawn for the task's classes:

    $$m \sim \frac{n_{m,c}}{\sum_k n_{k,c}}$$

    $$z \sim \mathcal N(\mu_{m,c},\; \sigma^2_{m,c})$$

    $$L_r = -\log \operatorname{softmax}\Bigl( \frac{h(z)}{\tau \lVert h(z) \rVert} \Bigr)_c$$
    """
    private = ("gauss.",)

    gaussian: Literal["mixture", "pooled"] = option(
        "mixture", "clients' Gaussians side by side, or one a class with their pooled moments (paper)"
    )
    calibrate: Literal["each_round", "once"] = option(
        "each_round",
        "train the head after each round, on statistics of the clients' local models; or once a task, after "
        "its last round, on those of all clients under the final global model, pooled whatever `gaussian` "
        "says (paper)",
    )
    covariance: Literal["diagonal", "full"] = option(
        "diagonal", "variance of each dimension, or all covariances (paper)"
    )
    calibrated: Literal["current", "all"] = option(
        "current", "classes drawn and calibrated: the task's, or all seen, as they were (paper)"
    )
    triple_pass: bool = option(
        False,
        "with covariance=full, count each image three times: biased covariances; classes of one image stay",
        quirk="fed-mammoth",
    )

    def training(self) -> Training:
        if self.calibrate == "once":
            spread = "products" if self.covariance == "full" else "squares"
            uploads = {"moment.": per_class("count", "sum", spread), **self.head_uploads()}
            return replace(super().training(), uploads=uploads)
        spread = "cov" if self.covariance == "full" else "var"
        uploads = {"gauss.": rows("count", "mean", spread), **self.head_uploads()}
        return replace(super().training(), uploads=uploads, stats="test")

    def surveys(self) -> frozenset[Moment]:
        return super().surveys() | ({"end"} if self.calibrate == "once" else set())

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        state = super().begin_task(state, task, backbone, rng)
        keep = self.calibrated == "all" and "gauss.label" in state
        return state if keep else {**state, **no_gaussians(backbone.dim, self.covariance == "full")}

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        features = self.statistics_features(backbone, train, batch)
        return moment_sums(features, batch, ctx.task, self.covariance == "full")

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        if self.calibrate == "once":
            return train
        rows = self._gaussians(sums, ctx.task, single=self.gaussian == "pooled")
        rows["gauss.count"] = rows["gauss.count"] / self._passes  # what is sent are true counts
        return {**train, **rows}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        if self.calibrate == "once":
            return average(payloads)
        merged = gaussian_mixture(payloads, average)
        return {**merged, "gauss.count": merged["gauss.count"] * self._passes}

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        if self.calibrate == "once":
            return {**state, **merged}
        state = {**state, **drop(merged, "gauss."), **keep_latest(state, merged, "gauss.")}
        gauss = select(state, "gauss.")
        if self.gaussian == "pooled":
            gauss = pooled(gauss)
        return {**state, **self._calibrated(state, gauss, ctx)}

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        if moment == "begin":
            return super().survey(moment, backbone, state, batch, task)
        features = self.statistics_features(backbone, state, batch)
        sums = moment_sums(features, batch, task, self.covariance == "full")
        return {k.replace("class.", "moment.", 1): v for k, v in sums.items()}

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if moment == "begin":
            return super().absorb(moment, state, sums, ctx)
        sums = {k.replace("moment.", "class.", 1): v for k, v in sums.items()}
        new = self._gaussians(sums, ctx.task, single=False)
        new["gauss.client"] = torch.full_like(new["gauss.label"], -1)  # of all clients together
        gauss = keep_latest(state, new, "gauss.")
        return {**state, **gauss, **self._calibrated(state, gauss, ctx)}

    @property
    def _passes(self) -> int:
        return 3 if self.triple_pass and self.covariance == "full" else 1

    def _gaussians(self, sums: Tree, task: Task, single: bool) -> Tree:
        """The rows of ``gaussians``, with each image counted three times where ``triple_pass`` does so."""
        sums = {k: self._passes * v for k, v in sums.items()}
        return gaussians(sums, task.start, single)

    def _calibrated(self, head: Tree, gauss: Tree, ctx: ServerContext) -> Tree:
        """The head, calibrated on all classes but those of a single image, which have no spread."""
        gauss = {k: v[gauss["gauss.count"] > 1] for k, v in gauss.items()}
        first = 0 if self.calibrated == "all" else ctx.task.start
        return self.calibrated_head(head, gauss, (first, ctx.task.stop), ctx.rng)
