"""Class statistics that hostile clients send: those far from the other clients' are left out before anything is merged.

A robust aggregator protects what a method averages; what it merges class by class (prototypes, Gaussians, sums of a survey)
is protected here, in one place for all methods (``--outliers``). The centre of a class is the geometric median of its
clients' means, which stays near the honest ones while more than half of them are honest (Pillutla et al., "Robust Aggregation for
Federated Learning", IEEE Transactions on Signal Processing 2022). What was admitted in an earlier round, when too few clients had
the class to tell, stays on the server.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fczoo.core.payload import Content, content_of, keep_rows
from fczoo.core.tree import Tree
from fczoo.core.types import Task

STEPS = 100  # of Weiszfeld's iteration
FEWEST = 3  # clients with a class, below which nobody can say who is right


class Means(NamedTuple):
    """What one upload says of classes; on the CPU."""

    prefix: str  # of the tensors that belong together
    labels: Tensor  # [g]
    values: Tensor  # mean of each class [g, D]
    present: Tensor  # [g], false where the client does not have the class


def leave_out(
    payloads: Sequence[Tree], contents: Mapping[str, Content], factor: float, task: Task
) -> tuple[list[Tree], dict[int, list[int]]]:
    """The uploads without far statistics, and the classes left out, by client.

    Far is a mean whose distance from the class's centre is more than ``factor`` times the median distance of the clients
    that have the class, of which there must be three.
    """
    uploads = [list(means_of(p, contents, task)) for p in payloads]
    out, left = [dict(p) for p in payloads], dict[int, list[int]]()
    for prefix in sorted({m.prefix for upload in uploads for m in upload}):
        groups = [next(m for m in upload if m.prefix == prefix) for upload in uploads]
        far = _far(groups, factor)
        for k, (group, bad) in enumerate(zip(groups, far, strict=True)):
            if bad.any():
                out[k] = keep_rows(out[k], prefix, ~bad)
                left.setdefault(int(payloads[k]["client"]), []).extend(group.labels[bad].tolist())
    return out, left


def means_of(payload: Tree, contents: Mapping[str, Content], task: Task) -> Iterator[Means]:
    """The groups of class means in an upload: rows beside a ``.label``, or one row a class of the task beside a ``.count``."""
    for name, value in payload.items():
        prefix, _, kind = name.rpartition(".")
        if content_of(name, contents) != "class means" or kind not in ("mean", "sum"):
            continue
        value, count = value.double().cpu(), payload.get(f"{prefix}.count", torch.ones(len(value))).cpu()
        mean = value if kind == "mean" else value / count[:, None].clamp(min=1)
        yield Means(
            f"{prefix}.",
            payload.get(f"{prefix}.label", torch.arange(task.start, task.stop)).cpu(),
            mean,
            count > 0,
        )


def geometric_median(points: Tensor) -> Tensor:
    """The point [D] with the least sum of distances to ``points`` [K, D], by Weiszfeld's iteration from the coordinate-wise median."""
    centre = points.median(0).values
    for _ in range(STEPS):
        near = 1 / torch.linalg.vector_norm(points - centre, dim=1).clamp(min=1e-12)
        centre = (near[:, None] * points).sum(0) / near.sum()
    return centre


def _far(groups: Sequence[Means], factor: float) -> list[Tensor]:
    """For each upload which of its rows [g] are too far from their class's centre."""
    far = [torch.zeros_like(g.present) for g in groups]
    for label in torch.cat([g.labels[g.present] for g in groups]).unique().tolist():
        rows = [
            (k, int(i))
            for k, g in enumerate(groups)
            for i in ((g.labels == label) & g.present).nonzero()[:, 0]
        ]
        if len(rows) < FEWEST:
            continue
        points = torch.stack([groups[k].values[i] for k, i in rows])
        centre = geometric_median(points)
        distance = torch.linalg.vector_norm(points - centre, dim=1)
        limit = (
            factor * distance.sort().values[(len(rows) - 1) // 2] + 1e-9 * centre.abs().max()
        )  # equal means differ by rounding
        for (k, i), d in zip(rows, distance, strict=True):
            far[k][i] = d > limit
    return far
