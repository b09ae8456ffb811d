"""Colliding effect and momentum effect (DDE; Hu et al., CVPR 2021)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def neighbours(features: Tensor, pool: Tensor, own: Tensor, number: int) -> Tensor:
    """[n, K] rows of the ``pool`` [m, D] that are nearest to each of the ``features`` [n, D], nearest first.

    Both are brought to length 1. ``own`` [n]: the feature's own row in the pool, which is none of its
    neighbours; -1 where it is not in there. K is ``number``, or what the pool allows to all: m - 1.
    """
    distance = torch.cdist(F.normalize(features, dim=-1), F.normalize(pool, dim=-1))
    itself = torch.arange(len(pool), device=own.device) == own[:, None]
    distance = distance.masked_fill(itself, torch.inf)
    return distance.topk(min(number, len(pool) - 1), dim=1, largest=False).indices


def colliding_effect(logits: Tensor, labels: Tensor, answers: Tensor) -> Tensor:
    """-log(p_y / 2 + mean_j q_jy / 2), [B]: p the softmax of logits [B, C], q_j those of the neighbours.

    ``answers``: q [B, K, C], without gradient; with K = 0 it is the cross-entropy.
    """
    log_p = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    if not answers.shape[1]:
        return -log_p
    others = answers.mean(1).gather(1, labels[:, None])[:, 0]
    return -torch.logaddexp(log_p, others.clamp(min=torch.finfo(log_p.dtype).tiny).log()) + math.log(2)


def without_momentum(features: Tensor, rows: Tensor, direction: Tensor, sigma: Tensor, part: float) -> Tensor:
    """z' = sigma W^ (f^ - part <f^, h^> h^), [B, C]: logits without ``part`` of what points along h.

    ``features`` f [B, D], class weights ``rows`` [C, D] and ``direction`` h [D] are brought to length 1; a
    direction of 0 takes nothing away.
    """
    f, h = F.normalize(features, dim=-1), F.normalize(direction, dim=-1)
    logits: Tensor = sigma * (f - part * (f @ h)[:, None] * h) @ F.normalize(rows, dim=-1).mT
    return logits
