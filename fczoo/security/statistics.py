"""Robust merging of class statistics (``--merge-statistics``): no client alone decides on a class.

A method merges statistics of classes in its own way: sums, pooled Gaussians, rows side by side. Before it
does, every client's mean, variance or covariance of a class is replaced by the robust centre of those of all
clients that have the class; counts and labels stay. Whatever the method then computes, it computes from the
centre. With one or two clients of a class the centre is their plain mean, as nobody can say who is right.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload, Uploads, contents
from fczoo.core.types import Task
from fczoo.security.outliers import geometric_median, means_of, with_means

Centre = Literal["median", "trimmed_mean", "geometric_median"]


def check_centre(centre: Centre, method: str, uploads: Uploads) -> None:
    """Raise FczooError where a method has no class means, or statistics that a centre would spoil."""
    held = {name for group in with_means(uploads).values() for name in group.statistics}
    if not held:
        raise FczooError(
            f"--merge-statistics merges class means, of which {method} uploads none; "
            f"leave it out, or see --aggregator"
        )
    if "second moments" in contents(uploads):
        raise FczooError(
            f"--merge-statistics merges class by class, but {method} also uploads second moments over all "
            f"classes; leave it out"
        )
    if centre != "geometric_median" and held & {"cov", "products"}:
        raise FczooError(
            f"--merge-statistics {centre} of the covariances that {method} uploads need not be a covariance; "
            f"take geometric_median"
        )


def centred(payloads: Sequence[Payload], uploads: Uploads, centre: Centre, task: Task) -> list[Payload]:
    """The uploads with the robust centre of each class in place of every client's own statistics of it."""
    tensors = [dict(p) for p in payloads]
    for prefix, group in with_means(uploads).items():
        found = [means_of(p, prefix, group, task) for p in payloads]
        every = [means for means in found if means is not None]
        if len(every) < len(found):  # the group is not part of this exchange
            continue
        for name in (f"{prefix}{n}" for n in group.statistics if n not in ("label", "count")):
            if not all(name in p for p in payloads):
                continue
            whole = name.endswith(("sum", "squares", "products"))
            for label in torch.cat([m.labels[m.present] for m in every]).unique().tolist():
                places = [
                    (k, int(row))
                    for k, means in enumerate(every)
                    for row in ((means.labels == label) & means.present).nonzero()[:, 0]
                ]
                sizes = [float(payloads[k][f"{prefix}count"][row]) if whole else 1.0 for k, row in places]
                rows = [
                    payloads[k][name][row].double() / n for (k, row), n in zip(places, sizes, strict=True)
                ]
                middle = _centre(torch.stack(rows), centre)
                for (k, row), n in zip(places, sizes, strict=True):
                    changed = tensors[k][name].clone()
                    changed[row] = (n * middle).to(changed)
                    tensors[k][name] = changed
    return [p.holding(t) for p, t in zip(payloads, tensors, strict=True)]


def _centre(rows: Tensor, centre: Centre) -> Tensor:
    """Robust centre [...] of the rows [K, ...]."""
    if len(rows) < 3:
        return rows.mean(0)
    return CENTRES[centre](rows.flatten(1)).view(rows.shape[1:])


def _median(rows: Tensor) -> Tensor:
    return _trimmed(rows, (len(rows) - 1) // 2)


def _trimmed(rows: Tensor, trim: int = 1) -> Tensor:
    return rows.sort(0).values[trim : len(rows) - trim].mean(0)


CENTRES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "median": _median,  # of every coordinate
    "trimmed_mean": _trimmed,  # of every coordinate, without its largest and its smallest value
    "geometric_median": geometric_median,
}
