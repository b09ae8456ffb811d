"""RanPAC: Random Projections and Pre-trained Models for Continual Learning.

McDonnell et al., NeurIPS 2023.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext, Task
from fczoo.functional.adapters import AdaptableAnalytic
from fczoo.functional.ridge import best_ridge, gram_sums, solve_ridge

RIDGES = tuple(10.0**power for power in range(-8, 9))


@register_method("ranpac")
@dataclass(frozen=True)
class RanPAC(AdaptableAnalytic):
    """Ridge regression on random features relu(f R), with a ridge chosen on held-out images.

    Once per task clients send the sums of FedRidge twice, over images to fit and over held-out
    images; this suffices to choose the ridge. Whether an image is held out does not depend on its
    owner, so the choice is also that of centralised training. The final solution uses both parts.
    The paper first adapts the network in the first task (``adapt=adapter``; 20 epochs, batch size
    48); by default the features are those of the pre-trained network.
    """

    paper = (
        'McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual '
        'Learning", NeurIPS 2023; federated by sums'
    )
    formulas = r"""
    $$\varphi(x) = \max(0,\; R^\top f(x))$$

    $$W = \Bigl( \sum_x \varphi \varphi^\top + \lambda I \Bigr)^{-1} Q$$

    $R$ is random, $Q_c$ is the sum of $\varphi$ over the images of class $c$, and $\lambda$ has the
    least squared error on held-out images.
    """
    dataset_options = {"digits": {"width": 500}}

    width: int = option(2000, "columns M of the random projection (paper: 10,000)", low=1)
    ridge: float | None = option(
        None,
        "lambda, strength of the L2 penalty; none: the best of 10^-8 .. 10^8 by squared error on "
        "held-out images",
        low=0,
    )
    lr: float = option(
        0.01,
        "learning rate of adapters and head, SGD, cosine over the rounds, with adapt=adapter",
        low=0,
    )
    held_out: float = option(
        0.2,
        "share of a task's images that is held out to choose the ridge",
        low=0.01,
        high=0.99,
        tune=(0.1, 0.5, "linear"),
    )

    gram_rank: int | None = option(
        None,
        "rank of the factor that a client sends instead of its Gram matrix (FedRAN); none: exact "
        "matrix",
        low=1,
    )

    def random_features(self) -> int:
        return self.width

    def training(self) -> Training:
        # The ridge choice needs the same sums over the held-out images.
        base = super().training()
        if self.ridge is not None:
            return base
        judge = {"judge.": self.class_group("count", "sum"), "judge_gram": self.gram_group()}
        return replace(base, uploads={**base.uploads, **judge}, draws=1)

    def begin_task(self, state: Tree, task: Task, backbone: Backbone, rng: torch.Generator) -> Tree:
        chosen = torch.tensor(1.0 if self.ridge is None else self.ridge, dtype=torch.float64)
        return state or {**super().begin_task(state, task, backbone, rng), "answer.ridge": chosen}

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        if self.ridge is not None:
            return super().collect(phase, backbone, tree, batch, ctx)
        # Client, once per task: G, Q and n of the part to fit and of the held-out part. The split
        # depends only on the image.
        phi = self.lift_features(tree, self.features(backbone, tree, batch))
        out = batch.draws[:, 0] >= 1 - self.held_out
        fit = gram_sums(phi, batch._replace(w=batch.w * ~out), ctx.task)
        judge = gram_sums(phi, batch._replace(w=batch.w * out), ctx.task)
        judge_sums = {k.replace("class.", "judge."): v for k, v in judge.items()}
        return {**fit, "judge_gram": judge_sums.pop("gram"), **judge_sums}

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        if self.ridge is None:
            # Ridge choice: the lambda of 10^-8 .. 10^8 with the least squared error on the task's
            # held-out images, <W, G_h W> - 2 <W, Q_h> + n_h with W = (G + lambda I)^-1 Q.
            fit = {"gram": sums["gram"], "target": sums["class.sum"].mT}
            judge = {"gram": sums["judge_gram"], "target": sums["judge.sum"].mT}
            # Without held-out images lambda keeps its value, which is 1 at the start.
            if sums["judge.count"].any():
                state = {
                    **state,
                    "answer.ridge": torch.tensor(best_ridge(fit, judge, RIDGES)).to(sums["gram"]),
                }
            # The final solution uses both parts.
            totals = {
                k: sums[k] + sums[k.replace("class.", "judge.")]
                for k in ("class.count", "class.sum")
            }
            sums = {**totals, "gram": sums["gram"] + sums["judge_gram"]}
        return super().update_from(phase, state, sums, ctx)

    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        # W = (sum phi phi^T + lambda I)^-1 Q over all tasks, without a bias.
        weight = solve_ridge(moments["gram"], moments["target"], float(state["answer.ridge"]))
        return weight, torch.zeros_like(moments["count"])
