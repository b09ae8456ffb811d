"""Cosines, heads made of them, and losses on such heads (LUCIR; Hou et al., CVPR 2019)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Task


def cosines(features: Tensor, weights: Tensor) -> Tensor:
    """Cosines [B, C] between features [B, D] and class weights [C, D], or between queries and keys."""
    return F.normalize(features, dim=-1) @ F.normalize(weights, dim=-1).mT


def margin_ranking(scores: Tensor, batch: Batch, old: int, hardest: int, margin: float) -> Tensor:
    """Images of old classes should be nearer to their class than to the nearest new ones.

    Mean over the images of the first ``old`` classes and their ``hardest`` new classes j of
    [margin - cos_y + cos_j]_+; 0 where there is no such image. ``scores``: cosines [B, C], not scaled.
    """
    truth = scores.gather(1, batch.y[:, None])
    rivals = scores[:, old:].topk(min(hardest, scores.shape[1] - old), dim=1).values
    per_image = (margin - truth + rivals).clamp(min=0).mean(1)
    rehearsed = batch.w * (batch.y < old)
    return (per_image * rehearsed).sum() / rehearsed.sum().clamp(min=1)


def cosine_distance(features: Tensor, others: Tensor) -> Tensor:
    """1 - cos [B] of features and others [B, D]."""
    return 1 - (F.normalize(features, dim=-1) * F.normalize(others, dim=-1)).sum(-1)


def grown(state: Tree, task: Task, dim: int, rng: torch.Generator) -> Tree:
    """``head.old`` [o, D] with the rows of all finished tasks, ``head.new`` [c, D] and ``sigma`` as a task
    begins.

    New rows are random, as long as the old ones on average (1 in the first task), until they are imprinted.
    """
    if not state:
        new = torch.randn(task.size, dim, generator=rng)
        return {
            "head.old": torch.empty(0, dim),
            "head.new": F.normalize(new, dim=-1),
            "sigma": torch.ones(()),
        }
    old = torch.cat([state["head.old"], state["head.new"]])
    new = torch.randn(task.size, dim, generator=rng).to(old)
    length = torch.linalg.vector_norm(old, dim=-1).mean()
    return {**state, "head.old": old, "head.new": length * F.normalize(new, dim=-1)}


def imprinted(state: Tree, sums: Tree) -> Tree:
    """``head.new`` at its classes' mean features of length 1, each row as long as it was.

    ``sums``: ``class.count`` [c] and ``class.sum`` [c, D] of features of length 1; rows of classes that
    nobody holds stay.
    """
    rows = state["head.new"]
    means = F.normalize(sums["class.sum"], dim=-1).to(rows)
    means = means * torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return {**state, "head.new": torch.where(sums["class.count"][:, None] > 0, means, rows)}
