"""FOT: Federated Orthogonal Training. Bakman et al., ICLR 2024."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fczoo.core.backbone import LAYERS, Backbone
from fczoo.core.options import option
from fczoo.core.payload import whole_tensors
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.heads import LinearHead, head_logits
from fczoo.functional.input_subspaces import extend_basis, layer_grams, remove_subspace, unpack_gram
from fczoo.functional.losses import task_cross_entropy


@register_method("fot")
@dataclass(frozen=True)
class FOT(LinearHead):
    """The server projects updates so that outputs for earlier tasks' inputs do not change.

    Clients train and send all weights and the linear head. After each task they send once the Gram
    matrices of the inputs of the blocks' linear layers, from which the server computes the subspace
    of the inputs. The paper's random sketches estimate the same subspace and are larger. Updates of
    biases, norms, the embedding and the head are not projected. In the paper the task of a test
    image is given; here predictions are over all classes seen.
    """

    paper = (
        'Bakman et al., "Federated Orthogonal Training: Mitigating Global Catastrophic Forgetting '
        'in Continual Federated Learning", ICLR 2024, arXiv 2309.01289'
    )
    formulas = r"""
    $$\Delta W \leftarrow \Delta W (I - U U^\top)$$

    The span of $U$ holds a share of the energy of the layer's inputs in earlier tasks.
    """
    server_only: ClassVar[tuple[str, ...]] = ("basis.",)

    threshold: float = option(
        0.87,
        "share of the inputs' energy inside the protected subspace, in the first task",
        low=0,
        high=1,
    )
    growth: float = option(
        0.001, "increase per task of the share of energy (threshold)", low=0, high=1
    )
    lr: float = option(1e-2, "learning rate of the head", low=0, tune=(1e-4, 1e-1, "log"))
    lr_backbone: float = option(
        1e-4, "learning rate of all weights below the head", low=0, tune=(1e-6, 1e-3, "log")
    )

    def training(self) -> Training:
        optims = {"head.": self.optim(self.lr), "full.": self.optim(self.lr_backbone)}
        uploads = {"gram.": whole_tensors("second moments")}
        return self.with_head_means(
            Training(optims, uploads=uploads, averaging="uniform", collect_at={"task_end"})
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        return state or {**self.start_head(task, backbone.dim, rng), **backbone.full_weights()}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Client: L_ce on all weights, without a constraint.
        logits = head_logits(train, self.features(backbone, train, batch))
        return task_cross_entropy(logits, batch, ctx.task), {}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features under the trained weights.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``full.*``.
            batch: Images.

        Returns:
            Features [B, D].
        """
        return backbone(batch.x, select(tree, "full."))

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if phase == "task_start":
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, as the task ends, under the final global model: G = X X^T of each layer's inputs,
        # instead of the paper's random sketches (I - U U^T) X Omega.
        layers = [f"blocks.{i}.{layer}" for i in range(backbone.depth) for layer in LAYERS]
        _, inputs = backbone.features_and_taps(batch.x, layers, select(tree, "full."))
        return layer_grams(inputs, batch.w, gamma=1.0)

    def server_update(self, state: Tree, merged: Tree, ctx: ServerContext) -> Tree:
        # Server, each round: dW <- dW (I - U U^T) for weights with a basis; not for others.
        merged = dict(merged)
        for name, basis in select(state, "basis.").items():
            weight = name.replace("basis.", "full.") + ".weight"
            merged[weight] = state[weight] + remove_subspace(merged[weight] - state[weight], basis)
        return {**state, **merged}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if phase == "task_start":
            return super().update_from(phase, state, sums, ctx)
        # Server, task end: extend U by the leading directions outside it, at least one, until it
        # holds the threshold's share of the energy. The threshold grows with the tasks.
        state, threshold = dict(state), min(self.threshold + self.growth * ctx.task.index, 1.0)
        for name, gram in select(sums, "gram.").items():
            layer = name.removeprefix("gram.")
            size = state[f"full.{layer}.weight"].shape[1]
            basis = state.get(f"basis.{layer}", gram.new_zeros(size, 0))
            state[f"basis.{layer}"] = extend_basis(
                basis, unpack_gram(gram, size), threshold, least=1
            )
        return state

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: argmax over the classes seen; in the paper the task of a test image is given.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]
