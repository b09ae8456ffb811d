"""Tools of the tests of methods: tolerance, width of the test backbone, batches."""

import torch
from torch import Tensor

from fczoo import Batch

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64
DIM = 32


def batch(
    x: Tensor, y: list[int] | Tensor, t: Tensor | None = None, w: Tensor | None = None
) -> Batch:
    """Make a batch whose images are their own query features.

    Args:
        x: Features [n, D].
        y: Labels [n].
        t: Random numbers [n, columns]; no columns without them.
        w: Weights of the images [n]; ones without them.
    """
    y = torch.as_tensor(y)
    return Batch(
        x,
        y,
        torch.ones(len(y), dtype=x.dtype) if w is None else w,
        x,
        x.new_empty(len(y), 0) if t is None else t,
    )
