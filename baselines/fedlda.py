"""Federated linear discriminant analysis: class means and a shared covariance from sums."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.options import option
from fczoo.core.registry import register_method
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import ServerContext
from fczoo.functional.ridge import Analytic, solve_ridge


@register_method("fedlda")
@dataclass(frozen=True)
class FedLDA(Analytic):
    """Nearest class mean in the Mahalanobis distance of the shared within-class covariance.

    Nothing is trained. Once per task clients send the sums of FedRidge. The server computes means
    and covariance exactly as on the pooled images of all tasks.
    """

    paper = (
        'linear discriminant analysis from federated sums: Fisher, "The use of multiple '
        'measurements in taxonomic problems", Annals of Eugenics 1936; tied form of FeCAM: Goswami '
        'et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free '
        'Continual Learning", NeurIPS 2023'
    )
    formulas = r"""
    $$\hat y(x) = \underset{c}{\operatorname{argmin}}\;
    (f - \mu_c)^\top (S + s \bar\sigma^2 I)^{-1} (f - \mu_c)$$

    $S$ is the covariance within classes, $\bar\sigma^2$ its mean variance.
    """

    rule: Literal["lda", "mahalanobis"] = option(
        "mahalanobis",
        "decision rule: mahalanobis, only the distance, with the unbiased covariance; lda, with "
        "class frequencies and the divisor N",
    )
    shrink: float = option(
        0.1,
        "s, shrinkage: s times the mean variance is added to the variances",
        low=0,
        tune=(1e-3, 10.0, "log"),
    )

    def training(self) -> Training:
        # ``lda`` scores are log p(c | x) up to a constant; distances are not logits.
        return replace(super().training(), gives_logits=self.rule == "lda")

    def solve(self, state: Tree, moments: Tree, ctx: ServerContext) -> tuple[Tensor, Tensor]:
        count, has_images = moments["count"], moments["count"] > 0
        means = moments["target"] / count.clamp(min=1)  # [D, C]
        # Within-class scatter G - B with B = sum_c N_c mu_c mu_c^T. S = scatter / (N - C), where C
        # classes have images; with ``lda`` scatter / N.
        scatter = moments["gram"] - moments["target"] @ means.mT
        divisor = count.sum() - (has_images.sum() if self.rule == "mahalanobis" else 0)
        covariance = scatter / divisor.clamp(min=1)
        # Shrinkage: S + s mean(diagonal) I. Weights: S^-1 mu_c.
        weight = solve_ridge(covariance, means, self.shrink * float(covariance.diagonal().mean()))
        distance = (means * weight).sum(0)  # m^T S^-1 m
        # -(f - mu_c)^T S^-1 (f - mu_c) without f^T S^-1 f, which is the same for all classes.
        if self.rule == "mahalanobis":
            return 2 * weight, -distance
        # f^T S^-1 mu_c - mu_c^T S^-1 mu_c / 2 + log(N_c / N).
        prior = (count / count.sum()).clamp(min=torch.finfo(count.dtype).tiny).log()
        return weight, prior - distance / 2
