"""A server trains the head again, on features drawn from Gaussians of its clients' classes.

CCVR (Luo et al., NeurIPS 2021), and the rebalance of HGP (Salami et al., arXiv 2406.02447).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fczoo.core.method import Method
from fczoo.core.options import option
from fczoo.core.tree import Tree
from fczoo.functional.gaussians import draw_features
from fczoo.functional.heads import train_head
from fczoo.functional.losses import normalised_cross_entropy


@dataclass(frozen=True)
class Calibrated(Method):
    """Base of methods with a linear head that do so."""

    per_class: int = option(256, "features that the server draws per class and epoch; its batch size", low=1)
    server_epochs: int = option(5, "epochs E_r in which the server trains the head", low=1)
    server_lr: float = option(
        0.01, "its learning rate, SGD with momentum 0.9", low=0, tune=(1e-4, 1e-1, "log")
    )
    logit_norm: float | None = option(
        0.1,
        "temperature of normalised logits in the server's loss (fed-mammoth); none: plain logits (papers)",
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
        """The head trained on features drawn from ``gauss``; nothing where that has no rows.

        ``classes``, the rows to train and the loss's softmax, are the first and one past the last. Features
        are drawn anew in each epoch unless ``once``; ``spread`` and ``by_count`` as in ``draw_features``,
        ``cosine`` as in ``train_head``.
        """
        if not len(gauss["gauss.label"]):
            return {}
        number = self.per_class * len(gauss["gauss.label"].unique())

        def drawn() -> tuple[Tensor, Tensor]:
            return draw_features(gauss, number, rng, spread, by_count)

        return train_head(
            head,
            classes,
            cache(drawn) if once else drawn,
            lambda logits, labels: normalised_cross_entropy(logits, labels, self.logit_norm),
            self.server_epochs,
            self.server_lr,
            self.per_class,
            cosine,
        )
