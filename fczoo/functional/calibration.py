"""Calibration of the head: a server retrains it on features drawn from Gaussians of the classes.

CCVR (Luo et al., NeurIPS 2021), and the rebalance of HGP (Salami et al., arXiv 2406.02447).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.tree import Tree
from fczoo.functional.gaussians import draw_features, factorise
from fczoo.functional.heads import train_head
from fczoo.functional.losses import normalised_cross_entropy


@dataclass(frozen=True)
class CalibratedHead(Method):
    """Base of methods whose server calibrates a linear head."""

    per_class: int = option(
        256, "features that the server draws per class and epoch; also its batch size", low=1
    )
    server_epochs: int = option(5, "epochs E_r in which the server trains the head", low=1)
    server_lr: float = option(
        0.01,
        "learning rate of the server's training, SGD with momentum 0.9",
        low=0,
        tune=(1e-4, 1e-1, "log"),
    )
    logit_norm: float | None = option(
        0.1,
        "temperature of normalised logits in the server's loss (fed-mammoth); none: plain logits "
        "(papers)",
        low=1e-6,
    )

    def calibrated_head(
        self,
        head: Tree,
        gauss: Tree,
        classes: tuple[int, int],
        rng: torch.Generator,
        spread: float = 1.0,
        by_count: bool = False,
        once: bool = False,
        cosine: bool = True,
    ) -> Tree:
        """Train the head on features drawn from ``gauss``.

        Args:
            head: Tree with ``head.weight`` [C, D] and ``head.bias`` [C].
            gauss: Gaussians of the class features, see ``fczoo.functional.gaussians``.
            classes: First class and one past the last: the rows to train and the softmax of the
                loss.
            rng: Generator of the features.
            spread: Factor on the variances, as in ``draw_features``.
            by_count: Draw classes by their counts, as in ``draw_features``.
            once: Draw the features once instead of again in each epoch.
            cosine: Lower the learning rate over the epochs, as in ``train_head``.

        Returns:
            The trained head; an empty tree if ``gauss`` has no rows.
        """
        if not len(gauss["gauss.label"]):
            return {}
        gauss, number = factorise(gauss), self.per_class * len(gauss["gauss.label"].unique())

        def draw() -> tuple[Tensor, Tensor]:
            return draw_features(gauss, number, rng, spread, by_count)

        return train_head(
            head,
            classes,
            cache(draw) if once else draw,
            lambda logits, labels: normalised_cross_entropy(logits, labels, self.logit_norm),
            self.server_epochs,
            self.server_lr,
            self.per_class,
            cosine,
        )
