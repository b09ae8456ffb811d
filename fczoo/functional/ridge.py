"""Ridge regression on one-hot labels, solved from sums over images."""

import torch
from torch import Tensor


def solve_ridge(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """W [M, C] with (G + ridge I) W = Q, in float64.

    ``gram`` G [M, M] is the sum of outer products of the features, ``target`` Q [M, C] the sum of features of
    each class. By Cholesky; where G + ridge I is singular (``ridge`` 0), the solution of smallest norm.
    """
    matrix = gram.double() + ridge * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return torch.cholesky_solve(target.double(), factor)
    inverse: Tensor = torch.linalg.pinv(matrix, hermitian=True)
    return inverse @ target.double()


def with_free_bias(gram: Tensor, target: Tensor, count: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """W [M, C] and a bias b [C] that the ridge does not hold back, from the same sums.

    ``count`` [C] is the number of images of each class. With n images, mean feature mu and class shares p:
    W = (G - n mu mu^T + ridge I)^-1 (Q - n mu p^T), b = p - W^T mu.
    """
    n = count.sum()
    mean, share = target.sum(1) / n, count.double() / n  # mu, p
    weight = solve_ridge(gram - n * mean.outer(mean), target - n * mean.outer(share), ridge)
    return weight, share - mean @ weight
