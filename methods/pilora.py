"""PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning.

Guo et al., ECCV 2024.

Follows the paper's Algorithm 1. In a round the client calls ``loss`` (l_dce and l_pl of eqs. 8 and
9, l_ort of LoRA), then ``collect`` and ``make_upload`` (class means). The server calls
``aggregate`` (FedAvg of LoRA, prototype re-weight of eqs. 11 to 14).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.aggregators.prototypes import prototype_reweight, uploaded_weights
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class
from fczoo.core.registry import register_method
from fczoo.core.training import Optim, TaskPhase, Training
from fczoo.core.tree import Tree, drop
from fczoo.core.types import (
    Batch,
    Context,
    Evidence,
    Finding,
    ServerAggregator,
    ServerContext,
    Task,
)
from fczoo.functional.gaussians import class_sums
from fczoo.functional.lora import lora_cosines
from fczoo.methods._pilora_lora import IncrementalLoRA
from fczoo.methods._pilora_prototype_head import LearnedPrototypes
from fczoo.protocols.registry import use_protocol_options


@register_method("pilora")
@use_protocol_options("pilora", "pilora", datasets=["tinyimagenet"])
@dataclass(frozen=True)
class PILoRA(IncrementalLoRA, LearnedPrototypes):
    """One LoRA pair per task with an orthogonality penalty, and a head of learned prototypes.

    The class of the nearest prototype is predicted. Clients train LoRA on q and v of the first
    block, and the prototypes of the current task's classes. They send both, and the mean feature of
    every local class. The server averages LoRA, and weights the clients' prototypes by their
    closeness to these means. LoRA pairs and prototypes of finished tasks are frozen.
    """

    paper = (
        'Guo et al., "PILoRA: Prototype Guided Incremental LoRA for Federated '
        'Class-Incremental Learning", ECCV 2024'
    )
    formulas = r"""
    $$\hat f_t(x) = f\Bigl(x;\; W + \sum_{i \le t} B_i A_i\Bigr)$$

    $$d(x, c) = \lVert \hat f_t(x) - m_c \rVert / \sqrt D$$

    $$L = -\log \frac{e^{-\delta\, d(x, y)}}{\sum_c e^{-\delta\, d(x, c)}} + \lambda\, d(x, y)
    + \gamma \sum_{i<t} \lVert A_i A_t^\top \rVert_1 + s\, \lVert A_t \rVert_1$$

    The last term, of weight $s$ (`sparse`), is only in the released code.

    On the server, for a class with prototypes $m^k$ and class means $\mu^j$ of the clients:

    $$p_k = 1 / d_k, \quad d_k = \sum_j \lVert m^k - \mu^j \rVert$$

    $$w_k = \operatorname{softmax}_k\Bigl(
    \frac{1}{\tau} \frac{p_k - \min p}{\max p - \min p} \Bigr)$$

    $$m = \sum_k w_k m^k$$
    """
    append_only = ("past.", "frozen.before")
    dataset_options = {"digits": {"head_tune": True}}

    schedule: Literal["cosine", "cosine_late", "constant"] = option(
        "cosine",
        "learning-rate schedule over the rounds of a task: cosine; cosine_late, the cosine one "
        "round late; constant",
        quirk={"cosine_late": "Ghy0501/PILoRA"},
    )
    weight_decay: float = option(
        1e-5, "weight decay of LoRA and prototypes; only in the released code (paper: 0)", low=0
    )
    temperature: float = option(
        0.2,
        "tau, divisor in the softmax of the re-weighting; eq. 13 multiplies by tau instead: use "
        "5 for that reading",
        low=1e-6,
    )
    reweight: Literal["distance", "squared", "average", "equal"] = option(
        "distance",
        "weights of the clients' prototypes: distance, by distances to class means (code); "
        "squared, by squared ones (eq. 11); average, by numbers of images; equal, without "
        "re-weighting (sections 4.2 and 5.3)",
    )
    means: Literal["after", "running"] = option(
        "after",
        "class means that clients send: after, from one pass after training; running, over all "
        "training views",
        quirk={"running": "Ghy0501/PILoRA"},
    )
    unheld: Literal["average", "server"] = option(
        "average",
        "prototype of a class that no client of the round holds: average, mean of the clients' "
        "copies; server, unchanged (fed-mammoth)",
    )

    def training(self) -> Training:
        # Client: Adam with one learning rate for LoRA and one for the prototypes, both constant
        # within a round.
        decay, schedule = self.weight_decay, self.schedule
        asked: dict[TaskPhase, bool] = {
            "task_start": self.head_tune,
            "after_training": self.means == "after",
        }
        return Training(
            optims={
                f"{self.tune}.": Optim(lr=self.lr_lora, weight_decay=decay, schedule=schedule),
                "prototype": Optim(lr=self.lr_prototype, weight_decay=decay, schedule=schedule),
            },
            inputs=["images", "query"] if self.head_tune else ["images"],
            uploads={"class.": per_class("count", "mean", "sum")},
            collect_at=[phase for phase, is_asked in asked.items() if is_asked],
            gives_logits=False,
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: start a new pair A_t, B_t = 0, and freeze earlier pairs. Train the
        # prototypes of the new classes, and freeze all others.
        lora = self.start_lora(state, backbone, rng)
        return {**lora, **self.start_prototypes(state, task, backbone.dim, rng)}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Features of the local model with the pairs of all tasks (released code: only the current).
        features = self.local_features(backbone, train, batch, ctx)
        # Released code: class means over all features that local training sees.
        image_counts = batch.class_count[ctx.task.start : ctx.task.stop] * batch.w.sum()
        sums = (
            {**class_sums(features, batch, ctx.task), "owned": image_counts}
            if self.means == "running"
            else {}
        )
        # L = l_dce + lambda l_pl + gamma l_ort + s |A_t|. ``prototype_loss`` has l_dce (eq. 8) and
        # l_pl (eq. 9). ``lora_penalty`` has l_ort, the overlap of A_t with earlier A_i, and |A_t|,
        # which is only in the released code.
        return self.prototype_loss(features, train, batch, ctx) + self.lora_penalty(
            train, ctx.shared
        ), sums

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Class means mu_{k,c}: one pass without gradients after local training.
        return class_sums(self.local_features(backbone, tree, batch, ctx), batch, ctx.task)

    def make_upload(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        # Upload: A_t, B_t, the prototypes m_{k,c} of the task, and mu_{k,c} with the image count.
        # With ``means=running`` the sums count views over all epochs; ``owned`` gives the images.
        views = sums["class.count"]
        count = (
            views if self.means == "after" else views.minimum((sums["owned"] / views.sum()).round())
        )
        return {
            **train,
            "class.count": count,
            "class.mean": sums["class.sum"] / views[:, None].clamp(min=1),
        }

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        # LoRA: FedAvg of A and of B separately, with weights n_k.
        # Prototypes, eqs. 11 to 14, per class:
        # d_k = sum_j |m^k - mu^j| over the clients j that hold the class (eq. 11: squared);
        # p_k = 1 / d_k, rescaled to [0, 1] over all clients k;
        # w_k = softmax_k(p_k / tau) (eq. 13 multiplies by tau);
        # m = sum_k w_k m^k. Algorithm 1: equal weights for a class without features.
        if self.reweight == "average":
            server_tree = average([p.drop("class.") for p in payloads])
        elif self.reweight == "equal":
            server_tree = average([p.drop("prototype", "class.") for p in payloads])
            server_tree["prototype"] = torch.stack([p["prototype"] for p in payloads]).mean(0)
        else:
            use_squares = self.reweight == "squared"
            server_tree = prototype_reweight(payloads, average, self.temperature, use_squares)
        if self.unheld == "server":
            server_tree["held"] = torch.stack([p["class.count"] for p in payloads]).sum(0) > 0
        return server_tree

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # fed-mammoth: a class that no client of the round holds keeps the server's prototype.
        if self.unheld == "server":
            new, old = merged["prototype"], state["prototype"]
            merged = {
                **drop(merged, "held"),
                "prototype": torch.where(merged["held"][:, None], new, old),
            }
        return {**state, **merged}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmin_c d(x, c) over the classes seen; eq. 6 merges LoRA over the tasks.
        return -self.distances(
            self.features(backbone, state, batch), self.table(state)[: task.stop]
        )

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        if not evidence.payloads:
            if self.tune == "full" or not evidence.task.index:
                return {}
            return {"lora": {"matrix": lora_cosines(evidence.state).tolist()}}
        if self.reweight in ("average", "equal"):
            return {}
        weights = uploaded_weights(evidence.payloads, self.temperature, self.reweight == "squared")
        counts = torch.stack([p["class.count"] for p in evidence.payloads])
        share = counts / counts.sum(0).clamp(min=1)
        clients = [p.client for p in evidence.payloads]
        return {
            "reweight": {"clients": clients, "weights": weights.tolist(), "share": share.tolist()}
        }
