"""Choosing the images that a client keeps."""

import torch
import torch.nn.functional as F
from torch import Tensor


def herding(features: Tensor, number: int, repeats: bool = False) -> Tensor:
    """Positions of ``number`` images of a class, whose running mean stays nearest to the class mean.

    They come in order of choice; all of them if there are fewer.

    ``features`` [n, D] of one class are brought to length 1 first. Any first part of the list is itself a
    choice by herding, so a list is shortened from its end. With ``repeats`` an image may be chosen again,
    as GLFC's code lets it. Rebuffi et al., iCaRL, CVPR 2017, algorithm 4.
    """
    features = F.normalize(features, dim=-1)
    mean, total = features.mean(0), torch.zeros_like(features[0])
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen: list[int] = []
    for i in range(number if repeats else min(number, len(features))):
        gap = torch.linalg.vector_norm(mean - (total + features) / (i + 1), dim=-1)
        best = int(gap.masked_fill(~free, torch.inf).argmin())
        chosen.append(best)
        free[best] = repeats
        total = total + features[best]
    return torch.tensor(chosen, dtype=torch.int64)
