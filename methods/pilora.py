"""PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning.

Guo et al., ECCV 2024.
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
from fczoo.core.tree import Tree, drop
from fczoo.core.types import (
    Batch,
    Context,
    Evidence,
    Finding,
    Optim,
    ServerAggregator,
    ServerContext,
    Task,
    Training,
)
from fczoo.functional.gaussians import class_sums
from fczoo.functional.incremental_lora import IncrementalLoRA
from fczoo.functional.lora import lora_cosines
from fczoo.functional.prototypes import LearnedPrototypes


@register_method("pilora")
@dataclass(frozen=True)
class PILoRA(IncrementalLoRA, LearnedPrototypes):
    """One LoRA pair a task, orthogonal to earlier ones; classes are learned prototypes, the nearest one wins.

    Trained: LoRA on q and v of the first block, and the prototypes of the current task's classes. Sent:
    both, with the clients' class means, by whose closeness the server weights the prototypes. Old LoRA
    pairs and prototypes are frozen.
    """

    paper = "Guo et al., PILoRA, ECCV 2024"
    formulas = r"""
    $$\hat f_t(x) = f\Bigl(x;\; W + \sum_{i \le t} B_i A_i\Bigr)$$

    $$d(x, c) = \lVert \hat f_t(x) - m_c \rVert / \sqrt D$$

    $$L = -\log \frac{e^{-\delta\, d(x, y)}}{\sum_c e^{-\delta\, d(x, c)}} + \lambda\, d(x, y)
    + \gamma \sum_{i<t} \lVert A_i A_t^\top \rVert_1 + s\, \lVert A_t \rVert_1$$

    The last term, of weight $s$ (`sparse`), is in the released code alone.

    On the server, for a class with prototypes $m^k$ and class means $\mu^j$ of the clients:

    $$p_k = 1 / d_k, \quad d_k = \sum_j \lVert m^k - \mu^j \rVert$$

    $$w_k = \operatorname{softmax}_k\Bigl( \frac{1}{\tau} \frac{p_k - \min p}{\max p - \min p} \Bigr)$$

    $$m = \sum_k w_k m^k$$
    """
    frozen = ("past.", "frozen.before")
    tuned = {"tinyimagenet": {"lr_prototype": 5e-3, "lr_lora": 5e-6}, "digits": {"head_tune": True}}

    schedule: Literal["cosine", "cosine_late", "constant"] = option(
        "cosine", "over the rounds of a task, or one round late", quirk={"cosine_late": "Ghy0501/PILoRA"}
    )
    weight_decay: float = option(1e-5, "on LoRA and prototypes; only in the released code (paper: 0)", low=0)
    temperature: float = option(
        0.2,
        "divisor in the re-weight's softmax; eq. 13 prints it as a factor: use 5 for that reading",
        low=1e-6,
    )
    reweight: Literal["distance", "squared", "average"] = option(
        "distance", "prototypes by distance (code), squared distance (eq. 11), or plain average"
    )
    means: Literal["after", "running"] = option(
        "after",
        "class means from one pass after training, or over all training views",
        quirk={"running": "Ghy0501/PILoRA"},
    )
    unheld: Literal["average", "server"] = option(
        "average",
        "prototype of a class that nobody in the round holds: mean of the clients' copies, or the server's "
        "as it was (fed-mammoth)",
    )

    def training(self) -> Training:
        decay, schedule = self.weight_decay, self.schedule
        return Training(
            optims={
                "lora.": Optim(lr=self.lr_lora, weight_decay=decay, schedule=schedule),
                "prototype": Optim(lr=self.lr_prototype, weight_decay=decay, schedule=schedule),
            },
            inputs=["images", "query"] if self.head_tune else ["images"],
            uploads={"class.": per_class("count", "mean", "sum")},
            stats="test" if self.means == "after" else "none",
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        lora = self.start_lora(state, backbone, rng)
        return {**lora, **self.start_prototypes(state, task, backbone.dim, rng)}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = self.local_features(backbone, train, batch, ctx)
        owned = batch.class_count[ctx.task.start : ctx.task.stop] * batch.w.sum()
        sums = {**class_sums(features, batch, ctx.task), "owned": owned} if self.means == "running" else {}
        return self.prototype_loss(features, train, batch, ctx) + self.lora_penalty(train, ctx.shared), sums

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        return class_sums(self.local_features(backbone, train, batch, ctx), batch, ctx.task)

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        seen = sums["class.count"]  # views, where means run over all epochs
        count = seen if self.means == "after" else seen.minimum((sums["owned"] / seen.sum()).round())
        return {**train, "class.count": count, "class.mean": sums["class.sum"] / seen[:, None].clamp(min=1)}

    def aggregate(self, payloads: Sequence[Payload], average: ServerAggregator) -> Tree:
        if self.reweight == "average":
            merged = average([p.drop("class.") for p in payloads])
        else:
            squared = self.reweight == "squared"
            merged = prototype_reweight(payloads, average, self.temperature, squared)
        if self.unheld == "server":
            merged["held"] = torch.stack([p["class.count"] for p in payloads]).sum(0) > 0
        return merged

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        if self.unheld == "server":
            new, old = merged["prototype"], state["prototype"]
            merged = {**drop(merged, "held"), "prototype": torch.where(merged["held"][:, None], new, old)}
        return {**state, **merged}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return -self.distances(self.features(backbone, state, batch), self.table(state)[: task.stop])

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        if not evidence.payloads:
            return {"lora": {"matrix": lora_cosines(evidence.state).tolist()}} if evidence.task.index else {}
        if self.reweight == "average":
            return {}
        weights = uploaded_weights(evidence.payloads, self.temperature, self.reweight == "squared")
        counts = torch.stack([p["class.count"] for p in evidence.payloads])
        share = counts / counts.sum(0).clamp(min=1)
        clients = [p.client for p in evidence.payloads]
        return {"reweight": {"clients": clients, "weights": weights.tolist(), "share": share.tolist()}}
