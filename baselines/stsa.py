"""STSA: Spatial-Temporal Statistics Aggregation for federated class-incremental learning.

Guan et al., WWW 2026.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.tree import Tree
from fczoo.core.types import ServerContext
from fczoo.functional.adapters import AdaptableAnalytic
from fczoo.functional.ridge import Score, solve_ridge


@register_method("stsa")
@dataclass(frozen=True)
class STSA(AdaptableAnalytic):
    """Ridge regression on random features relu(f R), with prediction by cosine similarity.

    Once per task clients send count and sum of the random features of every class, and their Gram
    matrix. The server adds these over clients and tasks and solves the regression. The cosine
    removes the effect that weights of rare classes are short. The paper first adapts the network in
    the first task (``adapt=adapter``; 10 rounds of 2 epochs, batch size 128); by default the
    features are those of the pre-trained network.
    """

    paper = (
        'Guan et al., "Enhancing Federated Class-Incremental Learning via Spatial-Temporal '
        'Statistics Aggregation", WWW 2026, arXiv 2506.01327'
    )
    formulas = r"""
    $$\varphi(x) = \max(0,\; R^\top f(x))$$

    $$W = \Bigl( \sum_x \varphi \varphi^\top + \lambda I \Bigr)^{-1} Q$$

    $$\hat y(x) = \underset{c}{\operatorname{argmax}}\; \cos(\varphi(x), W_c)$$

    $R$ is random, $Q_c$ is the sum of $\varphi$ over the images of class $c$.
    """
    dataset_options = {"digits": {"width": 500, "ridge": 1e3}}

    width: int = option(1250, "columns M of the random projection, drawn from N(0, 1)", low=1)
    ridge: float = option(
        1e6, "lambda, strength of the L2 penalty on the classifier", low=0, tune=(1e-2, 1e8, "log")
    )
    score: Score = option(
        "cosine",
        "prediction: cosine, by the cosine of feature and class weight; linear, by the "
        "regression's outputs",
    )

    def random_features(self) -> int:
        return self.width

    def read_out(self) -> Score:
        return self.score

    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        # W = (G + lambda I)^-1 Q with G = sum phi phi^T over all clients and tasks and
        # phi = max(0, R^T f). Inference is argmax_c cos(phi, W_c).
        weight = solve_ridge(moments["gram"], moments["target"], self.ridge)
        return weight, torch.zeros_like(moments["count"])
