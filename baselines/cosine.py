"""What LUCIR and its followers share: a head of cosines that grows row by row, and exemplars."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import TunedBackbone
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Moment, ServerContext, Task, Training
from fczoo.functional.cosine import cosines, grown, imprinted
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.gaussians import class_sums


@dataclass(frozen=True)
class CosineHead(TunedBackbone, Rehearsal):
    """Base of methods whose logits are sigma cos(f, w_c), with exemplars and a teacher of features.

    Rows of finished tasks stand still. New rows are imprinted: they start at the mean of their class's
    features of length 1 under the last global model, over all clients.
    """

    frozen = ("head.old",)
    tuned = {"digits": {"memory": 20, "sigma": 10.0}}

    sigma: float = option(1.0, "first value of sigma, the learned scale of the cosines", low=0)

    def training(self) -> Training:
        training = self.rehearsing(self.tuning("head.new", "sigma"))
        return replace(training, uploads={"class.": per_class("count", "sum")})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        start = {} if state else {**self.start_plugs(backbone, rng), "sigma": torch.tensor(self.sigma)}
        return self.with_teacher({**grown(state, task, backbone.dim, rng), **start}, task, "full.", "lora.")

    def surveys(self) -> frozenset[Moment]:
        return frozenset({"begin"})

    def survey(self, moment: Moment, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tree:
        return class_sums(F.normalize(self.features(backbone, state, batch), dim=-1), batch, task)

    def absorb(self, moment: Moment, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        return imprinted(state, sums)

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        """The teacher's features [B, D]; [B, 0] in the first task."""
        if task.index == 0:
            return batch.query.new_empty(len(batch.y), 0)
        model = {k.removeprefix("teacher."): v for k, v in select(shared, "teacher.").items()}
        return self.features(backbone, model, batch)

    def scores(self, features: Tensor, tree: Tree, ctx: Context) -> Tensor:
        """Cosines [B, C] of features [B, D] with all classes seen; rows of old ones get no gradient."""
        return cosines(features, torch.cat([ctx.shared["head.old"], tree["head.new"]]))

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        rows = torch.cat([state["head.old"], state["head.new"]])
        return state["sigma"] * cosines(self.features(backbone, state, batch), rows)
