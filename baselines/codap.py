"""CODA-Prompt in federated learning: Continual Decomposed Attention-based Prompting.

Smith et al., CVPR 2023.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context, Task
from fczoo.functional.heads import PromptedHead, head_logits
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.prompts import component_weights
from fczoo.protocols.registry import use_protocol_options


def orthonormal(old: Tensor, draws: Tensor) -> Tensor:
    """Compute unit rows, orthogonal to each other and to the old rows.

    Args:
        old: Rows [n, D].
        draws: Random rows [m, D].

    Returns:
        Rows [m, D] from ``draws``.
    """
    # QR of old and new rows; the signs keep the direction of Gram-Schmidt.
    basis, scale = torch.linalg.qr(torch.cat([old, draws]).double().mT)
    rows: Tensor = (basis * scale.diagonal().sign()).mT[len(old) :]
    return rows.to(draws)


def gram_schmidt(old: Tensor, draws: Tensor) -> Tensor:
    """Compute unit rows by classical Gram-Schmidt, as in released code.

    From each draw it subtracts the projections on all earlier rows at once. If these rows are not
    orthogonal to each other, the result is not orthogonal to them.

    Args:
        old: Rows [n, D].
        draws: Random rows [m, D].

    Returns:
        Rows [m, D] from ``draws``.
    """
    rows = list(old)
    for draw in draws:
        projections = [(draw @ row) / (row @ row) * row for row in rows]
        rows.append(draw - torch.stack(projections).sum(0) if projections else draw)
    return F.normalize(torch.stack(rows[len(old) :]), dim=-1)


PARTS = ("prompt", "key", "attention")  # P, K, A


@register_method("codap")
@use_protocol_options("hgp", "codap")
@dataclass(frozen=True)
class CODAPrompt(PromptedHead):
    """Prefixes are weighted sums of components; the weights are cosines with component keys.

    The weight of a component is cos(q * A, K), with the image's frozen feature q, attention vector
    A and key K. Clients train and send the current task's components (prompt, key, attention) in
    each prompted block, and the linear head. Components of finished tasks are frozen and still
    contribute. The server draws new components, orthogonal to the old ones.
    """

    title = "CODA-P"
    paper = (
        'Smith et al., "CODA-Prompt: COntinual Decomposed Attention-based Prompting for '
        'Rehearsal-Free Continual Learning", CVPR 2023'
    )
    formulas = r"""
    $$P(x) = \sum_m \alpha_m P_m$$

    $$\alpha_m = \cos(q \odot A_m,\; K_m)$$

    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P)) \bigr)_y
    + \mu \sum_{X \in \{P, K, A\}} \operatorname{mean}\bigl( (X X^\top - I)^2 \bigr)$$
    """
    append_only = ("past.",)
    dataset_options = {"digits": {"lr": 1e-2, "components": 50}}

    components: int = option(
        100, "number M of components per block, divided evenly among the tasks", low=1
    )
    length: int = option(
        4,
        "length of each key prefix and each value prefix, half of the paper's L_p = 8, which "
        "counts both",
        low=1,
    )
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), "blocks with prefixes", low=0)
    lr: float = option(
        1e-3, "learning rate of components and head", low=0, tune=(1e-4, 1e-1, "log")
    )
    ortho: float = option(
        0.0,
        "mu, weight of the orthogonality penalty on prompts, keys and attentions (paper: 0.1; "
        "released code: 0)",
        low=0,
    )
    classical_gs: bool = option(
        False,
        "use classical Gram-Schmidt; training makes old rows no longer orthogonal to each other, "
        "so new rows are not orthogonal to them",
        quirk="GT-RIPL/CODA-Prompt",
    )

    def training(self) -> Training:
        # Client: Adam on the task's P, K, A and the head. Server: FedAvg of the same.
        optims = self.optims(self.optim(self.lr), "component.")
        return self.with_head_means(Training(optims, inputs=["images", "query"]))

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        share, dim = self.components // task.count, backbone.dim
        if not state:
            backbone.check_blocks(self.blocks, f"{self.name}.blocks")
            if not share > 0 or share * task.count > dim:
                reason = f"more than the {dim} dimensions of {backbone.config.name}"
                if not share:
                    reason = f"fewer than the {task.count} tasks"
                raise FczooError(
                    f"{self.name}.components is {self.components}, {reason}; "
                    f"change it with --set {self.name}.components=N"
                )
            state = self.start_head(task, dim, rng)
        # Task boundary: freeze the last task's components. The server draws new P, K and A for each
        # block by Gram-Schmidt: unit rows, orthogonal to each other and to all earlier rows.
        next_state = drop(state, "component.", "past.")
        for name in (f"{i}.{part}" for i in self.blocks for part in PARTS):
            task_components = [
                state[k] for k in (f"past.{name}", f"component.{name}") if k in state
            ]
            shape = (2 * self.length, backbone.token_dim) if name.endswith("prompt") else (dim,)
            old = torch.cat(task_components) if task_components else torch.empty(0, *shape)
            draws = torch.randn(share, *shape, generator=rng).to(old)
            orthogonalise = gram_schmidt if self.classical_gs else orthonormal
            fresh = orthogonalise(old.flatten(1), draws.flatten(1))
            next_state[f"component.{name}"] = fresh.view(share, *shape)
            if task_components:
                next_state[f"past.{name}"] = old
        return next_state

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # L = L_ce + mu sum_X mean((X X^T - I)^2), X in {P, K, A}. Components of finished tasks
        # contribute without gradient.
        tree = {**ctx.shared, **train}
        loss = task_cross_entropy(self._logits(backbone, tree, batch), batch, ctx.task)
        if self.ortho:
            loss = loss + self.ortho * self.orthogonality(tree)
        return loss, {}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: the components of all tasks so far, argmax over the classes seen.
        return self._logits(backbone, state, batch)[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, self.prefixes(tree, batch.query))

    def weights(self, tree: Tree, block: int, query: Tensor) -> Tensor:
        """Compute the weights alpha_m = cos(q * A_m, K_m) of the components so far.

        Args:
            tree: Tree with the components of finished and current tasks.
            block: Number of the block.
            query: Frozen features q [B, D].

        Returns:
            Weights [B, m].
        """
        return component_weights(
            query, self._rows(tree, block, "attention"), self._rows(tree, block, "key")
        )

    def prefixes(self, tree: Tree, query: Tensor) -> Tree:
        """Compute the prefixes of each image: P(x) = sum_m alpha_m P_m, block by block.

        Args:
            tree: Tree with the components of finished and current tasks.
            query: Frozen features q [B, D].

        Returns:
            ``prefix.{block}.k`` and ``prefix.{block}.v`` [B, length, D]: the first and the second
                half of the rows of P(x).
        """
        # P(x) = sum_m alpha_m P_m, split into the key prefix and the value prefix.
        plugs = {}
        for i in self.blocks:
            rows = torch.einsum(
                "bm,mld->bld", self.weights(tree, i, query), self._rows(tree, i, "prompt")
            )
            plugs[f"prefix.{i}.k"], plugs[f"prefix.{i}.v"] = rows.split(self.length, 1)
        return plugs

    def orthogonality(self, tree: Tree) -> Tensor:
        """Compute the orthogonality penalty: mean((X X^T - I)^2), summed over blocks and P, K, A.

        The rows of X are the components so far.

        Args:
            tree: Tree with the components of finished and current tasks.

        Returns:
            The penalty, a scalar.
        """
        terms = []
        for i in self.blocks:
            for part in PARTS:
                rows = self._rows(tree, i, part).flatten(1)
                identity = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
                terms.append((rows @ rows.mT - identity).square().mean())
        return torch.stack(terms).sum()

    def _rows(self, tree: Tree, block: int, part: str) -> Tensor:
        names = (f"past.{block}.{part}", f"component.{block}.{part}")
        return torch.cat([tree[k] for k in names if k in tree])

    def _logits(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return head_logits(tree, self.features(backbone, tree, batch))
