"""Incremental LoRA: one pair per task, frozen afterwards, with an orthogonality penalty.

With ``tune=full`` clients train the whole backbone instead (ablation without LoRA).

PILoRA, Guo et al., ECCV 2024.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.tree import Tree, select, stack_past
from fczoo.core.types import Batch, Context
from fczoo.functional.lora import lora_pairs, merged_pairs


@dataclass(frozen=True)
class IncrementalLoRA(Method):
    """Base of methods that train one LoRA pair per task, on q and v of some blocks.

    The state holds ``lora.X.a`` and ``lora.X.b`` of the current task, ``past.X.a`` and ``past.X.b``
    of the earlier ones.
    """

    tune: Literal["lora", "full"] = option(
        "lora",
        "tensors trained below the prototypes: lora, LoRA pairs; full, all weights (ablation "
        "without LoRA)",
    )
    rank: int = option(4, "rank r of each LoRA pair", low=1)
    blocks: tuple[int, ...] = option((0,), "blocks with LoRA on q and v", low=0)
    lr_lora: float = option(
        1e-5,
        "learning rate of LoRA or, with tune=full, of all weights (HGP's re-run of PILoRA: 1e-4)",
        low=0,
        tune=(1e-6, 1e-2, "log"),
    )
    ortho: float = option(
        0.5, "gamma, weight of the penalty on overlap with the LoRA pairs of earlier tasks", low=0
    )
    sparse: float = option(
        0.01, "weight of the L1 penalty on A; only in the released code (paper: 0)", low=0
    )
    merge: Literal["sum", "factor_sum", "first"] = option(
        "sum",
        "merge of LoRA pairs: sum, sum of B_i A_i; factor_sum, (sum B)(sum A) as in eq. 6; "
        "first, only the first task's pair, in evaluation (training uses the current pair)",
        quirk={"first": "Ghy0501/PILoRA"},
    )
    local: Literal["merged", "current"] = option(
        "merged",
        "LoRA pairs in a client's forward pass: merged, those of all tasks as in evaluation; "
        "current, only the current task's",
        quirk={"current": "Ghy0501/PILoRA"},
    )

    def start_lora(self, state: Tree, backbone: Backbone, rng: torch.Generator) -> Tree:
        """Return the LoRA pairs at the start of a task: all earlier ones and a new one.

        Args:
            state: State after the previous task.
            backbone: The frozen backbone.
            rng: Generator of the new pair.

        Returns:
            ``past.X`` and ``lora.X`` tensors; with ``tune=full`` all weights ``full.X``.

        Raises:
            FczooError: The backbone does not have one of the blocks.
        """
        if self.tune == "full":
            return select(state, "full.") or backbone.full_weights()
        # New pair A_t, B_t with B_t = 0; the pair of the last task joins the frozen ones.
        new = lora_pairs(backbone, self.blocks, self.rank, rng, f"{self.name}.blocks")
        return {**stack_past(state, "lora.", "past."), **new}

    def features(self, backbone: Backbone, tree: Tree, batch: Batch) -> Tensor:
        # Global model, eq. 6: W plus the pairs of all tasks. The default merge is sum_i B_i A_i;
        # ``factor_sum`` is the equation as the paper prints it.
        return backbone(batch.x, self._plugs(tree))

    def local_features(self, backbone: Backbone, train: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Compute features in a client's local forward pass.

        With ``local=current`` only the current pair is active. The same holds with
        ``merge=first``: otherwise the current pair would get no gradient.

        Args:
            backbone: The frozen backbone.
            train: Tensors that the client trains.
            batch: Images.
            ctx: Broadcast tensors.

        Returns:
            Features [B, D].
        """
        current_only = self.local == "current" or self.merge == "first"
        if current_only and self.tune == "lora":
            return backbone(batch.x, select(train, "lora."))
        return backbone(batch.x, self._plugs({**ctx.shared, **train}))

    def _plugs(self, tree: Tree) -> Tree:
        return select(tree, "full.") if self.tune == "full" else merged_pairs(tree, self.merge)

    def lora_penalty(self, train: Tree, shared: Tree) -> Tensor:
        """Compute the penalty on A_t: gamma l_ort, and the L1 norm of the released code.

        l_ort = sum_{i<t} |A_i A_t^T| has weight ``ortho``, |A_t| has weight ``sparse``.

        Args:
            train: Trained tensors, with ``lora.X.a`` of the current task t.
            shared: Broadcast tensors, with ``past.X.a`` of the earlier tasks i.

        Returns:
            The penalty, a scalar; 0 with ``tune=full``.
        """
        if self.tune == "full":
            return torch.zeros(())
        # Released code only: |A_t|, the sum of absolute entries.
        down = {k: v for k, v in train.items() if k.endswith(".a")}
        penalty = self.sparse * torch.stack([a.abs().sum() for a in down.values()]).sum()
        # l_ort: sum of the absolute entries of A_i A_t^T over earlier tasks i; 0 in the first task.
        for name, a in down.items():
            earlier = shared.get(name.replace("lora.", "past.", 1))
            if earlier is not None:
                penalty = penalty + self.ortho * (earlier @ a.mT).abs().sum()
        return penalty
