"""New rows that are orthogonal to older ones: where a task's prompt components begin (CODA-Prompt)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def orthonormal(old: Tensor, draws: Tensor) -> Tensor:
    """Unit rows [m, D] from ``draws`` [m, D], orthogonal to each other and to the rows ``old`` [n, D]."""
    basis, scale = torch.linalg.qr(torch.cat([old, draws]).double().mT)
    completed: Tensor = (basis * scale.diagonal().sign()).mT[len(old) :]
    return completed.to(draws)


def gram_schmidt(old: Tensor, draws: Tensor) -> Tensor:
    """Classical Gram-Schmidt as released: rows [m, D] of length 1 from ``draws`` [m, D] and ``old`` [n, D].

    From each draw its projections on all earlier rows are subtracted at once. Where these are not orthogonal
    to each other, the result is not orthogonal to them either.
    """
    rows = list(old)
    for draw in draws:
        projections = [(draw @ row) / (row @ row) * row for row in rows]
        rows.append(draw - torch.stack(projections).sum(0) if projections else draw)
    return F.normalize(torch.stack(rows[len(old) :]), dim=-1)
