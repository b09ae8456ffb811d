"""FedCOF: Covariances for Free. Goswami et al., NeurIPS 2025."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.options import option
from fczoo.core.payload import per_class
from fczoo.core.registry import register_method
from fczoo.core.training import TaskPhase, Training
from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Boundary, Context, ServerContext
from fczoo.functional.gaussians import class_sums
from fczoo.functional.ridge import Analytic, Score, gram_of_groups, solve_ridge


@register_method("fedcof")
@dataclass(frozen=True)
class FedCOF(Analytic):
    """Ridge regression from class means only; covariances are estimated from the clients' means.

    Nothing is trained. Once per task clients send count and feature sum of every class, as in
    FedNCM. The matrix leaves out the spread between classes on purpose. The covariance of a class
    can be estimated only if two clients or more hold it. The server must see each client's sums
    separately.
    """

    paper = (
        'Goswami et al., "Covariances for Free: Exploiting Mean Distributions for Training-free '
        'Federated Learning", NeurIPS 2025, arXiv 2412.14326'
    )
    formulas = r"""
    $$S_c = \frac{1}{J_c - 1} \sum_k n_{k,c} (\mu_{k,c} - \mu_c)(\mu_{k,c} - \mu_c)^\top$$

    $$W = \Bigl( \sum_c (N_c - 1)(S_c + \gamma I) + N \mu \mu^\top \Bigr)^{-1} Q$$

    $$\hat y(x) = \underset{c}{\operatorname{argmax}}\; \cos(f(x), W_c)$$

    $J_c$ clients hold the $N_c$ images of class $c$, $\mu$ is the mean of all $N$ features, and
    $Q_c$ is the sum of those of class $c$; $S_c$ is 0 where one client holds them all.
    """

    dataset_options = {"digits": {"gamma": 0.01}}

    gamma: float = option(
        1.0, "gamma, added to the variances of each class", low=0, tune=(1e-2, 1e6, "log")
    )

    def training(self) -> Training:
        # No training: one upload per task, which the server must see client by client.
        return Training(
            inputs=["query"],
            uploads={"class.": per_class("count", "sum")},
            collect_at={"task_start"},
            per_client_statistics=True,
            gives_logits=False,
        )

    def read_out(self) -> Score:
        return "cosine"

    def collect(
        self, phase: TaskPhase, backbone: Backbone, tree: Tree, batch: Batch, ctx: Context
    ) -> Tree:
        # Client, once per task: n_{k,c} and n_{k,c} mu_{k,c}, the feature sum, per class.
        return class_sums(self.lift_features(tree, batch.query), batch, ctx.task)

    def update_from(self, phase: Boundary, state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
        """Add the task's within-class scatter, the sum of (N_c - 1) S_c, to ``moment.gram``.

        Args:
            phase: Phase in which the sums were collected.
            state: Current state.
            sums: ``class.count`` [K, c] and ``class.sum`` [K, c, M], one row per client.
            ctx: Server context.

        Returns:
            The state with the new moments and classifier.
        """
        # (N_c - 1) S_c = estimated Gram matrix of class c - N_c mu_c mu_c^T, summed over classes.
        count, total = sums["class.count"].sum(0), sums["class.sum"].sum(0)  # N_c, P_c
        means = total / count[:, None].clamp(min=1)
        within = gram_of_groups(sums["class.count"], sums["class.sum"]) - total.mT @ means
        return super().update_from(
            phase, state, {"class.count": count, "class.sum": total, "gram": within}, ctx
        )

    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        # W = G^-1 Q with G = sum_c (N_c - 1)(S_c + gamma I) + N mu mu^T, without the between-class
        # scatter. The mean mu is over all tasks so far.
        count, target = moments["count"], moments["target"]
        mean = target.sum(1) / count.sum()
        ridge = self.gamma * (count - 1).clamp(min=0).sum()
        weight = solve_ridge(moments["gram"] + count.sum() * mean.outer(mean), target, float(ridge))
        return weight, torch.zeros_like(count)
