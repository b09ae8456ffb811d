"""Choosing the images that a client keeps."""

import torch
import torch.nn.functional as F
from torch import Tensor

TIE = 1e-6  # distances between features of length 1 that are nearer than this are equal


def herding(features: Tensor, number: int, repeats: bool = False, normalise: bool = True) -> Tensor:
    """Positions of ``number`` images of a class, whose running mean stays nearest to the class mean.

    They come in order of choice; all of them if there are fewer.

    ``features`` [n, D] of one class are brought to length 1 first, unless ``normalise`` is off. Any first
    part of the list is itself a choice by herding, so a list is shortened from its end. With ``repeats`` an
    image may be chosen again, as GLFC's code lets it. Rebuffi et al., iCaRL, CVPR 2017, algorithm 4.
    """
    features = F.normalize(features, dim=-1) if normalise else features
    mean, total = features.mean(0), torch.zeros_like(features[0])
    slack = TIE * torch.linalg.vector_norm(features, dim=-1).mean()
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen: list[int] = []
    for i in range(number if repeats else min(number, len(features))):
        gap = torch.linalg.vector_norm(mean - (total + features) / (i + 1), dim=-1)
        best = _lowest(gap.masked_fill(~free, torch.inf), slack)
        chosen.append(best)
        free[best] = repeats
        total = total + features[best]
    return torch.tensor(chosen, dtype=torch.int64)


def residual_herding(features: Tensor, number: int, turns: int = 1000) -> Tensor:
    """Positions of up to ``number`` images of a class, in order of choice.

    Turn by turn the image is taken whose feature, of length 1, points most towards w; then w, at first the
    mean, becomes w + mean - that feature, also where the image had been taken before. As in the code of
    PODNet, AFC and DyTox, which follows that of iCaRL. ``features`` [n, D] are of one class.
    """
    features = features / (torch.linalg.vector_norm(features, dim=-1, keepdim=True) + 1e-8)
    mean = features.mean(0)
    direction, chosen = mean, dict[int, None]()  # w
    for _ in range(turns):
        if len(chosen) >= min(number, len(features)):
            break
        best = _lowest(-(features @ direction), TIE)
        chosen[best] = None
        direction = direction + mean - features[best]
    return torch.tensor(list(chosen), dtype=torch.int64)


def _lowest(values: Tensor, slack: Tensor | float) -> int:
    """The first position of the least value; values within ``slack`` of it are equal to it.

    Two images of a class are equally far from their mean, so that rounding would choose between them.
    """
    return int((values <= values.min() + slack).nonzero()[0])
