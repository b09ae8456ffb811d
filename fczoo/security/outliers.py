"""Outlier detection: class statistics of hostile clients are left out before the merge.

A robust aggregator protects the tensors that a method averages. This module protects class
statistics (prototypes, Gaussians, collected sums) in one place for all methods (``--outliers``). It
leaves out statistics that are far from those of the other clients. The centre of a class is the
geometric median of its clients' means. It stays near the honest means while more than half of them
are honest (Pillutla et al., "Robust Aggregation for Federated Learning", IEEE Transactions on
Signal Processing 2022). Statistics of an earlier round stay on the server, even if that round had
too few clients per class to detect outliers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.payload import Group, Payload, Uploads, contents, keep_classes
from fczoo.core.types import Task

EXTREME_FACTOR = 30.0  # median distances beyond which statistics are absurd rather than skewed
STEPS = 100  # of Weiszfeld's iteration
MIN_CLIENTS = 3  # clients with a class; with fewer, outliers cannot be identified


class Means(NamedTuple):
    """Class means in one upload, on the CPU."""

    labels: Tensor  # [g]
    values: Tensor  # mean of each class [g, D]
    present: Tensor  # [g], false where the client does not have the class


def leave_out(
    payloads: Sequence[Payload], uploads: Uploads, factor: float, task: Task
) -> tuple[list[Payload], dict[int, list[int]]]:
    """Return the uploads without outlier statistics, and the omitted classes by client.

    A mean is an outlier if its distance from the class's centre exceeds ``factor`` times the median
    distance. The median is over the clients that have the class; there must be three.
    """
    out, classes_left_out = list(payloads), dict[int, list[int]]()
    for prefix, group in groups_with_means(uploads).items():
        group_means = [means_of(p, prefix, group, task) for p in payloads]
        if any(means is None for means in group_means):  # the group is not part of this exchange
            continue
        uploads_means = [means for means in group_means if means is not None]
        for k, (means, outliers) in enumerate(
            zip(uploads_means, _outlier_masks(uploads_means, factor), strict=True)
        ):
            if outliers.any():
                out[k] = keep_classes(out[k], prefix, group, ~outliers)
                classes_left_out.setdefault(payloads[k].client, []).extend(
                    means.labels[outliers].tolist()
                )
    return out, classes_left_out


def extreme_clients(payloads: Sequence[Payload], uploads: Uploads, task: Task) -> list[int]:
    """Return the clients with class statistics beyond ``EXTREME_FACTOR`` median distances.

    The centre is the coordinate-wise median, which is cheap; every run performs this check.
    """
    clients = set[int]()
    for prefix, group in groups_with_means(uploads).items():
        group_means = [means_of(p, prefix, group, task) for p in payloads]
        uploads_means = [means for means in group_means if means is not None]
        if len(uploads_means) == len(group_means) and uploads_means:
            for payload, outliers in zip(
                payloads,
                _outlier_masks(uploads_means, EXTREME_FACTOR, coordinate_median),
                strict=True,
            ):
                clients |= {payload.client} if outliers.any() else set()
    return sorted(clients)


def groups_with_means(uploads: Uploads) -> Uploads:
    """Return the declared groups that hold a mean or sum of each class."""
    return {p: g for p, g in uploads.items() if {"mean", "sum"} & set(g.statistics)}


def means_of(payload: Payload, prefix: str, group: Group, task: Task) -> Means | None:
    """Return the class means of a group in an upload; None if it does not contain any.

    They are the means of the group, or its sums divided by its counts.
    """
    name = next(
        (n for n in ("mean", "sum") if n in group.statistics and f"{prefix}{n}" in payload), None
    )
    if name is None:
        return None
    value = payload[f"{prefix}{name}"].double().cpu()
    count = payload.get(f"{prefix}count", torch.ones(len(value))).cpu()
    mean = value if name == "mean" else value / count[:, None].clamp(min=1)
    labels = payload.get(f"{prefix}label", torch.arange(task.stop - len(value), task.stop)).cpu()
    return Means(labels, mean, count > 0)


def geometric_median(points: Tensor) -> Tensor:
    """Compute the point [D] with the least sum of distances to ``points`` [K, D].

    Weiszfeld's iteration starts at the coordinate-wise median.
    """
    centre = coordinate_median(points)
    for _ in range(STEPS):
        weights = 1 / torch.linalg.vector_norm(points - centre, dim=1).clamp(min=1e-12)
        centre = (weights[:, None] * points).sum(0) / weights.sum()
    return centre


def coordinate_median(points: Tensor) -> Tensor:
    """Compute the coordinate-wise median [D] of ``points`` [K, D]."""
    return points.median(0).values


def _outlier_masks(
    groups: Sequence[Means], factor: float, centre_of: Callable[[Tensor], Tensor] = geometric_median
) -> list[Tensor]:
    """Return for each upload a mask of the rows [g] that are too far from their class's centre."""
    masks = [torch.zeros_like(g.present) for g in groups]
    for label in torch.cat([g.labels[g.present] for g in groups]).unique().tolist():
        rows = []  # (upload, row) of the class
        for k, group in enumerate(groups):
            in_class = (group.labels == label) & group.present
            rows += [(k, i) for i in in_class.nonzero()[:, 0].tolist()]
        if len(rows) < MIN_CLIENTS:
            continue
        points = torch.stack([groups[k].values[i] for k, i in rows])
        centre = centre_of(points)
        distance = torch.linalg.vector_norm(points - centre, dim=1)
        median = distance.sort().values[(len(rows) - 1) // 2]
        limit = factor * median + 1e-9 * centre.abs().max()  # equal means differ by rounding
        for (k, i), d in zip(rows, distance, strict=True):
            masks[k][i] = d > limit
    return masks


Centre = Literal["median", "trimmed_mean", "geometric_median"]


def check_centre(centre: Centre, method: str, uploads: Uploads) -> None:
    """Raise FczooError if a method has no class means, or statistics that a centre cannot merge."""
    statistics = {
        name for group in groups_with_means(uploads).values() for name in group.statistics
    }
    if not statistics:
        raise FczooError(
            f"--merge-statistics merges class means, but {method} does not upload any; "
            f"leave it out, or see --aggregator"
        )
    if "second moments" in contents(uploads):
        raise FczooError(
            f"--merge-statistics merges class by class, but {method} also uploads second moments "
            f"over all classes; leave it out"
        )
    if centre != "geometric_median" and statistics & {"cov", "products"}:
        raise FczooError(
            f"--merge-statistics {centre} may turn the covariances that {method} uploads into an "
            "invalid covariance; use geometric_median"
        )


def replace_by_centres(
    payloads: Sequence[Payload], uploads: Uploads, centre: Centre, task: Task
) -> list[Payload]:
    """Replace every client's statistics of a class by the robust centre of that class."""
    tensors = [dict(p) for p in payloads]
    for prefix, group in groups_with_means(uploads).items():
        group_means = [means_of(p, prefix, group, task) for p in payloads]
        uploads_means = [means for means in group_means if means is not None]
        if len(uploads_means) < len(group_means):  # the group is not part of this exchange
            continue
        for name in (f"{prefix}{n}" for n in group.statistics if n not in ("label", "count")):
            if not all(name in p for p in payloads):
                continue
            is_sum = name.endswith(("sum", "squares", "products"))
            for label in torch.cat([m.labels[m.present] for m in uploads_means]).unique().tolist():
                places = [
                    (k, int(row))
                    for k, means in enumerate(uploads_means)
                    for row in ((means.labels == label) & means.present).nonzero()[:, 0]
                ]
                sizes = [
                    float(payloads[k][f"{prefix}count"][row]) if is_sum else 1.0
                    for k, row in places
                ]
                rows = [
                    payloads[k][name][row].double() / n
                    for (k, row), n in zip(places, sizes, strict=True)
                ]
                merged_row = _centre(torch.stack(rows), centre)
                for (k, row), n in zip(places, sizes, strict=True):
                    tensor = tensors[k][name].clone()
                    tensor[row] = (n * merged_row).to(tensor)
                    tensors[k][name] = tensor
    return [p.holding(t) for p, t in zip(payloads, tensors, strict=True)]


def _centre(rows: Tensor, centre: Centre) -> Tensor:
    """Compute the robust centre [...] of the rows [K, ...]."""
    if len(rows) < 3:
        return rows.mean(0)
    return CENTRES[centre](rows.flatten(1)).view(rows.shape[1:])


def _median(rows: Tensor) -> Tensor:
    return _trimmed_mean(rows, (len(rows) - 1) // 2)


def _trimmed_mean(rows: Tensor, trim: int = 1) -> Tensor:
    return rows.sort(0).values[trim : len(rows) - trim].mean(0)


CENTRES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "median": _median,  # of every coordinate
    "trimmed_mean": _trimmed_mean,  # of every coordinate, without its largest and its smallest value
    "geometric_median": geometric_median,
}
