"""AFL and AFCL: analytic federated (continual) learning.

He et al., CVPR 2025; Tang et al., 2025.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import ServerContext
from fczoo.functional.ridge import Analytic, solve_ridge


@register_method("afcl")
@dataclass(frozen=True)
class AFCL(Analytic):
    """Ridge regression without a bias, merged exactly over clients and tasks.

    The papers merge two solutions at a time, W_12 from W_1, C_1, W_2, C_2 with C_k = G_k + gamma I.
    In any order the result is (G + gamma I)^-1 Q, once the gammas of all clients but one are
    subtracted. So clients here send their parts of G and Q, and the server solves once per task.
    New classes add columns, whose target for older images is 0. AFL's clean step, which subtracts
    the gammas of all clients, is ``gamma=0``.
    """

    paper = (
        'He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained '
        'Models", CVPR 2025; Tang et al., "AFCL: Analytic Federated Continual Learning for '
        'Spatio-Temporal Invariance of Non-IID Data", arXiv 2505.12245'
    )
    formulas = r"""
    $$W = \Bigl( \sum_k \sum_{x \in D_k} f(x) f(x)^\top + \gamma I \Bigr)^{-1} Q$$

    $$\hat y(x) = \underset{c}{\operatorname{argmax}}\; W_c^\top f(x)$$

    $Q_c$ is the sum of $f$ over the images of class $c$; the sums are over all tasks so far.
    """

    gamma: float = option(
        1.0,
        "gamma, weight of the squared norm of the classifier, added once for all images",
        low=0,
        tune=(1e-2, 1e6, "log"),
    )
    gram_rank: int | None = option(
        None,
        "rank of the factor that a client sends instead of its Gram matrix (FedRAN); none: exact "
        "matrix",
        low=1,
    )
    per_client: bool = option(
        False,
        "add gamma once per client of the run, not once in all",
        quirk="AFL's code, which at its end removes gamma again (function clean); this option does "
        "not",
    )

    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        # Absolute aggregation (AA) law over all clients and tasks, in closed form:
        # W = (G + gamma I)^-1 Q. AFL without its clean step adds gamma once per client.
        gamma = self.gamma * (ctx.clients if self.per_client else 1)
        return solve_ridge(moments["gram"], moments["target"], gamma), torch.zeros_like(
            moments["count"]
        )
