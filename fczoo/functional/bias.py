"""Bias correction: two numbers that put new classes on the scale of old ones (BiC; Wu et al., CVPR 2019)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.types import LocalData


def fit_bias(
    batches: Sequence[tuple[Tensor, Tensor]], start: int, epochs: int, lr: float, weight_decay: float = 0.0
) -> Tensor:
    """(alpha, beta) of z' = alpha z + beta for the logits from class ``start`` on, by Adam from (1, 0).

    ``batches``: logits [B, C] and labels [B]; one step on each of them in every epoch.
    """
    with torch.enable_grad():
        logits = batches[0][0]
        bias = logits.new_tensor([1.0, 0.0]).requires_grad_()
        optimizer = torch.optim.Adam([bias], lr, weight_decay=weight_decay)
        for _ in range(epochs):
            for z, y in batches:
                optimizer.zero_grad()
                corrected = torch.cat([z[:, :start], bias[0] * z[:, start:] + bias[1]], 1)
                F.cross_entropy(corrected, y).backward()
                optimizer.step()
    return bias.detach()


def validation_split(data: LocalData, kept: Tensor, part: float) -> tuple[Tensor, Tensor]:
    """Positions [n] on which a client trains, and those [v] that it holds out, of both kinds of images.

    Of each class it holds out as many: a ``part`` of the shortest list of exemplars ``kept``, at least one;
    none of a class with a single image, and none at all while it keeps no exemplars.
    """
    trained, held = [], []
    new, old = (_by_class(index, data.labels(index).to(index.device)) for index in (data.index, kept))
    shortest = min(map(len, old), default=0)
    for own in (*new, *old):
        number = min(max(int(part * shortest), 1), len(own) - 1) if shortest else 0
        trained.append(own[: len(own) - number])
        held.append(own[len(own) - number :])
    return torch.cat(trained), torch.cat(held)


def _by_class(index: Tensor, labels: Tensor) -> list[Tensor]:
    return [index[labels == c] for c in labels.unique()]
