"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan et al., AISTATS 2017.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from fczoo.baselines.finetune import Tuned

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Moment, ServerContext, Task, Training
from fczoo.functional.gaussians import class_sums


@register_method("fedavg")
@dataclass(frozen=True)
class FedAvg(Tuned):
    """Plain federated training on each task in turn, with nothing against forgetting: the lower bound.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs.
    """

    paper = "McMahan et al., AISTATS 2017"

    start: Literal["random", "means"] = option(
        "random", "new head rows: random, or the classes' mean features (HeadTune, Legate et al., 2023)"
    )

    def training(self) -> Training:
        statistics = {"class.": per_class("count", "sum")} if self.start == "means" else {}
        return replace(super().training(), uploads=statistics)

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"}) if self.start == "means" else frozenset()

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        return class_sums(self.features(backbone, state, batch), batch, task)

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        weight, bias = state["head.weight"].clone(), state["head.bias"].clone()
        means = torch.nn.functional.normalize(sums["class.sum"], dim=-1)
        held = sums["class.count"] > 0
        new = slice(ctx.task.start, ctx.task.stop)
        weight[new][held], bias[new][held] = means[held].to(weight), 0
        return {**state, "head.weight": weight, "head.bias": bias}
