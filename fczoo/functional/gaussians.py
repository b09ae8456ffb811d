"""Gaussians of class features: the sums that clients send, and the features that a server draws.

A server holds them side by side, one row a client and class: ``gauss.label``, ``gauss.client``,
``gauss.count`` [g], ``gauss.mean`` [g, D] and either ``gauss.var`` [g, D] or ``gauss.cov`` [g, D, D].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch, Task


def class_sums(features: Tensor, batch: Batch, task: Task) -> Tree:
    """Count [c] and feature sum [c, D] of each class of the current task over the real samples."""
    hot = F.one_hot(batch.y - task.start, task.size).to(features.dtype) * batch.w[:, None]
    return {"class.count": hot.sum(0), "class.sum": hot.mT @ features.detach()}


JITTER = 1e-8  # added to variances, so that a dimension without spread can be drawn


def moment_sums(features: Tensor, batch: Batch, task: Task, full: bool = False) -> Tree:
    """Count [c], sum [c, D] and sum of squares [c, D] of the features of each class of the current task.

    With ``full``, sums of products [c, D, D] in place of those of squares. All but the counts are in float64
    (on mps, which has none, in float32), where the squares of float32 are exact: the rounding of sums in
    float32 is larger than a spread that is small against the mean.
    """
    wide = features.detach().to(torch.float32 if features.device.type == "mps" else torch.float64)
    sums = class_sums(wide, batch, task)
    sums["class.count"] = sums["class.count"].to(features.dtype)
    if not full:
        return {**sums, "class.squares": class_sums(wide.square(), batch, task)["class.sum"]}
    hot = F.one_hot(batch.y - task.start, task.size).to(wide) * batch.w[:, None]
    return {**sums, "class.products": torch.einsum("bc,bi,bj->cij", hot, wide, wide)}


def gaussians(sums: Tree, first_class: int, single: bool) -> Tree:
    """One row for each class that the client holds: label, count n, mean [D], unbiased spread.

    The spread is a variance [D] or, from sums of products, a covariance [D, D]. Rows have the type of the
    counts.

    A class with one image has no spread of its own: with ``single`` it gets the mean spread of the
    client's other classes (0 if none), so that its only holder is not lost; else it is left out.
    """
    held = sums["class.count"] > (0 if single else 1)
    dtype = sums["class.count"].dtype
    count = sums["class.count"][held].to(sums["class.sum"])
    mean = sums["class.sum"][held] / count[:, None]
    divisor, several = (count - 1).clamp(min=1), count > 1
    if "class.products" in sums:
        raw = sums["class.products"][held] - count[:, None, None] * mean[:, :, None] * mean[:, None]
        raw.diagonal(dim1=1, dim2=2).clamp_(min=0)
        name, spread = "gauss.cov", raw / divisor[:, None, None]
    else:
        raw = sums["class.squares"][held] - count[:, None] * mean.square()
        name, spread = "gauss.var", raw.clamp(min=0) / divisor[:, None]
    if several.any() and not several.all():
        spread = torch.where(several.view(-1, *[1] * (spread.dim() - 1)), spread, spread[several].mean(0))
    return {
        "gauss.label": held.nonzero()[:, 0] + first_class,
        "gauss.count": count.to(dtype),
        "gauss.mean": mean.to(dtype),
        name: spread.to(dtype),
    }


def no_gaussians(dim: int, full: bool = False) -> Tree:
    """The Gaussians of a server that has none yet: no rows; variances, or covariances with ``full``."""
    numbers, rows = torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
    spread = {"gauss.cov": torch.empty(0, dim, dim)} if full else {"gauss.var": rows}
    return {
        "gauss.label": numbers,
        "gauss.client": numbers,
        "gauss.count": torch.empty(0),
        "gauss.mean": rows,
        **spread,
    }


def pooled(gauss: Tree) -> Tree:
    """One Gaussian a class, with the moments of all its clients' features put together (CCVR, eqs. 3 and 4).

    n = sum n_k, mu = sum n_k mu_k / n, S = (sum (n_k - 1) S_k + sum n_k mu_k mu_k^T - n mu mu^T) / (n -
    1); the outer products are taken of the distances to mu, which is the same and keeps its digits.
    """
    classes, class_of_row = gauss["gauss.label"].unique(return_inverse=True)
    count, mean = gauss["gauss.count"], gauss["gauss.mean"]

    def total(rows: Tensor) -> Tensor:
        sums = torch.zeros(len(classes), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        return sums.index_add_(0, class_of_row, rows)

    n = total(count)
    centre = total(count[:, None] * mean) / n[:, None]  # mu [c, D]
    gap = mean - centre[class_of_row]
    if "gauss.cov" in gauss:
        inside, between, name = gauss["gauss.cov"], gap[:, :, None] * gap[:, None], "gauss.cov"
    else:
        inside, between, name = gauss["gauss.var"], gap.square(), "gauss.var"
    shape = (-1, *[1] * (inside.dim() - 1))
    squares = total((count - 1).view(shape) * inside + count.view(shape) * between)
    spread = squares / (n - 1).clamp(min=1).view(shape)  # S
    return {
        "gauss.label": classes,
        "gauss.client": torch.full_like(classes, -1),
        "gauss.count": n,
        "gauss.mean": centre,
        name: spread,
    }


def draw_features(
    gauss: Tree, number: int, rng: torch.Generator, spread: float = 1.0, by_count: bool = False
) -> tuple[Tensor, Tensor]:
    """``number`` features [number, D] drawn from the Gaussians, and their labels [number].

    The class is drawn with equal probability or ``by_count``, then the client by its share of the class,
    then a feature from its Gaussian with the variance multiplied by ``spread``.
    """
    labels, count, mean = gauss["gauss.label"], gauss["gauss.count"], gauss["gauss.mean"]
    classes, class_of_row = labels.unique(return_inverse=True)
    total = torch.zeros(len(classes), dtype=count.dtype, device=count.device)
    total.index_add_(0, class_of_row, count)
    omega = total / total.sum() if by_count else torch.full_like(total, 1 / len(total))
    probability = omega[class_of_row] * count / total[class_of_row]
    chosen = torch.multinomial(probability, number, replacement=True, generator=rng)
    noise = torch.randn(number, mean.shape[1], generator=rng, device=rng.device, dtype=mean.dtype)
    if "gauss.var" in gauss:
        return mean[chosen] + (spread * (gauss["gauss.var"][chosen] + JITTER)).sqrt() * noise, labels[chosen]
    roots = _matrix_roots(gauss["gauss.cov"]).to(mean)
    return mean[chosen] + spread**0.5 * torch.einsum("bij,bj->bi", roots[chosen], noise), labels[chosen]


def draw_of_each(gauss: Tree, number: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """``number`` features of each row's Gaussian, in random order, and their labels; rows have covariances.

    By the symmetric root of each covariance, which unlike eigenvectors does not jump with rounding.
    """
    mean, cov = gauss["gauss.mean"], gauss["gauss.cov"]
    values, vectors = torch.linalg.eigh(cov.double())
    roots = ((vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.mT).to(mean)
    shape = (len(mean), number, mean.shape[1])
    noise = torch.randn(shape, generator=rng, device=rng.device, dtype=mean.dtype)
    features = (mean[:, None] + noise @ roots).flatten(0, 1)
    order = torch.randperm(len(features), generator=rng, device=rng.device)
    return features[order], gauss["gauss.label"].repeat_interleave(number)[order]


def _matrix_roots(covariances: Tensor) -> Tensor:
    """A with A A^T = S + ``JITTER`` for each S [g, D, D], by its eigenvectors, as S may lack full rank."""
    values, vectors = torch.linalg.eigh(covariances.double())
    roots: Tensor = vectors * (values.clamp(min=0) + JITTER).sqrt()[:, None]
    return roots
