"""Fed3R: federated ridge regression on frozen features, also the classifier of AFCL and STSA.

Fani et al., ICML 2024.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import ServerContext
from fczoo.functional.ridge import Analytic, Score, solve_ridge, solve_ridge_with_bias


@register_method("fedridge")
@dataclass(frozen=True)
class FedRidge(Analytic):
    """Ridge regression on frozen features, equal to the centralised solution on all images so far.

    Clients train nothing. Once per task they send the count and feature sum of every class, and the
    sum of outer products of all features (Gram matrix). The server adds these to its totals and
    solves the regression again. A class without images is never predicted.
    """

    paper = (
        'Fed3R: Fanì et al., "Accelerating Heterogeneous Federated Learning with Closed-form '
        'Classifiers", ICML 2024'
    )
    formulas = r"""
    $$G = \sum_x f(x) f(x)^\top$$

    $$Q_c = \sum_{x \in D_c} f(x)$$

    $$W = (G + \lambda I)^{-1} Q$$

    $$\hat y(x) = \underset{c}{\operatorname{argmax}}\; W_c^\top f(x)$$
    """
    dataset_options = {"digits": {"ridge": 1.0}}

    ridge: float = option(
        1e2, "lambda, strength of the L2 penalty on the classifier", low=0, tune=(1e-2, 1e6, "log")
    )
    scaled: bool = option(
        False, "multiply lambda by trace(G) / M, the mean diagonal entry of the Gram matrix"
    )
    lift: Literal["plain", "random"] = option(
        "plain",
        "features: plain, the frozen feature f; random, relu(f R) with a fixed random matrix R "
        "(RanPAC, STSA)",
    )
    width: int = option(1250, "columns M of the random projection, with lift=random", low=1)
    bias: Literal["none", "penalised", "free"] = option(
        "free",
        "bias of the classifier: none; penalised, a constant feature, penalised as the others; "
        "free, without penalty",
    )
    gram_rank: int | None = option(
        None,
        "rank of the factor that a client sends instead of its Gram matrix (FedRAN); none: exact "
        "matrix",
        low=1,
    )
    score: Score = option(
        "linear",
        "prediction: linear, by the regression's outputs; cosine, by the cosine of feature and "
        "class weight (STSA's code)",
    )

    def __post_init__(self) -> None:
        """Refuse a bias that the cosine would ignore, or that needs the exact Gram matrix.

        Raises:
            FczooError: ``score=cosine`` or ``gram_rank`` with ``bias=free``.
        """
        super().__post_init__()
        if self.gram_rank is not None and self.bias == "free":
            problem = "fedridge.bias=free needs the exact Gram matrix, but gram_rank is set"
            raise FczooError(f"{problem}; add --set fedridge.bias=none")
        if self.score == "cosine" and self.bias == "free":
            problem = "fedridge.score=cosine ignores the bias of fedridge.bias=free"
            raise FczooError(f"{problem}; add --set fedridge.bias=none")

    def random_features(self) -> int:
        return self.width if self.lift == "random" else 0

    def read_out(self) -> Score:
        return self.score

    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        # W = (G + lambda I)^-1 Q, with sums over all clients and tasks. Free bias, from the same
        # sums: W = (G - n mu mu^T + lambda I)^-1 (Q - n mu p^T) and b = p - W^T mu, with the mean
        # feature mu and the class shares p.
        gram, target, count = moments["gram"], moments["target"], moments["count"]
        ridge = self.ridge * (float(gram.diagonal().mean()) if self.scaled else 1.0)
        if self.bias == "free":
            return solve_ridge_with_bias(gram, target, count, ridge)
        return solve_ridge(gram, target, ridge), torch.zeros_like(count)

    def lift_features(self, state: Tree, query: Tensor) -> Tensor:
        """Compute phi(f); with ``bias=penalised`` append a constant feature.

        Args:
            state: State, with ``projection`` R if there is one.
            query: Frozen features f [B, D].

        Returns:
            phi [B, M] in float64.
        """
        phi = super().lift_features(state, query)
        return F.pad(phi, (0, 1), value=1.0) if self.bias == "penalised" else phi
