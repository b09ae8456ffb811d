"""DualPrompt in federated learning: Complementary Prompting for Rehearsal-free Continual Learning.

Wang et al., ECCV 2022.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree, drop, select, stack_past
from fczoo.core.types import Batch, Context, Evidence, Finding, Task
from fczoo.functional.cosine import cosines
from fczoo.functional.heads import PromptedHead, head_logits
from fczoo.functional.losses import task_cross_entropy
from fczoo.functional.prompts import choice_shares, reshape_prefixes, top_positions
from fczoo.protocols.registry import use_protocol_options


@register_method("dualprompt")
@use_protocol_options("hgp", "dualprompt")
@dataclass(frozen=True)
class DualPrompt(PromptedHead):
    """General prefixes for all tasks, and expert prefixes per task that test images select by key.

    All are key and value prefixes of attention. Clients train and send the general prefixes (G),
    the current task's expert prefixes (E) and key, and the linear head. Expert prefixes and keys of
    finished tasks are frozen.
    """

    paper = (
        'Wang et al., "DualPrompt: Complementary Prompting for Rehearsal-free Continual '
        'Learning", ECCV 2022'
    )
    formulas = r"""
    $$L = -\log \operatorname{softmax}_{c \in C_t}\bigl( h(f(x; G, E_t)) \bigr)_y
    - \lambda \cos(q, k_t)$$

    A test image takes the expert $E_i$ of the task whose key $k_i$ is nearest to its frozen feature
    $q$.
    """
    append_only: ClassVar[tuple[str, ...]] = ("past.",)
    server_only = ("next.",)
    dataset_options = {"digits": {"lr": 3e-2}}

    general_blocks: tuple[int, ...] = option((0, 1), "blocks with general prefixes", low=0)
    general_length: int = option(5, "length L_g of each general key prefix and value prefix", low=1)
    expert_blocks: tuple[int, ...] = option((2, 3, 4), "blocks with expert prefixes", low=0)
    expert_length: int = option(20, "length L_e of each expert key prefix and value prefix", low=1)
    lr: float = option(
        1e-3,
        "learning rate (the default is FPPL's; HGP's data sets have their own)",
        low=0,
        tune=(1e-4, 1e-1, "log"),
    )
    clip: float | None = option(1.0, "maximum gradient norm at clients; none: no clipping", low=0)
    pull: float = option(
        1.0, "lambda, weight of the cosine between the query and the task's key", low=0
    )
    warm_start: bool = option(
        False,
        "initialise a task's expert prefixes with those of the last task, as some released code "
        "does",
    )
    no_key_loss: bool = option(
        False,
        "omit the key loss: keys keep their random initial values",
        quirk="fed-mammoth",
    )
    match_all_slots: bool = option(
        False,
        "match test images with the untrained slots of future tasks as well",
        quirk="code of fed-mammoth, CODA-Prompt and JH-LEE-KR/dualprompt-pytorch",
    )
    reshape_bug: bool = option(
        False,
        "use a wrong reshape of the gathered experts, which mixes keys, values and images",
        quirk="code of fed-mammoth, mammoth (its default) and JH-LEE-KR/dualprompt-pytorch",
    )

    def training(self) -> Training:
        # Client: Adam on G, E_t, its key k_t and the head. Server: FedAvg of the same.
        optims = self.optims(self.optim(self.lr), "general.", "expert.")
        return self.with_head_means(
            Training(optims, inputs=["images", "query"], clip_norm=self.clip)
        )

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        # Start of the run: G, and one slot of E with one key per task, all from U(-1, 1).
        if not state:
            backbone.check_blocks(self.general_blocks, f"{self.name}.general_blocks")
            backbone.check_blocks(self.expert_blocks, f"{self.name}.expert_blocks")
            dim, width = backbone.dim, backbone.token_dim

            def rows(*shape: int) -> Tensor:
                return torch.empty(*shape).uniform_(-1, 1, generator=rng)

            general = {
                f"general.{i}.{p}": rows(self.general_length, width)
                for i in self.general_blocks
                for p in "kv"
            }
            slots = {
                f"{i}.{p}": rows(task.count, self.expert_length, width)
                for i in self.expert_blocks
                for p in "kv"
            }
            slots["key"] = rows(task.count, dim)
            first = {f"expert.{k}": v[0] for k, v in slots.items()}
            others = {f"next.{k}": v[1:] for k, v in slots.items()}
            return {**general, **first, **others, **self.start_head(task, dim, rng)}
        # Task boundary: freeze E_{t-1} and k_{t-1}, train the next slot.
        next_state = {
            **drop(state, "past.", "next.", "expert."),
            **stack_past(state, "expert.", "past."),
        }
        for name, last_value in select(state, "expert.").items():
            future = name.replace("expert.", "next.", 1)
            next_state[name] = (
                last_value if self.warm_start and name != "expert.key" else state[future][0]
            )
            next_state[future] = state[future][1:]
        return next_state

    def loss(
        self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tree]:
        # Training knows the task: every image takes E_t, without matching.
        logits = head_logits(train, self.trained_features(backbone, train, batch))
        loss = task_cross_entropy(logits, batch, ctx.task)
        if self.no_key_loss:
            return loss, {}
        # Key term: L = L_ce - lambda mean cos(q, k_t). The key moves towards the task's queries.
        return loss - self.pull * batch.mean(
            cosines(batch.query, train["expert.key"][None])[:, 0]
        ), {}

    def predict(self, backbone: Backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        # Inference: match the task by key, prefixed pass, argmax over the classes seen.
        return head_logits(state, self.features(backbone, state, batch))[:, : task.stop]

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        # Test: each image takes the slot s with the largest cos(q, k_s).
        chosen = self.match(tree, batch.query)
        return self._features(backbone, tree, batch, lambda name: self._slots(tree, name)[chosen])

    def trained_features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        """Compute features with the current task's expert prompts.

        Args:
            backbone: The frozen backbone.
            tree: Tree with ``general.*`` and ``expert.*``.
            batch: Images.

        Returns:
            Features [B, D].
        """
        size = len(batch.y)
        return self._features(
            backbone, tree, batch, lambda name: tree[f"expert.{name}"].expand(size, -1, -1)
        )

    def diagnose(self, evidence: Evidence) -> Mapping[str, Finding]:
        state = evidence.state
        slots = len(self._slots(state, "key"))
        return choice_shares(evidence, lambda batch: self.match(state, batch.query), slots)

    def match(self, state: Tree, query: Tensor) -> Tensor:
        """Match each image with the task of the nearest key.

        Args:
            state: State with the keys of finished and current tasks.
            query: Frozen features q [B, D].

        Returns:
            Number [B] of the task whose key is nearest to each query, among those trained so far.
        """
        return top_positions(cosines(query, self._slots(state, "key")), 1)[:, 0]

    def prefixes(self, keys: Tensor, values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and value prefixes of each image; ``reshape_bug`` mixes them.

        Args:
            keys: Key prefixes [B, L, D].
            values: Value prefixes [B, L, D].
            weight: Weights [B] of the images; padding has weight 0.

        Returns:
            Key and value prefixes [B, L, D].
        """
        return reshape_prefixes(keys, values, weight) if self.reshape_bug else (keys, values)

    def _slots(self, state: Tree, name: str) -> Tensor:
        """Return the slots of finished and current tasks in task order [t + 1, ...].

        With ``match_all_slots`` also the untrained ones [T, ...].
        """
        slots = stack_past(state, f"expert.{name}", f"past.{name}")[f"past.{name}"]
        return torch.cat([slots, state[f"next.{name}"]]) if self.match_all_slots else slots

    def _features(
        self, backbone: Backbone, tree: Tree, batch: Batch, expert: Callable[[str], Tensor]
    ) -> Tensor:
        """Return features [B, D] under G and the expert prefixes.

        ``expert`` maps a name such as ``2.k`` (block 2, keys) to prefixes [B, L_e, D].
        """
        # Prefix tuning: G in the general blocks, E in the expert blocks.
        plugs = {
            k.replace("general.", "prefix.", 1): v for k, v in select(tree, "general.").items()
        }
        for i in self.expert_blocks:
            keys, values = self.prefixes(expert(f"{i}.k"), expert(f"{i}.v"), batch.w)
            plugs |= {f"prefix.{i}.k": keys, f"prefix.{i}.v": values}
        return backbone(batch.x, plugs)
