"""MFCL: A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated Class-IL.

Babakniya et al., NeurIPS 2023.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._data_free_replay import DataFreeReplay, Moments, Reply, enlarge
from fczoo.baselines._mfcl_generator import (
    GeneratorConfig,
    mfcl_generator,
    mfcl_images,
    standard_normal,
    train_generator,
)
from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, select, strip_prefix
from fczoo.core.types import Batch, Context, Evidence, Finding, ServerContext, Task
from fczoo.functional.heads import head_logits
from fczoo.functional.losses import task_cross_entropy

DIAGNOSED = 256  # generated images that a diagnosis counts


@register_method("mfcl")
@dataclass(frozen=True)
class MFCL(DataFreeReplay):
    """The server trains an image generator on the old model; clients replay its images.

    Clients train and send the linear head and, depending on ``tune``, LoRA pairs or all weights.
    The server sends to clients once per task the generator and the old model. Memory beyond the
    model: both of them. No image and no statistic of a client is kept.

    One generator is trained over the whole run: after each task the server trains it further,
    towards images that the model of this task classifies with certainty. Source: the released code,
    not the paper's text. A vision transformer has no BatchNorm statistics to match, from which a
    generator learns most about the look of images. Without them (``prior=none``) balance and
    smoothness shape the images. The feature term does not need good images, as it also covers the
    new ones.
    """

    paper = (
        'Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated '
        'Class Incremental Learning for Vision Tasks", NeurIPS 2023, arXiv 2311.07784'
    )
    formulas = r"""
    With new images $x$, generated ones $\tilde x$ and both of them $X$; labels of $\tilde x$ are
    the old model's predictions:

    $$L = L_{ce}(z_{new}(x)) + w_{head} \, L_{ce}(W \, sg(f(X)) + b)
    + w_{feat} \, \overline{\lVert W_{old} f(X) - W_{old} f_{old}(X) \rVert^2} / |old|$$

    The server trains the generator for

    $$L_G = L_{ce}(z / T, \operatorname{argmax} z) + 1 - H(\bar p) / \log C
    + w_{smooth} \, \overline{(\tilde x - blur(\tilde x))^2}
    + w_{prior} \, \overline{KL(layer)}$$
    """
    dataset_options = {
        "digits": {  # for speed
            "noise": 100,
            "width": 16,
            "ratio": 1,
            "generator_batch": 32,
        }
    }

    ratio: int = option(
        4,
        "generated images per real image of a batch (released code: 128 for 32); 0: no replay",
        low=0,
    )
    weight_head: float = option(1.0, "w_head, weight of the head's loss on all images", low=0)
    weight_feature: float = option(
        0.1,
        "w_feat, weight of the feature distance under the old head",
        low=0,
        tune=(0.01, 10, "log"),
    )
    noise: int = option(1000, "length of the noise vector of an image", low=1)
    width: int = option(64, "channels of the generator's last hidden layer", low=1)
    generator_steps: int = option(100, "training steps of the generator after each task", low=0)
    generator_batch: int = option(128, "images per training step of the generator", low=2)
    lr_generator: float = option(1e-3, "learning rate of the generator, Adam", low=0)
    content: float = option(1.0, "generator loss: weight of certainty L_ce(z/T, argmax z)", low=0)
    content_temperature: float = option(1000.0, "generator loss: T in the certainty term", low=1e-6)
    entropy: float = option(1.0, "generator loss: weight of the class balance", low=0)
    smooth: float = option(1e-3, "generator loss: w_smooth, weight of the smoothness", low=0)
    prior_weight: float = option(
        50.0, "generator loss: w_prior, weight of activation moments, with prior=survey", low=0
    )

    def training(self) -> Training:
        # Each image of a batch brings the noise of ``ratio`` replayed images.
        return replace(super().training(), draws=self.ratio * self.noise)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: the server broadcasts the old model with its head, and the generator.
        state = self.with_teacher(super().begin_task(state, task, backbone, rng), task)
        if self.ratio and task.index and not select(state, "generator."):  # no client responded
            state |= self._named(mfcl_generator(self.noise, self.width, self.side, rng))
        return state

    def synthesise(self, state: Tree, prior: Sequence[Moments], ctx: ServerContext) -> Tree:
        # Server, end of a task: train the generator further, with the new global model as teacher.
        if not self.ratio:
            return {}
        model = self.trained_part(state)

        def teacher(images: Tensor) -> Reply:
            return self.reply(ctx.backbone, model, images, ctx.task.stop)

        start = strip_prefix(state, "generator.")
        if not start:
            start = mfcl_generator(self.noise, self.width, self.side, ctx.rng)
            start = {k: v.to(state["head.weight"]) for k, v in start.items()}
        config = GeneratorConfig(
            **{field.name: getattr(self, field.name) for field in fields(GeneratorConfig)}
        )
        return self._named(train_generator(start, config, teacher, prior, self.side, ctx.rng))

    @staticmethod
    def _named(generator: Tree) -> Tree:
        return {f"generator.{name}": value for name, value in generator.items()}

    def teacher_outputs(self, backbone: Backbone, shared: Tree, batch: Batch, task: Task) -> Tensor:
        # f_old(x): the old model's features of the client's own images.
        model = strip_prefix(shared, "teacher.")
        return (
            self.features(backbone, model, batch)
            if model
            else batch.query.new_empty(len(batch.y), 0)
        )

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # First task: cross-entropy. Later tasks: three terms on new images x and replayed ones x~.
        features = self.features(backbone, train, batch)
        if ctx.task.index == 0:  # first task: cross-entropy
            return task_cross_entropy(head_logits(train, features), batch, ctx.task), {}
        old = strip_prefix(ctx.shared, "teacher.")
        replay_features, old_replay_features = self.replay_features(backbone, train, batch, ctx)
        joint = batch._replace(w=torch.cat([batch.w, batch.w.repeat_interleave(self.ratio)]))
        return self.client_loss(
            train,
            old,
            batch,
            joint,
            torch.cat([features, replay_features]),
            torch.cat([batch.teacher, old_replay_features]),
            ctx.task,
        ), {}

    def replay_features(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        """Compute features [R, D] of generated images under the client's and the old model."""
        if not self.ratio:
            return batch.teacher[:0], batch.teacher[:0]
        # Replay: x~ = G(z) with z ~ N(0, I), and G in eval mode.
        noise = standard_normal(batch.draws).view(-1, self.noise)
        generator = strip_prefix(ctx.shared, "generator.")
        images = enlarge(mfcl_images(generator, noise, self.side), backbone.config.image_size)
        features = backbone(images, select(train, "full.", "lora."))
        with torch.no_grad():
            old = select(strip_prefix(ctx.shared, "teacher."), "full.", "lora.")
            return features, backbone(images, old)

    def client_loss(
        self,
        train: Tree,
        old: Tree,
        batch: Batch,
        joint: Batch,
        features: Tensor,
        old_features: Tensor,
        task: Task,
    ) -> Tensor:
        """Compute the loss of a later task: cross-entropy, head term and feature term.

        Args:
            train: Head of the client.
            old: Head of the old model.
            batch: The client's B images.
            joint: Weights of the B + R images, the R generated ones last.
            features: Features [B + R, D] under the client's model.
            old_features: Features [B + R, D] under the old model.
            task: The current task.
        """
        new, old_classes = len(batch.y), task.start
        # First term: cross-entropy of new images over the new classes.
        loss = task_cross_entropy(head_logits(train, features[:new]), batch, task)
        # Second term, w_head: cross-entropy of all images over the classes seen. Generated images
        # have the old model's predictions as labels. The gradient stops at the features.
        answers = head_logits(old, old_features[new:])[:, :old_classes].argmax(1)
        logits = head_logits(train, features.detach())[:, : task.stop]
        labels = torch.cat([batch.y, answers])
        head_loss = joint.mean(F.cross_entropy(logits, labels, reduction="none"))
        # Third term, w_feat: |W_old f(X) - W_old f_old(X)|^2 / |old|, mean over all images.
        difference = (features - old_features) @ old["head.weight"][:old_classes].mT
        feature_loss = joint.mean(difference.square().mean(1))
        return loss + self.weight_head * head_loss + self.weight_feature * feature_loss

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        """Count the generated images per predicted class as a task ends."""
        state, classes = evidence.state, evidence.task.stop
        generator = strip_prefix(state, "generator.")
        if evidence.payloads or not generator:
            return {}
        noise = torch.randn(DIAGNOSED, self.noise, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            images = mfcl_images(generator, noise.to(state["head.weight"]), self.side)
            reply = self.reply(evidence.backbone, state, images, classes)
        counts = torch.bincount(reply.logits.argmax(1), minlength=classes)
        return {"generated images per class": {"counts": counts.tolist()}}
