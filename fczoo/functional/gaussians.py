"""Gaussians of class features: sums that clients upload, and features that a server draws.

A server stores one row per client and class: ``gauss.label``, ``gauss.client``, ``gauss.count``
[g], ``gauss.mean`` [g, D] and either ``gauss.var`` [g, D] or ``gauss.cov`` [g, D, D]. Draws of
features use ``gauss.root`` [g, D, D] instead of ``gauss.cov``, see ``factorise``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree, drop
from fczoo.core.types import Batch, Task


def class_sums(features: Tensor, batch: Batch, task: Task) -> Tree:
    """Sum the features of each class of the current task over the real samples.

    Args:
        features: Features [B, D].
        batch: Labels [B] and weights [B]; padding has weight 0.
        task: The current task, with c classes.

    Returns:
        ``class.count`` [c] and ``class.sum`` [c, D].
    """
    hot = F.one_hot(batch.y - task.start, task.size).to(features.dtype) * batch.w[:, None]
    return {"class.count": hot.sum(0), "class.sum": hot.mT @ features.detach()}


JITTER = 1e-8  # added to variances, so that constant dimensions can be sampled


def moment_sums(features: Tensor, batch: Batch, task: Task, full: bool = False) -> Tree:
    """Sum the features and their squares for each class of the current task.

    All sums but the counts are in float64 (on mps, which lacks it, in float32). In float64 the
    squares of float32 values are exact. In float32 the rounding of sums exceeds a standard
    deviation that is small compared with the mean.

    Args:
        features: Features [B, D].
        batch: Labels [B] and weights [B]; padding has weight 0.
        task: The current task, with c classes.
        full: Sum products [c, D, D] instead of squares.

    Returns:
        ``class.count`` [c], ``class.sum`` [c, D] and ``class.squares`` [c, D]; with ``full``
            ``class.products`` [c, D, D] instead of the squares.
    """
    wide = features.detach().to(torch.float32 if features.device.type == "mps" else torch.float64)
    sums = class_sums(wide, batch, task)
    sums["class.count"] = sums["class.count"].to(features.dtype)
    if not full:
        return {**sums, "class.squares": class_sums(wide.square(), batch, task)["class.sum"]}
    hot = F.one_hot(batch.y - task.start, task.size).to(wide) * batch.w[:, None]
    return {**sums, "class.products": torch.einsum("bc,bi,bj->cij", hot, wide, wide)}


def gaussians(sums: Tree, first_class: int, single: bool) -> Tree:
    """Compute one Gaussian for each class that the client holds.

    It has an unbiased variance [D] or, from sums of products, an unbiased covariance [D, D].

    Args:
        sums: Sums of ``moment_sums``.
        first_class: Number of the first class in the sums.
        single: Whether to keep classes with one image. Their variance or covariance is the mean
            over the classes with more images, or 0 without such classes.

    Returns:
        ``gauss.label``, ``gauss.count`` [g], ``gauss.mean`` [g, D] and ``gauss.var`` [g, D] or
            ``gauss.cov`` [g, D, D], with the type of the counts.
    """
    present = sums["class.count"] > (0 if single else 1)
    dtype = sums["class.count"].dtype
    count = sums["class.count"][present].to(sums["class.sum"])
    mean = sums["class.sum"][present] / count[:, None]
    divisor, multiple = (count - 1).clamp(min=1), count > 1
    if "class.products" in sums:
        raw = (
            sums["class.products"][present]
            - count[:, None, None] * mean[:, :, None] * mean[:, None]
        )
        raw.diagonal(dim1=1, dim2=2).clamp_(min=0)
        name, spread = "gauss.cov", raw / divisor[:, None, None]
    else:
        raw = sums["class.squares"][present] - count[:, None] * mean.square()
        name, spread = "gauss.var", raw.clamp(min=0) / divisor[:, None]
    if multiple.any() and not multiple.all():
        spread = torch.where(
            multiple.view(-1, *[1] * (spread.dim() - 1)), spread, spread[multiple].mean(0)
        )
    return {
        "gauss.label": present.nonzero()[:, 0] + first_class,
        "gauss.count": count.to(dtype),
        "gauss.mean": mean.to(dtype),
        name: spread.to(dtype),
    }


def empty_gaussians(dim: int, full: bool = False) -> Tree:
    """Build the Gaussians of a server that does not have any yet.

    Args:
        dim: Feature dimension D.
        full: Covariances instead of variances.

    Returns:
        A tree of Gaussians with 0 rows.
    """
    numbers, rows = torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
    spread = {"gauss.cov": torch.empty(0, dim, dim)} if full else {"gauss.var": rows}
    return {
        "gauss.label": numbers,
        "gauss.client": numbers,
        "gauss.count": torch.empty(0),
        "gauss.mean": rows,
        **spread,
    }


def pool_gaussians(gauss: Tree) -> Tree:
    """Merge the Gaussians of all clients into one per class (CCVR, eqs. 3 and 4).

    With n = sum n_k and mu = sum n_k mu_k / n, the covariance is S = (sum (n_k - 1) S_k + sum n_k
    mu_k mu_k^T - n mu mu^T) / (n - 1). The code takes outer products of the differences to mu,
    which is equal and more precise.

    Args:
        gauss: Gaussians per client and class.

    Returns:
        Gaussians per class, with ``gauss.client`` -1.
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
    """Draw features and their labels from the Gaussians.

    First a class is drawn, with equal probability or ``by_count``. Then a client is drawn by its
    share of the class, then a feature from its Gaussian.

    Args:
        gauss: Gaussians of the class features; covariances as factors, see ``factorise``.
        number: Number of features.
        rng: Random generator.
        spread: Factor on the variances.
        by_count: Draw classes in proportion to their counts.

    Returns:
        Features [number, D] and labels [number].
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
        return mean[chosen] + (
            spread * (gauss["gauss.var"][chosen] + JITTER)
        ).sqrt() * noise, labels[chosen]
    features = mean[chosen]
    for row in chosen.unique():  # a factor for each draw would need number x D x D values
        rows = chosen == row
        features[rows] += spread**0.5 * noise[rows] @ gauss["gauss.root"][row].mT
    return features, labels[chosen]


def draw_per_gaussian(gauss: Tree, number: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the same number of features from each Gaussian, in random order.

    It uses the symmetric root of each covariance. Unlike eigenvectors, it does not jump with
    rounding.

    Args:
        gauss: Gaussians with covariances, g rows.
        number: Features per row.
        rng: Random generator.

    Returns:
        Features [g * number, D] and their labels [g * number].
    """
    mean, cov = gauss["gauss.mean"], gauss["gauss.cov"]
    values, vectors = torch.linalg.eigh(cov.double())
    roots = ((vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.mT).to(mean)
    shape = (len(mean), number, mean.shape[1])
    noise = torch.randn(shape, generator=rng, device=rng.device, dtype=mean.dtype)
    features = (mean[:, None] + noise @ roots).flatten(0, 1)
    order = torch.randperm(len(features), generator=rng, device=rng.device)
    return features[order], gauss["gauss.label"].repeat_interleave(number)[order]


def factorise(gauss: Tree) -> Tree:
    """Replace each covariance S by one factor A, A A^T = S + ``JITTER``, so that draws are cheap.

    A is the Cholesky factor. If S, rounded, is not positive definite, the eigenvectors give A:
    covariances of fewer images than dimensions lack full rank.

    Args:
        gauss: Gaussians with covariances or variances, g rows.

    Returns:
        The Gaussians with ``gauss.root`` [g, D, D] instead of covariances.
    """
    if "gauss.cov" not in gauss:
        return gauss
    cov = gauss["gauss.cov"].double()
    jitter = JITTER * torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device)
    roots, failures = torch.linalg.cholesky_ex(cov + jitter)
    for row in failures.nonzero()[:, 0].tolist():
        values, vectors = torch.linalg.eigh(cov[row])
        roots[row] = vectors * (values.clamp(min=0) + JITTER).sqrt()
    return {**drop(gauss, "gauss.cov"), "gauss.root": roots.to(gauss["gauss.mean"])}
