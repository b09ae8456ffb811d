"""CODA-Prompt in federated learning: Continual Decomposed Attention-based Prompting.

Smith et al., CVPR 2023.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Context, Task, Training
from fczoo.functional.heads import PromptedHead, head_logits
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.orthogonal import gram_schmidt, orthonormal
from fczoo.functional.prompts import component_weights

PARTS = ("prompt", "key", "attention")  # P, K, A


@register_method("codap")
@dataclass(frozen=True)
class CODAPrompt(PromptedHead):
    """Prefixes are sums of components, weighted by how well the frozen feature fits each component's key.

    Trained and sent: the current task's components (prompt, key, attention) in each prompted block, and the
    linear head. Components of finished tasks are frozen and go on contributing. New ones are drawn by the
    server, orthogonal to the old.
    """

    paper = "Smith et al., CVPR 2023"
    formulas = r"""
    $$P(x) = \sum_m \alpha_m P_m$$

    $$\alpha_m = \cos(q \odot A_m,\; K_m)$$

    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P)) \bigr)_y
    + \mu \sum_{X \in \{P, K, A\}} \operatorname{mean}\bigl( (X X^\top - I)^2 \bigr)$$
    """
    frozen = ("past.",)
    tuned = {
        "digits": {"lr": 1e-2, "components": 50},
        "imagenet_a": {"lr": 1e-2},
        "cars196": {"lr": 3e-2},
    }

    components: int = option(100, "components M of a block, shared out evenly over the tasks", low=1)
    length: int = option(4, "rows of each key and each value prefix; a component holds both (L_p = 8)", low=1)
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), "blocks with prefixes", low=0)
    lr: float = option(1e-3, "learning rate, Adam", low=0, tune=(1e-4, 1e-1, "log"))
    ortho: float = option(
        0.0,
        "mu, weight of the orthogonality of prompts, keys and attentions (paper: 0.1; released code: 0)",
        low=0,
    )
    classical_gs: bool = option(
        False,
        "classical Gram-Schmidt against trained rows, which leaves new rows not orthogonal to them",
        quirk="GT-RIPL/CODA-Prompt",
    )

    def training(self) -> Training:
        optims = self.optims(self.optim(self.lr), "component.")
        return Training(optims, inputs=["images", "query"], uploads=self.head_uploads())

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
        moved = drop(state, "component.", "past.")
        for name in (f"{i}.{part}" for i in self.blocks for part in PARTS):
            finished = [state[k] for k in (f"past.{name}", f"component.{name}") if k in state]
            shape = (2 * self.length, dim) if name.endswith("prompt") else (dim,)
            old = torch.cat(finished) if finished else torch.empty(0, *shape)
            draws = torch.randn(share, *shape, generator=rng).to(old)
            orthogonalise = gram_schmidt if self.classical_gs else orthonormal
            fresh = orthogonalise(old.flatten(1), draws.flatten(1))
            moved[f"component.{name}"] = fresh.view(share, *shape)
            if finished:
                moved[f"past.{name}"] = old
        return moved

    def loss(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        tree = {**ctx.shared, **train}
        loss = task_cross_entropy(self._logits(backbone, tree, batch), batch, ctx.task)
        if self.ortho:
            loss = loss + self.ortho * self.orthogonality(tree)
        return loss, {}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return self._logits(backbone, state, batch)[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return backbone(batch.x, self.prefixes(tree, batch.query))

    def weights(self, tree: Tree, block: int, query: Tensor) -> Tensor:
        """Weights alpha [B, m] of the m components so far, for queries q [B, D]."""
        return component_weights(query, self._rows(tree, block, "attention"), self._rows(tree, block, "key"))

    def prefixes(self, tree: Tree, query: Tensor) -> Tree:
        """Key and value prefixes of each image and block, [B, length, D]."""
        plugs = {}
        for i in self.blocks:
            rows = torch.einsum("bm,mld->bld", self.weights(tree, i, query), self._rows(tree, i, "prompt"))
            plugs[f"prefix.{i}.k"], plugs[f"prefix.{i}.v"] = rows.split(self.length, 1)
        return plugs

    def orthogonality(self, tree: Tree) -> Tensor:
        """Sum over blocks and parts of mean((X X^T - I)^2), X the components so far as rows."""
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
