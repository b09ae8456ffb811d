"""Class statistics of hostile clients: those far from the other clients' are left out before the merge.

A robust aggregator protects what a method averages; what it merges class by class (prototypes, Gaussians,
sums of a survey) is protected here, in one place for all methods (``--outliers``). The centre of a class is
the geometric median of its clients' means, which stays near the honest ones while more than half of them
are honest (Pillutla et al., "Robust Aggregation for Federated Learning", IEEE Transactions on Signal
Processing 2022). What was admitted in an earlier round, when too few clients had the class to tell, stays
on the server.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fczoo.core.payload import Group, Payload, Uploads, keep_classes
from fczoo.core.types import Task

FAR = 30.0  # median distances beyond which statistics are absurd rather than skewed
STEPS = 100  # of Weiszfeld's iteration
FEWEST = 3  # clients with a class, below which nobody can say who is right


class Means(NamedTuple):
    """What one upload says of classes; on the CPU."""

    labels: Tensor  # [g]
    values: Tensor  # mean of each class [g, D]
    present: Tensor  # [g], false where the client does not have the class


def leave_out(
    payloads: Sequence[Payload], uploads: Uploads, factor: float, task: Task
) -> tuple[list[Payload], dict[int, list[int]]]:
    """The uploads without far statistics, and the classes left out, by client.

    Far is a mean whose distance from the class's centre is more than ``factor`` times the median distance
    of the clients that have the class, of which there must be three.
    """
    out, left = list(payloads), dict[int, list[int]]()
    for prefix, group in with_means(uploads).items():
        found = [means_of(p, prefix, group, task) for p in payloads]
        if any(means is None for means in found):  # the group is not part of this exchange
            continue
        every = [means for means in found if means is not None]
        for k, (means, far) in enumerate(zip(every, _far(every, factor), strict=True)):
            if far.any():
                out[k] = keep_classes(out[k], prefix, group, ~far)
                left.setdefault(payloads[k].client, []).extend(means.labels[far].tolist())
    return out, left


def far_apart(payloads: Sequence[Payload], uploads: Uploads, task: Task) -> list[int]:
    """Clients with statistics of a class over ``FAR`` median distances from the others'.

    The centre is the coordinate-wise median, which costs little, as this is looked at in every run.
    """
    found = set[int]()
    for prefix, group in with_means(uploads).items():
        every = [means_of(p, prefix, group, task) for p in payloads]
        known = [means for means in every if means is not None]
        if len(known) == len(every) and known:
            for payload, far in zip(payloads, _far(known, FAR, middle), strict=True):
                found |= {payload.client} if far.any() else set()
    return sorted(found)


def with_means(uploads: Uploads) -> Uploads:
    """The declared groups that hold a mean or sum of each class."""
    return {p: g for p, g in uploads.items() if {"mean", "sum"} & set(g.statistics)}


def means_of(payload: Payload, prefix: str, group: Group, task: Task) -> Means | None:
    """The class means of a group in an upload, from its means or its sums over counts; None without any."""
    name = next((n for n in ("mean", "sum") if n in group.statistics and f"{prefix}{n}" in payload), None)
    if name is None:
        return None
    value = payload[f"{prefix}{name}"].double().cpu()
    count = payload.get(f"{prefix}count", torch.ones(len(value))).cpu()
    mean = value if name == "mean" else value / count[:, None].clamp(min=1)
    labels = payload.get(f"{prefix}label", torch.arange(task.stop - len(value), task.stop)).cpu()
    return Means(labels, mean, count > 0)


def geometric_median(points: Tensor) -> Tensor:
    """The point [D] with the least sum of distances to ``points`` [K, D].

    By Weiszfeld's iteration, from the coordinate-wise median.
    """
    centre = middle(points)
    for _ in range(STEPS):
        near = 1 / torch.linalg.vector_norm(points - centre, dim=1).clamp(min=1e-12)
        centre = (near[:, None] * points).sum(0) / near.sum()
    return centre


def middle(points: Tensor) -> Tensor:
    """The coordinate-wise median [D] of ``points`` [K, D]."""
    return points.median(0).values


def _far(
    groups: Sequence[Means], factor: float, centre_of: Callable[[Tensor], Tensor] = geometric_median
) -> list[Tensor]:
    """For each upload which of its rows [g] are too far from their class's centre."""
    far = [torch.zeros_like(g.present) for g in groups]
    for label in torch.cat([g.labels[g.present] for g in groups]).unique().tolist():
        rows = []  # (upload, row) of the class
        for k, group in enumerate(groups):
            own = (group.labels == label) & group.present
            rows += [(k, i) for i in own.nonzero()[:, 0].tolist()]
        if len(rows) < FEWEST:
            continue
        points = torch.stack([groups[k].values[i] for k, i in rows])
        centre = centre_of(points)
        distance = torch.linalg.vector_norm(points - centre, dim=1)
        median = distance.sort().values[(len(rows) - 1) // 2]
        limit = factor * median + 1e-9 * centre.abs().max()  # equal means differ by rounding
        for (k, i), d in zip(rows, distance, strict=True):
            far[k][i] = d > limit
    return far
