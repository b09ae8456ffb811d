"""L2P in federated learning: Learning to Prompt for Continual Learning. Wang et al., CVPR 2022."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, Evidence, Finding, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.heads import head_logits
from fczoo.functional.lora import lora_pairs
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.prompts import PromptPool, choice_shares, gather_prompts, top_positions
from fczoo.protocols.registry import use_protocol_options


@register_method("l2p")
@use_protocol_options("hgp", "l2p")
@dataclass(frozen=True)
class L2P(PromptPool):
    """A pool of input prompts; each image selects those with keys nearest to its frozen feature.

    Clients train and send the prompt pool with its keys, and the linear head. The server averages
    slot by slot, although a slot need not have the same meaning at two clients (FCILPT sorts the
    slots first). Slots that no client selects do not change.
    """

    paper = 'Wang et al., "Learning to Prompt for Continual Learning", CVPR 2022'
    formulas = r"""
    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; P_{K(x)})) \bigr)_y
    - \lambda \sum_{i \in K(x)} \cos(q, k_i)$$

    $K(x)$ are the $N$ prompts whose keys $k_i$ are nearest to the frozen feature $q$.
    """
    dataset_options = {"digits": {"lr": 3e-2}}

    lr: float = option(
        1.875e-3,
        "learning rate, Adam (original code: 0.03 * batch size / 256, here for batches of 16)",
        low=0,
        tune=(1e-4, 1e-1, "log"),
    )
    clip: float | None = option(
        1.0, "maximum norm of a client's gradient; none: no clipping", low=0
    )
    pull: float = option(
        0.1, "lambda, weight of the cosine between the query and the selected keys", low=0
    )
    selection: Literal["image", "batch"] = option(
        "image",
        "prompt selection: image, for each image; batch, by vote for each batch, also in testing "
        "(original code)",
    )
    pooled: Literal["prompt", "cls+prompt", "cls"] = option(
        "prompt",
        "input of the head: prompt, mean output of the prompts; cls+prompt, mean of these and the "
        "class token (HGP); cls, class token",
        tune=["prompt", "cls"],
    )
    positions: Literal["random", "zeros"] = option(
        "random", "fixed position embeddings of the prompts: random, N(0, 0.02^2); zeros, none"
    )
    lora: bool = option(False, "also train LoRA pairs on q and v, as in PILoRA's comparison")
    lr_lora: float = option(1e-5, "learning rate of the LoRA pairs, with lora=on", low=0)
    rank: int = option(4, "LoRA rank, with lora=on", low=1)
    blocks: tuple[int, ...] = option((0,), "blocks with LoRA pairs, with lora=on", low=0)
    no_key_loss: bool = option(
        False, "omit the key loss: keys keep their random initial values", quirk="fed-mammoth"
    )
    shifted_positions: bool = option(
        False,
        "add position embeddings after inserting the prompts, in the order prompts, class token, "
        "although the tokens are in the order class token, prompts",
        quirk="fed-mammoth",
    )

    def training(self) -> Training:
        # Client: Adam on prompts, keys and head. Server: FedAvg, slot by slot.
        optims = self.optims(self.optim(self.lr), "pool.")
        if self.lora:
            optims["lora."] = self.optim(self.lr_lora)
        training = Training(optims, inputs=["images", "query"], clip_norm=self.clip)
        return self.with_head_means(training)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Task boundary: all tasks share the pool; nothing is frozen or reset.
        if state:
            return state
        backbone.check_pool(self.pooled)
        if self.shifted_positions and backbone.config.position != "all":
            raise FczooError(
                f"l2p.shifted_positions moves the class token's position row, and "
                f"{backbone.config.name} has none; leave it out"
            )
        # Start of the run: prompts and keys from U(-1, 1); position rows, which are never trained.
        rows = torch.zeros(self.chosen * self.length, backbone.token_dim)
        start = {
            **self.start_pool(backbone, -1, 1, rng),
            "position": rows.normal_(0, 0.02, generator=rng)
            if self.positions == "random"
            else rows,
            **self.start_head(task, backbone.dim, rng),
        }
        pairs = lora_pairs(backbone, self.blocks, self.rank, rng, "l2p.blocks") if self.lora else {}
        return {**start, **pairs}

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # First term: cross-entropy over the task's classes under the chosen prompts.
        similarity, chosen = self.choose(train, batch)
        logits = self._logits(backbone, {**ctx.shared, **train}, batch, chosen)
        loss = task_cross_entropy(logits, batch, ctx.task)
        if self.no_key_loss:
            return loss, {}
        # Key term: -lambda sum_i cos(q, k_i) over the chosen keys, mean over images. Other keys get
        # no gradient.
        return loss - self.pull * batch.mean(similarity.gather(1, chosen).sum(-1)), {}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: query pass, prompt choice, prompted pass, argmax over the classes seen.
        return self._logits(backbone, state, batch, self.choose(state, batch)[1])[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        return self._features(backbone, tree, batch, self.choose(tree, batch)[1])

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        return choice_shares(
            evidence, lambda batch: self.choose(evidence.state, batch)[1], self.size
        )

    def choose(self, tree: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """Choose the prompts of each image: the N keys nearest to its query.

        Args:
            tree: Tree with ``pool.key`` [M, D].
            batch: Queries [B, D], and weights for the vote.

        Returns:
            Cosines with all keys [B, M] and numbers of the chosen prompts [B, N].
        """
        # Query q: the frozen feature without prompts. Take the N keys with the largest cosine.
        similarity = cosines(batch.query, tree["pool.key"])
        chosen = top_positions(similarity, self.chosen)
        # Original code: one choice per batch, the N prompts that most images choose.
        if self.selection == "batch":
            votes = (F.one_hot(chosen, self.size).sum(1) * batch.w[:, None]).sum(0)
            chosen = top_positions(votes, self.chosen).expand(len(batch.query), -1)
        return similarity, chosen

    def prompts(self, tree: Tree, chosen: Tensor) -> Tensor:
        """Gather the prompt tokens of each image, in the order of choice.

        Args:
            tree: Tree with ``pool.prompt`` [M, L_p, D] and ``position`` [N L_p, D].
            chosen: Numbers of the chosen prompts [B, N].

        Returns:
            Tokens [B, N L_p, D].
        """
        return gather_prompts(tree["pool.prompt"], chosen).flatten(1, 2) + tree["position"]

    def _logits(self, backbone: Backbone, tree: Tree, batch: Batch, chosen: Tensor) -> Tensor:
        return head_logits(tree, self._features(backbone, tree, batch, chosen))

    def _features(self, backbone: Backbone, tree: Tree, batch: Batch, chosen: Tensor) -> Tensor:
        # Prompt tuning at the input: prompts join the tokens of the first block.
        plugs = {"tokens": self.prompts(tree, chosen), **select(tree, "lora.")}
        if self.shifted_positions:
            token, rows = backbone.weights["cls_token"], backbone.weights["pos_embed"]
            first, after = tree["position"][:1], torch.cat([tree["position"][1:], rows[0, :1]])
            plugs["tokens"] = plugs["tokens"] - tree["position"] + after
            # The forward pass adds the class token's row again, so subtract it here.
            plugs["full.cls_token"] = token + first - rows[:, :1]
        return backbone(batch.x, plugs, pool=self.pooled)
