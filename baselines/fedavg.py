"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data. McMahan et al., AISTATS 2017."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.backbone import Backbone
from fczoo.core import Batch, Context, Method, Optim, Task, Tree
from fczoo.losses import head_logits, linear_head, task_cross_entropy
from fczoo.options import option
from fczoo.registry import register_method
from fczoo.tuning import Tune, start_plugs, tuned_features, wanted_inputs


@register_method("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Plain federated training on each task in turn, with nothing against forgetting: the lower yardstick.

    Trained and sent: the linear head and, by choice, all weights or LoRA pairs.
    """

    paper = "McMahan et al., AISTATS 2017"

    tune: Tune = option("full", "what is trained besides the head")
    lr: float = option(1e-2, "learning rate of the head", low=0)
    lr_backbone: float = option(1e-4, "learning rate of weights or LoRA (FPPL's slow learner)", low=0)
    rank: int = option(4, "LoRA rank, with tune=lora", low=1)
    blocks: tuple[int, ...] = option((0,), "blocks with LoRA on q and v, with tune=lora", low=0)

    def inputs(self) -> frozenset[str]:
        return wanted_inputs(self.tune)

    def optims(self) -> Mapping[str, Optim]:
        slow = {"full": {"full.": Optim(lr=self.lr_backbone)}, "lora": {"lora.": Optim(lr=self.lr_backbone)}, "head": {}}[self.tune]
        return {"head.": Optim(lr=self.lr), **slow}

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        return state or {**linear_head(task, backbone.dim, rng), **start_plugs(self.tune, backbone, self.rank, self.blocks, rng)}

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        return task_cross_entropy(head_logits(train, tuned_features(self.tune, backbone, train, batch)), batch, ctx.task), {}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return head_logits(state, tuned_features(self.tune, backbone, state, batch))[:, : task.stop]
