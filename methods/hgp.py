"""HGP: Federated Class-Incremental Learning with Hierarchical Generative Prototypes. Salami et al., arXiv 2406.02447."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregate import gaussian_mixture, keep_latest
from fczoo.backbone import Backbone
from fczoo.core import Batch, Context, Method, Optim, ServerAggregator, Task, Tree, drop, select
from fczoo.losses import class_sums, head_logits, linear_head, task_cross_entropy
from fczoo.options import option
from fczoo.registry import register_method


@register_method("hgp")
@dataclass(frozen=True)
class HGP(Method):
    """Prefix prompts and a head trained by clients; the server rebalances the head on features drawn from their Gaussians.

    Trained: key and value prefixes in the first blocks, one set for all tasks, and the linear head. Sent: both, with
    count, mean and diagonal variance of every local class. The server keeps the Gaussians of finished tasks.
    """

    paper = "Salami et al., Federated Class-Incremental Learning with Hierarchical Generative Prototypes (arXiv 2406.02447)"
    private = ("gauss.",)
    tuned = {
        "digits": {"server_lr": 3e-3},
        "imagenet_r": {"lr": 3e-2},
        "imagenet_a": {"lr": 3e-2},
        "eurosat": {"lr": 1e-3},
        "cub200": {"lr": 1e-1},
    }

    prefix_len: int = option(100, "rows L of each key and each value prefix (code: 100; 200 reads the paper literally)", low=1)
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), "blocks with a prefix", low=0)
    init: Literal["normal", "uniform", "zeros"] = option(
        "normal", "prefix start: N(0, 0.02^2), U(-1/sqrt D, 1/sqrt D), or zeros as released, where all rows stay equal for ever"
    )
    lr: float = option(3e-3, "learning rate of prefix and head", low=0)
    schedule: Literal["constant", "cosine_local"] = option("constant", "cosine_local: over the steps of each round, as in early released code")
    clip: float | None = option(1.0, "largest norm of a client's gradient; only in the released code (paper: none)", low=0)
    rebalance: Literal["all", "current", "old", "none"] = option("all", "classes whose head rows the server rebalances (the paper's ablation)")
    server_epochs: int = option(5, "epochs E_r of the rebalance", low=1)
    server_lr: float = option(0.01, "its learning rate, SGD with momentum 0.9", low=0)
    server_cosine: bool = option(True, "cosine over its epochs (paper and early code; late code: none)")
    per_class: int = option(256, "features drawn per seen class and epoch; also the batch size", low=1)
    spread: float = option(3.0, "factor on the drawn features' variance", low=0)
    logit_norm: float | None = option(0.1, "temperature of normalised logits in the rebalance loss (code); none: plain logits (paper)", low=1e-6)
    class_weights: Literal["uniform", "counts"] = option("uniform", "omega: classes drawn equally (code) or by their counts (eq. 6)")

    def optims(self) -> Mapping[str, Optim]:
        return {p: Optim("adam", lr=self.lr, schedule=self.schedule) for p in ("prefix.", "head.")}

    def clip_norm(self) -> float | None:
        return self.clip

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        if state:
            return state
        backbone.check_blocks(self.blocks, "hgp.blocks")
        return {**self._prefixes(backbone.dim, rng), **linear_head(task, backbone.dim, rng), **_no_gaussians(backbone.dim)}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = backbone(batch.x, select(train, "prefix."))
        return task_cross_entropy(head_logits(train, features), batch, ctx.task), {}

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        features = backbone(batch.x, select(train, "prefix."))
        sums = class_sums(features, batch, ctx.task)
        return {**sums, "class.squares": class_sums(features.square(), batch, ctx.task)["class.sum"]}

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        return {**train, **gaussians(sums, ctx.task.start)}

    def aggregate(self, payloads: Sequence[Tree], average: ServerAggregator) -> Tree:
        return gaussian_mixture(payloads, average)

    def server_update(self, state: Tree, merged: Tree, task: Task, rng: torch.Generator) -> Tree:
        state = {**state, **drop(merged, "gauss."), **keep_latest(state, merged, "gauss.")}
        return {**state, **self._rebalance(state, task, rng)}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return head_logits(state, backbone(batch.x, select(state, "prefix.")))[:, : task.stop]

    def rebalance_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the given columns, with their norm fixed to 1 / ``logit_norm`` if that is set."""
        if self.logit_norm is not None:
            logits = logits / (torch.linalg.vector_norm(logits, dim=1, keepdim=True) + 1e-12) / self.logit_norm
        return F.cross_entropy(logits, labels)

    def _rebalance(self, state: Tree, task: Task, rng: torch.Generator) -> Tree:
        """The head after ``server_epochs`` on drawn features; rows outside the window keep their values."""
        first, last = {"all": (0, task.stop), "current": (task.start, task.stop), "old": (0, task.start), "none": (0, 0)}[self.rebalance]
        inside = (state["gauss.label"] >= first) & (state["gauss.label"] < last)
        if not inside.any():
            return {}
        gauss = {k: v[inside] for k, v in select(state, "gauss.").items()}
        head = {k: v.clone().requires_grad_() for k, v in select(state, "head.").items()}
        optimizer = torch.optim.SGD(head.values(), self.server_lr, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.server_epochs)
        for _ in range(self.server_epochs):
            x, y = self.draw(gauss, rng)
            for i, j in zip(x.split(self.per_class), y.split(self.per_class), strict=True):
                optimizer.zero_grad()
                self.rebalance_loss(head_logits(head, i)[:, first:last], j - first).backward()
                optimizer.step()
            if self.server_cosine:
                cosine.step()
        return {k: v.detach() for k, v in head.items()}

    def draw(self, gauss: Tree, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """``per_class`` features a class on average: class by omega, client by its share of the class, then its Gaussian."""
        labels, count = gauss["gauss.label"], gauss["gauss.count"]
        classes, place = labels.unique(return_inverse=True)
        total = torch.zeros(len(classes), dtype=count.dtype, device=count.device).index_add_(0, place, count)
        omega = total / total.sum() if self.class_weights == "counts" else torch.full_like(total, 1 / len(total))
        chosen = torch.multinomial(omega[place] * count / total[place], self.per_class * len(classes), replacement=True, generator=rng)
        noise = torch.randn(len(chosen), gauss["gauss.mean"].shape[1], generator=rng, device=rng.device, dtype=gauss["gauss.mean"].dtype)
        scale = (self.spread * (gauss["gauss.var"][chosen] + 1e-8)).sqrt()
        return gauss["gauss.mean"][chosen] + scale * noise, labels[chosen]

    def _prefixes(self, dim: int, rng: torch.Generator) -> Tree:
        def rows() -> Tensor:
            if self.init == "normal":
                return 0.02 * torch.randn(self.prefix_len, dim, generator=rng)
            bound = dim**-0.5 if self.init == "uniform" else 0.0
            return torch.empty(self.prefix_len, dim).uniform_(-bound, bound, generator=rng)

        return {f"prefix.{i}.{part}": rows() for i in self.blocks for part in "kv"}


def gaussians(sums: Tree, first_class: int) -> Tree:
    """One row a class that the client holds: label, count n, mean and unbiased variance [D].

    A class with one image has no variance of its own and gets the mean of the client's other classes (0 if none), so
    that its only holder is not lost; the released code drops it.
    """
    held = sums["class.count"] > 0
    count, mean = sums["class.count"][held], sums["class.sum"][held] / sums["class.count"][held, None]
    var = (sums["class.squares"][held] - count[:, None] * mean.square()).clamp(min=0) / (count[:, None] - 1).clamp(min=1)
    several = count > 1
    if several.any():
        var = torch.where(several[:, None], var, var[several].mean(0))
    return {
        "gauss.label": held.nonzero()[:, 0] + first_class,
        "gauss.count": count,
        "gauss.mean": mean,
        "gauss.var": var,
    }


def _no_gaussians(dim: int) -> Tree:
    whole, rows = torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
    return {"gauss.label": whole, "gauss.client": whole, "gauss.count": torch.empty(0), "gauss.mean": rows, "gauss.var": rows}
