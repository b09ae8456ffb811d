"""AF-FCL: Accurate Forgetting for Heterogeneous Federated Continual Learning.

Wuerkaixi et al., ICLR 2024.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._affcl_flow import (
    credibility,
    decode,
    encode,
    linear_layer,
    mix_rows,
    start_flow,
)
from fczoo.baselines._tuned_backbone import TunedBackbone
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, strip_prefix
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.gaussians import moment_sums
from fczoo.functional.losses import distillation

NOISE_ROWS = 1024  # standard normal vectors, of which each sample mixes two
TEMPERATURE = 2.0  # of both softmaxes in the distillation of outputs


@register_method("affcl")
@dataclass(frozen=True)
class AFFCL(TunedBackbone):
    """A normalising flow replays features, weighted by their credibility at the client.

    Clients train and send the flow, two hidden layers, the classifier and, depending on ``tune``,
    all weights or LoRA pairs. At the start of the run they send, once, count, sum and squares of
    each class's features, from which the server computes the scale of the features. Memory beyond
    the model: the last task's model and flow, and the noise from which features are generated. No
    image is stored. Sources: the released code and the paper's abstract, not its text.
    """

    title = "AF-FCL"
    paper = (
        'Wuerkaixi et al., "Accurate Forgetting for Heterogeneous Federated Continual Learning", '
        "ICLR 2024, arXiv 2502.14205"
    )
    formulas = r"""
    The flow $g$, with the feature $x$, the class $y$ and features $\tilde x$ of the last flow:

    $$L_g = -\overline{\log p_g(x \mid y)} - k_{last} \overline{\log p_g(\tilde x \mid \tilde y)}$$

    Loss $L_r$ of replayed features, which trains only the second hidden layer of the head, and loss
    $L$ of the client's data:

    $$L_r = k_{loss} \bigl( ((1 - \theta) q + \theta) \, \overline{w \, L_{ce}(\tilde x, \tilde y)}
    + k_{out} k_{kd} \, L_{kd}(\tilde x) \bigr)$$

    $$L = L_{ce}(x, y) + k_{kd} \bigl( k_{feat} \overline{(x_{last} - x)^2}
    + k_{out} L_{kd}(x) \bigr)$$

    $q$ is the mean density of the client's features per dimension; $w$ is the density of $\tilde x$
    in the flow's space, under a Gaussian of the client's features of class $\tilde y$ there.
    """

    tune: Literal["full", "lora", "head"] = option(
        "head",
        "tensors trained in the backbone, below the hidden layers: full, all weights; lora, LoRA "
        "pairs; head, none",
    )
    lr_flow: float = option(1e-3, "learning rate of the flow", low=0, tune=(1e-5, 1e-2, "log"))
    hidden: int = option(512, "width of both hidden layers", low=1)
    flow_hidden: int = option(128, "width of the flow's layers (released code: 512)", low=1)
    k_loss: float = option(0.5, "weight of the replay loss L_r", low=0)
    k_last: float = option(0.1, "weight of features from the last flow in the flow's loss", low=0)
    theta: float = option(
        0.1,
        "share of the replay loss that is not multiplied by q, the density of the client's "
        "features; w always applies",
        low=0,
        high=1,
    )
    k_kd: float = option(0.2, "weight of the distillation from the last task's model", low=0)
    k_feature: float = option(0.5, "factor on k_kd for features (no effect with tune=head)", low=0)
    k_output: float = option(0.1, "factor on k_kd for outputs", low=0)
    space: Literal["latent", "feature", "mixed"] = option(
        "latent",
        "what w compares: latent, codes of replayed features with codes of local features; "
        "feature, the features themselves; mixed, replayed features with local codes",
        quirk={"mixed": "zaocan666/AF-FCL"},
    )
    standardise: bool = option(
        True,
        "standardise each feature dimension to mean 0 and variance 1 over the first task's images",
    )

    def training(self) -> Training:
        # Trained and averaged: flow, hidden layers and classifier. The scale of the features is
        # measured once, before the first round.
        training = self.tuning("classifier.", "flow.")
        optims = {**training.optims, "flow.": self.optim(self.lr_flow)}
        uploads = {"class.": per_class("count", "sum", "squares")} if self.standardise else {}
        phases: set[TaskPhase] = {"task_start"} if self.standardise else set()
        training = replace(training, optims=optims, uploads=uploads, draws=6)
        return replace(training, collect_at=phases, collect_in="first")

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: model and flow at the end of the last task become the last model and flow.
        dim, classes = backbone.dim, task.classes
        state = state or {
            **linear_layer("classifier.fc1", dim, self.hidden, rng),
            **linear_layer("classifier.fc2", self.hidden, self.hidden, rng),
            **linear_layer("classifier.out", self.hidden, classes, rng),
            **start_flow(dim, classes, self.flow_hidden, rng),
            **self.start_plugs(backbone, rng),
            "scale.mean": torch.zeros(dim),
            "scale.std": torch.ones(dim),
        }
        noise = torch.randn(NOISE_ROWS, dim, generator=rng)
        return {**self.with_teacher(state, task), "noise": noise}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Client, before the first round: n, sum x and sum x^2 per class, for the scale.
        return moment_sums(self.features(backbone, tree, batch), batch, ctx.task)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Set mean and standard deviation of the features over the first task's images.

        Args:
            phase: ``task_start``.
            state: Current state.
            sums: ``class.count`` [c], ``class.sum`` and ``class.squares`` [c, D].
            ctx: Server context.

        Returns:
            The state with ``scale.mean`` and ``scale.std`` [D].
        """
        count = sums["class.count"].sum().clamp(min=1)
        mean = sums["class.sum"].sum(0) / count
        variance = sums["class.squares"].sum(0) / count - mean.square()
        std = variance.clamp(min=1e-8).sqrt()
        return {**state, "scale.mean": mean.float(), "scale.std": std.float()}

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # x_last: features of the last model.
        last = strip_prefix(shared, "teacher.")
        if not last:
            return batch.query.new_empty(len(batch.y), 0)
        return self.scaled_features(backbone, {**shared, **last}, shared, batch)

    def scaled_features(self, backbone: Backbone, tree: Tree, shared: Tree, batch: Batch) -> Tensor:
        """Compute features x [B, D], standardised by the mean and deviation of the first task."""
        features = self.features(backbone, tree, batch)
        return (features - shared["scale.mean"]) / shared["scale.std"]

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L_g + L_r + L. L_g trains the flow, L_r the layer fc2, L all but the flow. The released
        # code takes three optimizer steps per batch; here one step minimises the sum.
        features = self.scaled_features(backbone, train, ctx.shared, batch)
        flow_loss = self.flow_loss(train, features.detach(), batch, ctx)
        replay_loss = self.replay_loss(train, features.detach(), batch, ctx)
        data_loss = self.data_loss(train, features, batch, strip_prefix(ctx.shared, "teacher."))
        return flow_loss + replay_loss + data_loss, {}

    def flow_loss(self, train: Tree, features: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """Compute L_g on the client's features [B, D] and on features drawn from the last flow."""
        order, last = ctx.shared["permutation"], strip_prefix(ctx.shared, "teacher.")
        hot = F.one_hot(batch.y, ctx.task.classes).to(features)
        loss = -batch.mean(encode(train, order, features, hot)[1])  # L_g, first term
        if last:  # L_g, second term: labels are uniform over the classes of earlier tasks
            labels = (batch.draws[:, 0] * ctx.task.start).long()
            replay_hot = F.one_hot(labels, ctx.task.classes).to(features)
            codes = mix_rows(ctx.shared["noise"], batch.draws[:, 1:3])
            points = decode(last, order, codes, replay_hot)
            loss = loss - self.k_last * batch.mean(encode(train, order, points, replay_hot)[1])
        return loss

    def replay_loss(self, train: Tree, features: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """Compute L_r on features drawn from the current flow; only fc2 gets a gradient."""
        order, last = ctx.shared["permutation"], strip_prefix(ctx.shared, "teacher.")
        detached_tensors = {name: value.detach() for name, value in train.items()}
        # Replay: labels uniform over all classes seen, new ones included; x~ from the current flow.
        labels = (batch.draws[:, 3] * ctx.task.stop).long()
        codes = mix_rows(ctx.shared["noise"], batch.draws[:, 4:6])
        points = decode(
            detached_tensors, order, codes, F.one_hot(labels, ctx.task.classes).to(features)
        )
        # Credibility: q of the batch, and w of each replayed feature.
        hot = F.one_hot(batch.y, ctx.task.classes).to(features) * batch.w[:, None]
        weight, q = credibility(
            detached_tensors, order, features, hot, (codes, points, labels), self.space
        )
        learns = {k: v if k.startswith("classifier.fc2.") else v.detach() for k, v in train.items()}
        logits = head_outputs(learns, points)
        entropy = F.cross_entropy(logits, labels, reduction="none")
        # ((1 - theta) q + theta) mean(w L_ce(x~, y~)); theta = 1 and w = 1 give plain replay. Then
        # k_out k_kd L_kd(x~), the distillation of the last model's outputs.
        loss = ((1 - self.theta) * q + self.theta) * batch.mean(weight * entropy)
        if last:
            output_loss = distillation(logits, head_outputs(last, points), TEMPERATURE)
            loss = loss + self.k_output * self.k_kd * batch.mean(output_loss)
        return self.k_loss * loss

    def data_loss(self, train: Tree, features: Tensor, batch: Batch, last: Tree) -> Tensor:
        """Compute L: cross-entropy over all classes of the run + distillation of the last model.

        Args:
            train: The client's trained tensors.
            features: Features [B, D].
            batch: Labels and weights; ``teacher`` has the last model's features.
            last: Tensors of the last model; empty in the first task.
        """
        # L = L_ce(x, y) + k_kd (k_feat mean (x_last - x)^2 + k_out L_kd(x)).
        logits = head_outputs(train, features)
        loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        if last:
            feature_loss = (batch.teacher - features).square().mean(1)
            output_loss = distillation(logits, head_outputs(last, batch.teacher), TEMPERATURE)
            loss = loss + self.k_kd * batch.mean(
                self.k_feature * feature_loss + self.k_output * output_loss
            )
        return loss

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax over the classes seen (released code: all classes of the run).
        features = self.scaled_features(backbone, state, state, batch)
        return head_outputs(state, features)[:, : task.stop]


def head_outputs(head: Tree, features: Tensor) -> Tensor:
    """Compute logits [B, C] of features [B, D] through the hidden layers in ``head``."""
    for name in ("classifier.fc1", "classifier.fc2"):
        if f"{name}.weight" in head:
            rows = F.linear(features, head[f"{name}.weight"], head[f"{name}.bias"])
            features = F.leaky_relu(rows)
    return F.linear(features, head["classifier.out.weight"], head["classifier.out.bias"])
