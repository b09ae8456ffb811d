"""What PODNet and AFC share: proxies, the NCA loss, a last round on exemplars, a teacher of maps."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import TunedBackbone
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment, ServerContext, Task, Training
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.gaussians import moment_sums
from fczoo.functional.maps import patch_maps
from fczoo.functional.proxies import imprinted_proxies, nca, proxy_logits


@dataclass(frozen=True)
class ProxyHead(TunedBackbone, Rehearsal):
    """Base of methods with several proxies a class, which distil maps of patch tokens.

    Proxies of finished tasks stand still until a last round, in which every client trains all proxies, and
    nothing else, on its exemplars of old and new classes.
    """

    tuned = {"digits": {"memory": 20, "eta": 5.0, "lr_balanced": 0.02}}

    choice: Literal["herding", "raw", "residual", "first"] = option(
        "residual", "how a client chooses exemplars; by the residual as in released code"
    )
    proxies: int = option(10, "K, proxies a class", low=1)
    eta: float = option(1.0, "first value of eta, the learned scale of the logits", low=0)
    margin: float = option(0.6, "delta of the NCA loss", low=0)
    nca_code: bool = option(
        False,
        "the NCA loss as released: its margin cancels, and the true class counts as exp(0)",
        quirk="released code",
    )
    lr_balanced: float = option(1e-3, "learning rate of the proxies in the last round", low=0)

    @abstractmethod
    def distance(self, old: list[Tensor], new: list[Tensor], ctx: Context) -> Tensor:
        """Weighted distance [B] between old and new maps [B, D, s, s]."""

    def training(self) -> Training:
        training = self.rehearsing(self.tuning("proxy.new", "eta"))
        uploads = {"class.": per_class("count", "sum", "squares")}
        return replace(training, uploads=uploads, balanced={"proxy.": self.optim(self.lr_balanced)})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        new = F.normalize(torch.randn(task.size, self.proxies, backbone.dim, generator=rng), dim=-1)
        if not state:
            start = {"proxy.old": new[:0], "proxy.new": new, "eta": torch.tensor(self.eta)}
            return {**start, **self.start_plugs(backbone, rng)}
        old = torch.cat([state["proxy.old"], state["proxy.new"]])
        new = new.to(old) * torch.linalg.vector_norm(old, dim=-1).mean()
        return self.with_teacher({**state, "proxy.old": old, "proxy.new": new}, task, "full.", "lora.")

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"})

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        return moment_sums(F.normalize(self.features(backbone, state, batch), dim=-1), batch, task)

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        return imprinted_proxies(state, sums, ctx.rng)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        model, plugs = {**ctx.shared, **train}, select({**ctx.shared, **train}, "full.", "lora.")
        if ctx.task.index == 0 or ctx.balanced or self.tune == "head":  # nothing moves that is distilled
            return batch.mean(self.nca(self.features(backbone, model, batch), model, batch)), {}
        features, maps = patch_maps(backbone, batch.x, plugs)
        with torch.no_grad():
            teacher = {k.removeprefix("teacher."): v for k, v in select(ctx.shared, "teacher.").items()}
            old_features, old_maps = patch_maps(backbone, batch.x, teacher)
        distilled = self.distance(old_maps, maps, ctx) + self.flat(old_features, features)
        weight = math.sqrt(ctx.task.stop / ctx.task.size)
        return batch.mean(self.nca(features, model, batch) + weight * distilled), {}

    def flat(self, old: Tensor, new: Tensor) -> Tensor:
        """Weighted distance [B] between old and new features [B, D]: none."""
        return torch.zeros_like(new[:, 0])

    def nca(self, features: Tensor, model: Tree, batch: Batch) -> Tensor:
        """The classification loss [B] over all classes seen so far."""
        logits = proxy_logits(features, torch.cat([model["proxy.old"], model["proxy.new"]]))
        return nca(logits, batch.y, model["eta"], self.margin, self.nca_code)

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        proxies = torch.cat([state["proxy.old"], state["proxy.new"]])
        return proxy_logits(self.features(backbone, state, batch), proxies)
