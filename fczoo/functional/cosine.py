"""Cosine similarities, cosine heads and losses on them (LUCIR; Hou et al., CVPR 2019)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Task


def cosines(features: Tensor, weights: Tensor) -> Tensor:
    """Compute cosine similarities between features and class weights, or queries and keys.

    Args:
        features: Features or queries [B, D].
        weights: Class weights or keys [C, D].

    Returns:
        Cosines [B, C].
    """
    return F.normalize(features, dim=-1) @ F.normalize(weights, dim=-1).mT


def margin_ranking(scores: Tensor, batch: Batch, old: int, hardest: int, margin: float) -> Tensor:
    """Compute the margin ranking loss: old images closer to their class than to new classes.

    The loss is the mean over the images of old classes, and over their hardest new classes j, of
    [margin - cos_y + cos_j]_+.

    Args:
        scores: Cosines [B, C], not scaled.
        batch: Labels and weights of the images.
        old: Number of old classes; these are the first ones.
        hardest: Number of new classes with the highest cosine that count per image.
        margin: Margin between the cosines.

    Returns:
        The loss; 0 if the batch has no image of an old class.
    """
    truth = scores.gather(1, batch.y[:, None])
    rivals = scores[:, old:].topk(min(hardest, scores.shape[1] - old), dim=1).values
    per_image = (margin - truth + rivals).clamp(min=0).mean(1)
    weights = batch.w * (batch.y < old)
    return (per_image * weights).sum() / weights.sum().clamp(min=1)


def cosine_distance(features: Tensor, others: Tensor) -> Tensor:
    """Compute the cosine distance 1 - cos [B] between two sets of features, row by row.

    Args:
        features: Features [B, D].
        others: Features to compare with [B, D].

    Returns:
        Distances [B].
    """
    return 1 - (F.normalize(features, dim=-1) * F.normalize(others, dim=-1)).sum(-1)


def grow_head(state: Tree, task: Task, dim: int, rng: torch.Generator) -> Tree:
    """Build the cosine head at the start of a task.

    New rows are random until they are imprinted. They are as long as the old ones on average, and
    of length 1 in the first task.

    Args:
        state: State after the previous task; empty in the first task.
        task: The task that starts, with c classes.
        dim: Feature dimension D.
        rng: Generator of the new rows.

    Returns:
        The state with ``head.old`` [o, D], the rows of all finished tasks, ``head.new`` [c, D] and
            ``sigma``, the scale of the cosines.
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


def imprint_head(state: Tree, sums: Tree) -> Tree:
    """Set ``head.new`` to the mean features of its classes, with the length of each row unchanged.

    Args:
        state: State with ``head.new`` [c, D].
        sums: ``class.count`` [c] and ``class.sum`` [c, D] of features of length 1.

    Returns:
        The state with imprinted rows. Rows of classes without images do not change.
    """
    rows = state["head.new"]
    means = F.normalize(sums["class.sum"], dim=-1).to(rows)
    means = means * torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return {**state, "head.new": torch.where(sums["class.count"][:, None] > 0, means, rows)}
