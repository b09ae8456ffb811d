"""Base of LUCIR and methods on it: a cosine head with rows per task, and exemplars."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._tuned_backbone import TunedBackbone
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, strip_prefix
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.cosine import cosines, grow_head, imprint_head
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.gaussians import class_sums


@dataclass(frozen=True)
class CosineHead(TunedBackbone, Rehearsal):
    """Base of methods whose logits are sigma cos(f, w_c), with exemplars and a teacher of features.

    Head rows of finished tasks are frozen. New rows are imprinted: they start in the direction of
    the mean of their class's features of length 1 over all clients, under the last global model.
    """

    append_only = ("head.old",)
    dataset_options = {"digits": {"memory": 20, "sigma": 10.0}}

    sigma: float = option(1.0, "initial value of sigma, the learned scale of the cosines", low=0)

    def training(self) -> Training:
        training = self.rehearsing(self.tuning("head.new", "sigma"))
        uploads = {"class.": per_class("count", "sum")}
        return replace(training, uploads=uploads, collect_at={"task_start"})

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: freeze the last task's rows, add new rows. The teacher is the global model
        # at the end of the last task.
        start = (
            {} if state else {**self.start_plugs(backbone, rng), "sigma": torch.tensor(self.sigma)}
        )
        return self.with_teacher(
            {**grow_head(state, task, backbone.dim, rng), **start}, task, "full.", "lora."
        )

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Imprinting, client: per new class the sum of features normalised to length 1.
        return class_sums(
            F.normalize(self.features(backbone, tree, batch), dim=-1), batch, ctx.task
        )

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        # Imprinting, server: a new row has the direction of the class's mean feature and the mean
        # length of the old rows.
        return imprint_head(state, sums)

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        """Compute the teacher's features f_old.

        Args:
            backbone: The frozen backbone.
            shared: Broadcast tensors, with ``teacher.X``.
            batch: Images.
            task: The current task.

        Returns:
            Features [B, D]; [B, 0] in the first task.
        """
        if task.index == 0:
            return batch.query.new_empty(len(batch.y), 0)
        model = strip_prefix(shared, "teacher.")
        return self.features(backbone, model, batch)

    def scores(self, features: Tensor, tree: Tree, ctx: Context) -> Tensor:
        """Compute cosines of features with the rows of all classes seen.

        Args:
            features: Features f [B, D].
            tree: Trained tensors, with ``head.new``.
            ctx: Broadcast tensors, with ``head.old``, which gets no gradient.

        Returns:
            Cosines [B, C].
        """
        return cosines(features, torch.cat([ctx.shared["head.old"], tree["head.new"]]))

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax of sigma cos(f, w_c) over the classes seen.
        rows = torch.cat([state["head.old"], state["head.new"]])
        return state["sigma"] * cosines(self.features(backbone, state, batch), rows)
