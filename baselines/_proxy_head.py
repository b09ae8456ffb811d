"""Base of PODNet and AFC: proxy head, NCA loss, map distillation, balanced fine-tuning."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedBackbone
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select, strip_prefix
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.feature_maps import patch_maps
from fczoo.functional.gaussians import moment_sums


def proxy_logits(features: Tensor, proxies: Tensor) -> Tensor:
    """Compute logits of the local similarity classifier (LSC): y = sum_k softmax(s)_k s_k.

    s_k = 2 cos(f, w_k) - 2 is the similarity to proxy k of a class; nearer proxies weigh more.

    Args:
        features: Features f [B, D].
        proxies: Proxies w [C, K, D].

    Returns:
        Logits y [B, C].
    """
    scores = F.normalize(features, dim=-1) @ F.normalize(proxies, dim=-1).flatten(0, 1).mT
    scores = 2 * scores.unflatten(-1, proxies.shape[:2]) - 2
    logits: Tensor = (scores.softmax(-1) * scores).sum(-1)
    return logits


def nca(
    logits: Tensor, labels: Tensor, eta: Tensor, margin: float, as_released: bool = False
) -> Tensor:
    """Compute the NCA loss [-eta (y_t - margin) + log sum_{c != t} exp(eta y_c)]_+ of each image.

    Args:
        logits: Logits y [B, C].
        labels: True classes t [B].
        eta: Scale of the logits.
        margin: Margin of the true class.
        as_released: Use the released form, without hinge, in which the margin cancels and the true
            class enters the sum as exp(0): m - eta y_t + log(1 + sum_{c != t} exp(eta y_c - m)),
            with m = max_c eta y_c.

    Returns:
        Losses [B].
    """
    z = eta * logits
    truth = z.gather(1, labels[:, None])[:, 0]
    true_class = F.one_hot(labels, logits.shape[1]) > 0
    if as_released:
        top = z.max(1).values
        return top - truth + (z - top[:, None]).masked_fill(true_class, 0.0).logsumexp(1)
    rivals = z.masked_fill(true_class, torch.finfo(z.dtype).min).logsumexp(1)
    return (eta * margin - truth + rivals).clamp(min=0)


def imprint_proxies(state: Tree, sums: Tree, rng: torch.Generator) -> Tree:
    """Draw new proxies from N(unit mean, variance) of their class's unit features.

    Each draw is scaled by the length of the proxy that it replaces.

    Args:
        state: State with ``proxy.new`` [c, K, D].
        sums: ``class.count`` [c], ``class.sum`` and ``class.squares`` [c, D] of features of length
            1.
        rng: Random generator.

    Returns:
        The state with new proxies. Proxies of classes without images do not change.
    """
    rows, count = state["proxy.new"], sums["class.count"][:, None].clamp(min=1)
    mean = sums["class.sum"] / count
    spread = (sums["class.squares"] / count - mean.square()).clamp(min=0).sqrt()
    noise = torch.randn(rows.shape, generator=rng, device=rng.device).to(mean)
    proxies = F.normalize(mean, dim=-1)[:, None] + spread[:, None] * noise
    proxies = proxies.to(rows) * torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return {
        **state,
        "proxy.new": torch.where((sums["class.count"] > 0)[:, None, None], proxies, rows),
    }


@dataclass(frozen=True)
class ProxyHead(TunedBackbone, Rehearsal):
    """Base of methods with several proxies per class, which distil maps of patch tokens.

    Proxies of finished tasks are frozen until the balanced fine-tuning: a last round in which every
    client trains all proxies, and nothing else, on its exemplars of old and new classes.
    """

    dataset_options = {"digits": {"memory": 20, "eta": 5.0, "lr_balanced": 0.02}}

    choice: Literal["herding", "raw", "residual", "first"] = option(
        "residual",
        "choice of exemplars: herding, on features of length 1; raw, on raw features; residual, "
        "the largest inner product with w, where w starts as the class mean and grows by mean "
        "minus chosen feature after each choice (released code); first, first images per class",
    )
    proxies: int = option(10, "number K of proxies per class", low=1)
    eta: float = option(1.0, "initial value of eta, the learned scale of the logits", low=0)
    margin: float = option(0.6, "delta, margin of the NCA loss", low=0)
    nca_code: bool = option(
        False,
        "use the NCA loss of the released code: its margin cancels, and the true class enters "
        "the sum as exp(0)",
        quirk="released code",
    )
    lr_balanced: float = option(
        1e-3,
        "learning rate of the proxies in the balanced fine-tuning after each task but the first",
        low=0,
    )

    @abstractmethod
    def distance(self, old: list[Tensor], new: list[Tensor], ctx: Context) -> Tensor:
        """Compute the weighted distance between the maps of teacher and model.

        Args:
            old: Maps [B, D, s, s] of the teacher, one per block of ``quarter_taps``.
            new: Maps [B, D, s, s] of the model.
            ctx: Broadcast tensors.

        Returns:
            Distances [B].
        """

    def training(self) -> Training:
        # Main phase: train new proxies, eta and what ``tune`` adds. Balanced fine-tuning, the last
        # round, on exemplars: train all proxies and nothing else.
        training = self.rehearsing(self.tuning("proxy.new", "eta"))
        return replace(
            training,
            uploads={"class.": per_class("count", "sum", "squares")},
            collect_at={"task_start"},
            balanced={"proxy.": self.optim(self.lr_balanced)},
            gives_logits=False,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        new = F.normalize(torch.randn(task.size, self.proxies, backbone.dim, generator=rng), dim=-1)
        if not state:
            start = {"proxy.old": new[:0], "proxy.new": new, "eta": torch.tensor(self.eta)}
            return {**start, **self.start_plugs(backbone, rng)}
        # Task boundary: the teacher is the model after balanced fine-tuning. New proxies have the
        # mean length of all existing ones.
        old = torch.cat([state["proxy.old"], state["proxy.new"]])
        new = new.to(old) * torch.linalg.vector_norm(old, dim=-1).mean()
        return self.with_teacher(
            {**state, "proxy.old": old, "proxy.new": new}, task, "full.", "lora."
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Imprinting, client: n, sum f and sum f^2 per new class, with f of length 1.
        return moment_sums(
            F.normalize(self.features(backbone, tree, batch), dim=-1), batch, ctx.task
        )

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        # Imprinting, server: K proxies per class from N(unit mean, variance) of the unit features.
        return imprint_proxies(state, sums, ctx.rng)

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L = L_nca + sqrt(C_seen / C_new) (distance of the maps + distance of the features).
        model, plugs = {**ctx.shared, **train}, select({**ctx.shared, **train}, "full.", "lora.")
        # Only L_nca in the first task, in balanced fine-tuning, and with ``tune=head``.
        if ctx.task.index == 0 or ctx.balanced or self.tune == "head":
            return batch.mean(self.nca(self.features(backbone, model, batch), model, batch)), {}
        features, maps = patch_maps(backbone, batch.x, plugs)
        with torch.no_grad():
            teacher = strip_prefix(ctx.shared, "teacher.")
            old_features, old_maps = patch_maps(backbone, batch.x, teacher)
        teacher_loss = self.distance(old_maps, maps, ctx) + self.flat(old_features, features)
        weight = math.sqrt(ctx.task.stop / ctx.task.size)
        return batch.mean(self.nca(features, model, batch) + weight * teacher_loss), {}

    def flat(self, old: Tensor, new: Tensor) -> Tensor:
        """Compute the weighted distance between the features of teacher and model; by default 0.

        Args:
            old: Features [B, D] of the teacher.
            new: Features [B, D] of the model.

        Returns:
            Distances [B].
        """
        return torch.zeros_like(new[:, 0])

    def nca(self, features: Tensor, model: Tree, batch: Batch) -> Tensor:
        """Compute L_nca over all classes seen so far.

        Args:
            features: Features f [B, D].
            model: Trained and broadcast tensors of the model.
            batch: Labels of the images.

        Returns:
            Losses [B].
        """
        # LSC logits: y_c = sum_k softmax(s_c)_k s_{c,k} with s_{c,k} = 2 cos(f, w_{c,k}) - 2.
        logits = proxy_logits(features, torch.cat([model["proxy.old"], model["proxy.new"]]))
        return nca(logits, batch.y, model["eta"], self.margin, self.nca_code)

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax of the LSC logits over the classes seen.
        proxies = torch.cat([state["proxy.old"], state["proxy.new"]])
        return proxy_logits(self.features(backbone, state, batch), proxies)
