"""Several proxies a class, each class's answer an average over them (PODNet; Douillard et al., ECCV 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree


def proxy_logits(features: Tensor, proxies: Tensor) -> Tensor:
    """Logits y [B, C] of features [B, D] by proxies [C, K, D].

    s_k = 2 cos(f, w_k) - 2, and y = sum_k softmax_k(s)_k s_k: the nearer a proxy, the more it counts.
    """
    scores = F.normalize(features, dim=-1) @ F.normalize(proxies, dim=-1).flatten(0, 1).mT
    scores = 2 * scores.unflatten(-1, proxies.shape[:2]) - 2
    logits: Tensor = (scores.softmax(-1) * scores).sum(-1)
    return logits


def nca(logits: Tensor, labels: Tensor, eta: Tensor, margin: float, as_released: bool = False) -> Tensor:
    """NCA loss [B] of logits y [B, C]: [-eta (y_t - margin) + log sum_{c != t} exp(eta y_c)]_+.

    ``as_released``: without hinge, where the margin cancels and the true class counts as exp(0) beside the
    others: m - eta y_t + log(1 + sum_{c != t} exp(eta y_c - m)), m the largest eta y_c.
    """
    scaled = eta * logits
    truth = scaled.gather(1, labels[:, None])[:, 0]
    own = F.one_hot(labels, logits.shape[1]) > 0
    if as_released:
        top = scaled.max(1).values
        return top - truth + (scaled - top[:, None]).masked_fill(own, 0.0).logsumexp(1)
    others = scaled.masked_fill(own, torch.finfo(scaled.dtype).min).logsumexp(1)
    return (eta * margin - truth + others).clamp(min=0)


def imprinted_proxies(state: Tree, sums: Tree, rng: torch.Generator) -> Tree:
    """``proxy.new`` [c, K, D] drawn about its classes' mean features of length 1, as long as they were.

    From N(unit mean, variance of the unit features); ``sums``: ``class.count`` [c], ``class.sum`` and
    ``class.squares`` [c, D] of features of length 1. Proxies of classes that nobody holds stay.
    """
    rows, count = state["proxy.new"], sums["class.count"][:, None].clamp(min=1)
    mean = sums["class.sum"] / count
    spread = (sums["class.squares"] / count - mean.square()).clamp(min=0).sqrt()
    noise = torch.randn(rows.shape, generator=rng, device=rng.device).to(mean)
    drawn = F.normalize(mean, dim=-1)[:, None] + spread[:, None] * noise
    drawn = drawn.to(rows) * torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return {**state, "proxy.new": torch.where((sums["class.count"] > 0)[:, None, None], drawn, rows)}
