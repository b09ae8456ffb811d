"""DyTox in federated learning: Transformers for Continual Learning with DYnamic TOken eXpansion.

Douillard et al., CVPR 2022.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from fczoo.baselines.finetune import TunedBackbone
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, OptimizerName, Task, Training
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.task_tokens import (
    copied_block,
    drawn_block,
    drawn_classifier,
    drawn_task,
    image_tokens,
    task_embeddings,
    task_logits,
)


@register_method("dytox")
@dataclass(frozen=True)
class DyTox(TunedBackbone, Rehearsal):
    """A token a task attends to the image's tokens in one shared block, and feeds that task's classifier.

    Kept from the paper: the tokens, the block, the classifiers, the divergence head, the distillation and
    the last round on exemplars. Not kept: the network beneath, five convolutional attention blocks of 384
    that are trained from nothing. Here it is the pre-trained transformer, all of whose tokens the block
    reads, after the final norm; what of it is trained is ``tune``. Block and tokens start at random, so
    that a short schedule trains them little; the block may be copied from the backbone's last one.

    Trained and sent: the block, the token and classifier of the task, its divergence head and, by choice,
    all weights or LoRA pairs; after it block, tokens and classifiers of all tasks, from one more round on
    exemplars alone. Memory beyond the model: the teacher, one copy of all that; exemplars at the client.
    """

    paper = "Douillard et al., DyTox, CVPR 2022"
    formulas = r"""
    $$z_c = w_c^\top \operatorname{norm}_i(e_i) + b_c, \quad
    e_i = \operatorname{TAB}(\theta_i, x), \quad c \in C_i$$

    $$L = (1 - \lambda) L_{bce} + \frac{\lambda}{C_{old}} \operatorname{KL}(q \,\Vert\, p) + \mu L_{div}$$

    $\lambda$ is the old classes' share of those seen; $q$ and $p$ are softmaxes over the old classes of the
    teacher's logits and of these. $L_{div}$ is the binary cross-entropy of the divergence head.
    """
    tuned = {"digits": {"memory": 20, "lr": 5e-3, "lr_balanced": 5e-3}}  # rates: one guess, no search

    choice: Literal["herding", "raw", "residual", "first"] = option(
        "residual", "how a client chooses exemplars; by the residual as in released code"
    )
    optimizer: OptimizerName = option("adamw", "optimizer of all that clients train")
    weight_decay: float = option(1e-6, "weight decay of all that clients train", low=0)
    lr: float = option(
        5e-4, "learning rate of block, tokens and classifiers", low=0, tune=(1e-5, 1e-2, "log")
    )
    lr_balanced: float = option(5e-5, "the same in the last round", low=0)
    divergence: float = option(
        0.1, "weight of the divergence head, which tells new classes apart from all old ones together", low=0
    )
    tab_init: Literal["random", "last_block"] = option(
        "random", "how the task-attention block starts; the backbone's last block, without biases of q, k, v"
    )

    def training(self) -> Training:
        training = self.rehearsing(replace(self.tuning("tab.", "new."), inputs=("images",)))
        kept = ("tab.", "old.", "new.token", "new.norm", "new.weight", "new.bias")
        return replace(training, balanced=dict.fromkeys(kept, self.optim(self.lr_balanced)))

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        new = {f"new.{k}": v for k, v in drawn_task(task.size, backbone.dim, rng).items()}
        own = torch.full((task.size,), task.index)
        if not state:
            block = drawn_block(backbone.dim, 4 * backbone.dim, rng)
            block = block if self.tab_init == "random" else copied_block(backbone)
            old = {k.replace("new.", "old."): v[:0] for k, v in new.items()}
            return {**block, **old, **new, "owner": own, **self.start_plugs(backbone, rng)}
        state = self.with_teacher(state, task, "full.", "lora.", "tab.", "old.", "new.", "owner")
        for name, value in select(state, "old.").items():
            state[name] = torch.cat([value, state[name.replace("old.", "new.")]])
        apart = drawn_classifier(task.size + 1, backbone.dim, rng)
        state["owner"] = torch.cat([state["owner"], own.to(state["owner"])])
        return {**state, **new, **{f"new.divergence_{k}": v for k, v in apart.items()}}

    def teach(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        teacher = {k.removeprefix("teacher."): v for k, v in select(shared, "teacher.").items()}
        return self.logits(backbone, teacher, batch) if teacher else batch.query.new_empty(len(batch.y), 0)

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        model = {**ctx.shared, **train}
        embeddings = self.embeddings(backbone, model, batch)
        logits = task_logits(classifiers(model), embeddings, model["owner"])
        if ctx.task.index == 0 or ctx.balanced:
            return batch.mean(binary(logits, batch.y)), {}
        classifier = {k.partition("_")[2]: v for k, v in select(model, "new.divergence_").items()}
        newest = torch.zeros(ctx.task.size + 1, dtype=torch.int64, device=logits.device)
        apart = task_logits(classifier, embeddings[:, -1:], newest)
        return batch.mean(self.grown(logits, apart, batch.teacher, batch.y, ctx.task)), {}

    def grown(self, logits: Tensor, apart: Tensor, teacher: Tensor, labels: Tensor, task: Task) -> Tensor:
        """The loss [B] of a later task, from logits [B, C], the divergence head's [B, c + 1], and the
        teacher's [B, o]."""
        old = task.start
        share = old / task.stop  # lambda
        log_p, log_q = logits[:, :old].log_softmax(-1), teacher[:, :old].log_softmax(-1)
        kept = (log_q.exp() * (log_q - log_p)).mean(-1)  # over classes, as released
        side = (labels - old + 1).clamp(min=0)
        known = (1 - share) * binary(logits, labels) + share * kept
        return known + self.divergence * binary(apart, side)

    def embeddings(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """The embeddings [B, t, D] of all tasks' tokens."""
        tokens = torch.cat([tree["old.token"], tree["new.token"]])
        image = image_tokens(backbone, batch.x, select(tree, "full.", "lora."))
        return task_embeddings(tree, tokens, image, backbone.config.heads)

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """The embeddings side by side [B, t D], by which exemplars are chosen."""
        return self.embeddings(backbone, tree, batch).flatten(1)

    def logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Logits [B, C] over the classes seen so far."""
        return task_logits(classifiers(tree), self.embeddings(backbone, tree, batch), tree["owner"])

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return self.logits(backbone, state, batch)


def classifiers(tree: Mapping[str, Tensor]) -> Tree:
    """The classifiers of all tasks, finished and new, in one."""
    parts = ("norm_weight", "norm_bias", "weight", "bias")
    return {part: torch.cat([tree[f"old.{part}"], tree[f"new.{part}"]]) for part in parts}


def binary(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy [B] of logits [B, C], mean over classes."""
    hot = F.one_hot(labels, logits.shape[1]).to(logits)
    return F.binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(-1)
