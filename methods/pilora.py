"""PILoRA: Prototype Guided Incremental LoRA for Federated Class-Incremental Learning.

Guo et al., ECCV 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.aggregators.prototypes import prototype_reweight, uploaded_weights
from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.payload import Payload, per_class
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop, select
from fczoo.core.types import (
    Batch,
    Context,
    Evidence,
    Finding,
    Moment,
    Optim,
    ServerAggregator,
    ServerContext,
    Task,
    Training,
)
from fczoo.functional.gaussians import class_sums
from fczoo.functional.lora import lora_cosines, lora_pairs, merged_pairs
from fczoo.functional.past import joined_past


@register_method("pilora")
@dataclass(frozen=True)
class PILoRA(Method):
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

    $$d_k = \sum_j \lVert m^k - \mu^j \rVert$$

    $$p_k = 1 / d_k$$

    $$w_k = \operatorname{softmax}_k\Bigl( \frac{1}{\tau} \frac{p_k - \min p}{\max p - \min p} \Bigr)$$

    $$m = \sum_k w_k m^k$$
    """
    frozen = ("past.", "frozen.before")
    tuned = {"tinyimagenet": {"lr_prototype": 5e-3, "lr_lora": 5e-6}, "digits": {"head_tune": True}}

    rank: int = option(4, "rank r of each LoRA matrix", low=1)
    blocks: tuple[int, ...] = option((0,), "blocks with LoRA on q and v", low=0)
    lr_prototype: float = option(2e-2, "learning rate of the prototypes", low=0, tune=(1e-3, 1.0, "log"))
    lr_lora: float = option(
        1e-5, "learning rate of LoRA (HGP's re-run of PILoRA: 1e-4)", low=0, tune=(1e-6, 1e-2, "log")
    )
    schedule: Literal["cosine", "cosine_late", "constant"] = option(
        "cosine", "over the rounds of a task, or one round late", quirk={"cosine_late": "Ghy0501/PILoRA"}
    )
    weight_decay: float = option(1e-5, "on LoRA and prototypes; only in the released code (paper: 0)", low=0)
    pull: float = option(1e-3, "weight lambda of the distance to the own prototype", low=0)
    ortho: float = option(0.5, "weight gamma of the overlap with earlier tasks' LoRA", low=0)
    sparse: float = option(0.01, "weight of |A|; only in the released code (paper: 0)", low=0)
    sharpness: float = option(1.0, "delta: distances are multiplied by it in the softmax", low=0)
    distance: Literal["rms", "squared"] = option(
        "rms", "root mean square as released, or squared L2 as printed (rates are tuned for rms)"
    )
    support: Literal["all", "seen", "task"] = option(
        "all", "classes in the training softmax: all of the run (paper and code), seen, or the task's"
    )
    merge: Literal["sum", "factor_sum", "first"] = option(
        "sum",
        "LoRA of several tasks: sum of B_i A_i; (sum B)(sum A) as eq. 6; or the first task's alone, with "
        "local=current in training",
        quirk={"first": "Ghy0501/PILoRA"},
    )
    local: Literal["merged", "current"] = option(
        "merged",
        "LoRA in a client's own forward: merged as in evaluation, or the current task's alone",
        quirk={"current": "Ghy0501/PILoRA"},
    )
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
    head_tune: bool = option(
        False,
        "start new prototypes at the class means of the frozen features (FedNCM's HeadTune)",
        tune=[False, True],
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

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"}) if self.head_tune else frozenset()

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        past = joined_past(state, "lora.", "past.")
        lora = lora_pairs(backbone, self.blocks, self.rank, rng, "pilora.blocks")
        table = self._table(state) if state else 0.1 * torch.randn(task.classes, backbone.dim, generator=rng)
        rest = {"frozen.before": table[: task.start], "frozen.after": table[task.stop :]}
        return {**past, **lora, **rest, "prototype": table[task.start : task.stop].clone()}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        features = backbone(batch.x, self._local(train, ctx))
        sums = class_sums(features, batch, ctx.task) if self.means == "running" else {}
        return self.prototype_loss(features, train, batch, ctx) + self.lora_penalty(train, ctx.shared), sums

    def prototype_loss(self, features: Tensor, train: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Distance-based cross-entropy plus the pull towards the own prototype (eqs. 8 and 9)."""
        distance = self.distances(features, self._table({**ctx.shared, **train}))
        first = ctx.task.start if self.support == "task" else 0
        last = ctx.task.classes if self.support == "all" else ctx.task.stop
        logits = -self.sharpness * distance[:, first:last]
        entropy = F.cross_entropy(logits, batch.y - first, reduction="none")
        return batch.mean(entropy + self.pull * distance.gather(1, batch.y[:, None])[:, 0])

    def lora_penalty(self, train: Tree, shared: Tree) -> Tensor:
        """Overlap of the new A matrices with earlier ones, sum |A_i A_t^T|, and their own size, sum |A_t|."""
        down = {k: v for k, v in train.items() if k.endswith(".a")}
        penalty = self.sparse * torch.stack([a.abs().sum() for a in down.values()]).sum()
        for name, a in down.items():
            earlier = shared.get(name.replace("lora.", "past.", 1))
            if earlier is not None:
                penalty = penalty + self.ortho * (earlier @ a.mT).abs().sum()
        return penalty

    def stats(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tree:
        return class_sums(backbone(batch.x, self._local(train, ctx)), batch, ctx.task)

    def pack(self, train: Tree, sums: Tree, ctx: Context) -> Tree:
        count = sums["class.count"]
        return {**train, "class.count": count, "class.mean": sums["class.sum"] / count[:, None].clamp(min=1)}

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

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        return class_sums(batch.query, batch, task)

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        count = sums["class.count"][:, None]
        mean = sums["class.sum"] / count.clamp(min=1)
        return {**state, "prototype": torch.where(count > 0, mean, state["prototype"])}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return -self.distances(self.features(backbone, state, batch), self._table(state)[: task.stop])

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, merged_pairs(tree, self.merge))

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

    def distances(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Distances d(x, c) [B, C] of features f [B, D] to prototypes m [C, D].

        The root mean square over dimensions, sqrt(|f - m_c|^2 / D), or the squared distance |f - m_c|^2.
        """
        gap = (features[:, None] - prototypes).square()
        if self.distance == "squared":
            return gap.sum(-1)
        mean = gap.mean(-1)
        # The root has no gradient at 0.
        return torch.where(mean > 0, mean, torch.finfo(mean.dtype).tiny).sqrt()

    def _table(self, tree: Tree) -> Tensor:
        """Prototypes of all classes of the run, [C, D]."""
        return torch.cat([tree["frozen.before"], tree["prototype"], tree["frozen.after"]])

    def _local(self, train: Tree, ctx: Context) -> Tree:
        """LoRA in a client's forward; with the first task's alone the current one would get no gradient."""
        alone = self.local == "current" or self.merge == "first"
        return select(train, "lora.") if alone else merged_pairs({**ctx.shared, **train}, self.merge)
