"""Robust merging of class statistics (``--merge-statistics``), which no single client can decide.

A method merges statistics of classes in its own way: sums, pooled Gaussians, rows next to each
other. Before that, every client's mean, variance or covariance of a class is replaced. The
replacement is the robust centre over all clients that have the class; counts and labels do not
change. All further computations of the method start from the centre. With one or two clients per
class the centre is their plain mean, as outliers cannot be identified.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload, Uploads, contents
from fczoo.core.types import Task
from fczoo.security.outliers import geometric_median, groups_with_means, means_of

Centre = Literal["median", "trimmed_mean", "geometric_median"]


def check_centre(centre: Centre, method: str, uploads: Uploads) -> None:
    """Raise FczooError if a method has no class means, or statistics that a centre would spoil."""
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
            f"--merge-statistics {centre} of the covariances that {method} uploads need not be a "
            f"covariance; take geometric_median"
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
                middle = _centre(torch.stack(rows), centre)
                for (k, row), n in zip(places, sizes, strict=True):
                    tensor = tensors[k][name].clone()
                    tensor[row] = (n * middle).to(tensor)
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
