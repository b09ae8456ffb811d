"""DyTox in federated learning: Transformers for Continual Learning with DYnamic TOken eXpansion.

Douillard et al., CVPR 2022.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._dytox_task_tokens import (
    copy_block,
    image_tokens,
    init_block,
    init_classifier,
    init_task,
    task_embeddings,
    task_logits,
)
from fczoo.baselines._tuned_backbone import TunedBackbone
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import OptimizerName, Training
from fczoo.core.tree import Tree, select, strip_prefix
from fczoo.core.types import Batch, Context, Task
from fczoo.functional.exemplars import Rehearsal


@register_method("dytox")
@dataclass(frozen=True)
class DyTox(TunedBackbone, Rehearsal):
    """One token per task attends to the image's tokens in a shared block and feeds a classifier.

    Kept from the paper: the tokens, the block, the classifiers, the divergence head, the
    distillation and the last round on exemplars. Not kept: the network below, five convolutional
    attention blocks of width 384 that are trained from scratch. Here it is the pre-trained
    transformer; the block reads all its tokens after the final norm, and ``tune`` sets which of its
    weights are trained. Block and tokens have random initial values, so a short schedule trains
    them little; ``tab_init=last_block`` copies the backbone's last block instead.

    Clients train and send the block, the token and classifier of the task, its divergence head and,
    depending on ``tune``, all weights or LoRA pairs. After each task but the first they train
    block, tokens and classifiers of all tasks in one more round, on exemplars only, and send them.
    Memory beyond the model: the teacher, one copy of all these tensors; exemplars at the client.
    """

    paper = (
        'Douillard et al., "DyTox: Transformers for Continual Learning with DYnamic TOken '
        'eXpansion", CVPR 2022'
    )
    formulas = r"""
    $$z_c = w_c^\top \operatorname{norm}_i(e_i) + b_c, \quad
    e_i = \operatorname{TAB}(\theta_i, x), \quad c \in C_i$$

    $$L = (1 - \lambda) L_{bce} + \frac{\lambda}{C_{old}} \operatorname{KL}(q \,\Vert\, p)
    + \mu L_{div}$$

    $\lambda$ is the old classes' share of those seen; $q$ and $p$ are softmaxes, over the old
    classes, of the teacher's and the model's logits. $L_{div}$ is the binary cross-entropy of the
    divergence head.
    """
    dataset_options = {
        "digits": {"memory": 20, "lr": 5e-3, "lr_balanced": 5e-3}
    }  # learning rates are a guess, not tuned

    choice: Literal["herding", "raw", "residual", "first"] = option(
        "residual",
        "choice of exemplars: herding, on features of length 1; raw, on raw features; residual, "
        "the largest inner product with w, where w starts as the class mean and grows by mean "
        "minus chosen feature after each choice (released code); first, first images per class",
    )
    optimizer: OptimizerName = option("adamw", "optimizer of all that clients train")
    weight_decay: float = option(1e-6, "weight decay of all that clients train", low=0)
    lr: float = option(
        5e-4, "learning rate of block, tokens and classifiers", low=0, tune=(1e-5, 1e-2, "log")
    )
    lr_balanced: float = option(
        5e-5,
        "learning rate of block, tokens and classifiers in the last round, on exemplars only",
        low=0,
    )
    divergence: float = option(
        0.1,
        "mu, weight of the divergence head's loss; the head separates new classes from all old "
        "ones, which form one class",
        low=0,
    )
    tab_init: Literal["random", "last_block"] = option(
        "random",
        "initialisation of the task-attention block: random; last_block, the backbone's last "
        "block, without biases of q, k, v",
    )

    def training(self) -> Training:
        # Main phase: TAB, new token, new classifier and divergence head. Balanced fine-tuning, the
        # last round, on exemplars: TAB, all tokens and all classifiers.
        training = self.rehearsing(replace(self.tuning("tab.", "new."), inputs=("images",)))
        prefixes = ("tab.", "old.", "new.token", "new.norm", "new.weight", "new.bias")
        return replace(training, balanced=dict.fromkeys(prefixes, self.optim(self.lr_balanced)))

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        new = {f"new.{k}": v for k, v in init_task(task.size, backbone.token_dim, rng).items()}
        task_numbers = torch.full((task.size,), task.index)
        if not state:
            block = init_block(backbone.token_dim, 4 * backbone.token_dim, rng)
            block = block if self.tab_init == "random" else copy_block(backbone)
            old = {k.replace("new.", "old."): v[:0] for k, v in new.items()}
            return {**block, **old, **new, "owner": task_numbers, **self.start_plugs(backbone, rng)}
        # Task boundary: the teacher is the model before it grows. Freeze old tokens and old
        # classifiers; start a new token, classifier and divergence head.
        state = self.with_teacher(state, task, "full.", "lora.", "tab.", "old.", "new.", "owner")
        for name, value in select(state, "old.").items():
            state[name] = torch.cat([value, state[name.replace("old.", "new.")]])
        divergence = init_classifier(task.size + 1, backbone.token_dim, rng)
        state["owner"] = torch.cat([state["owner"], task_numbers.to(state["owner"])])
        return {**state, **new, **{f"new.divergence_{k}": v for k, v in divergence.items()}}

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # The teacher's logits over the old classes.
        teacher = strip_prefix(shared, "teacher.")
        return (
            self.logits(backbone, teacher, batch)
            if teacher
            else batch.query.new_empty(len(batch.y), 0)
        )

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # e_i = TAB(theta_i, x) for each task token; classifier i reads e_i. The first task and the
        # balanced fine-tuning have only the binary cross-entropy.
        model = {**ctx.shared, **train}
        embeddings = self.embeddings(backbone, model, batch)
        logits = task_logits(classifiers(model), embeddings, model["owner"])
        if ctx.task.index == 0 or ctx.balanced:
            return batch.mean(class_binary_cross_entropy(logits, batch.y)), {}
        classifier = {k.partition("_")[2]: v for k, v in select(model, "new.divergence_").items()}
        # Divergence head: c_t + 1 logits from the newest token's embedding.
        newest = torch.zeros(ctx.task.size + 1, dtype=torch.int64, device=logits.device)
        divergence_logits = task_logits(classifier, embeddings[:, -1:], newest)
        return batch.mean(
            self.grown(logits, divergence_logits, batch.teacher, batch.y, ctx.task)
        ), {}

    def grown(
        self, logits: Tensor, apart: Tensor, teacher: Tensor, labels: Tensor, task: Task
    ) -> Tensor:
        """Compute the loss of a later task: (1 - lambda) L_bce + lambda KD + mu L_div.

        Args:
            logits: Logits [B, C] over the classes seen.
            apart: Logits [B, c + 1] of the divergence head.
            teacher: Logits [B, o] of the teacher over the old classes.
            labels: Labels [B].
            task: The current task, with c classes.

        Returns:
            Losses [B].
        """
        old = task.start
        share = old / task.stop  # lambda
        log_p, log_q = logits[:, :old].log_softmax(-1), teacher[:, :old].log_softmax(-1)
        # KD: KL(q || p) / C_old at temperature 1, as in released code.
        teacher_loss = (log_q.exp() * (log_q - log_p)).mean(-1)
        # L_div: labels are 0 for all old classes, 1 .. c for the new ones.
        side = (labels - old + 1).clamp(min=0)
        class_loss = (1 - share) * class_binary_cross_entropy(logits, labels) + share * teacher_loss
        return class_loss + self.divergence * class_binary_cross_entropy(apart, side)

    def embeddings(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the embeddings e_i = TAB(theta_i, x) of all task tokens.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``tab.*`` and the tokens.
            batch: Images.

        Returns:
            Embeddings e [B, t, D].
        """
        tokens = torch.cat([tree["old.token"], tree["new.token"]])
        image = image_tokens(backbone, batch.x, select(tree, "full.", "lora."))
        return task_embeddings(tree, tokens, image, backbone.config.heads)

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute the concatenated embeddings of all tasks, the features for herding.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``tab.*`` and the tokens.
            batch: Images.

        Returns:
            Embeddings of all tasks [B, t D].
        """
        return self.embeddings(backbone, tree, batch).flatten(1)

    def logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute logits over the classes seen so far.

        Args:
            backbone: The frozen backbone.
            tree: Tree with block, tokens and classifiers of all tasks.
            batch: Images.

        Returns:
            Logits [B, C].
        """
        return task_logits(classifiers(tree), self.embeddings(backbone, tree, batch), tree["owner"])

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax over the classes seen, without the divergence head.
        return self.logits(backbone, state, batch)


def classifiers(tree: Mapping[str, Tensor]) -> Tree:
    """Concatenate the classifiers of all tasks.

    Args:
        tree: Tree with ``old.*`` of finished tasks and ``new.*`` of the current one.

    Returns:
        ``norm_weight``, ``norm_bias``, ``weight`` and ``bias`` of all tasks.
    """
    parts = ("norm_weight", "norm_bias", "weight", "bias")
    return {part: torch.cat([tree[f"old.{part}"], tree[f"new.{part}"]]) for part in parts}


def class_binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the binary cross-entropy of each image, mean over classes.

    Args:
        logits: Logits [B, C].
        labels: Labels [B].

    Returns:
        Losses [B].
    """
    hot = F.one_hot(labels, logits.shape[1]).to(logits)
    return F.binary_cross_entropy_with_logits(logits, hot, reduction="none").mean(-1)
