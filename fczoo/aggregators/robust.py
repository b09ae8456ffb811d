"""Aggregators that withstand a few hostile clients.

They replace a method's averaging (``--aggregator``).

All clients have equal weights, because a hostile client could claim any number of samples. Tensors
that a method does not average, such as prototypes and Gaussians, are not covered here; see
``fczoo.security.outliers``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.aggregators.averaging import mean_dtype
from fczoo.core.errors import TooFewUploadsError
from fczoo.core.options import check_options, option
from fczoo.core.payload import Payload
from fczoo.core.registry import register_aggregator
from fczoo.core.tree import Tree


@register_aggregator("median")
def median(payloads: Sequence[Payload]) -> Tree:
    """Merge by the coordinate-wise median; robust while more than half of the clients are honest.

    The median of two uploads is their mean, which is not robust. Source: Yin et al., ICML 2018.

    Args:
        payloads: Uploads with the same names and shapes.
    """
    return _by_coordinate(payloads, lambda rows: _trimmed_mean(rows, (len(rows) - 1) // 2))


@register_aggregator("trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean:
    """Mean of every coordinate without its largest and smallest values.

    Raises FczooError with fewer than 2 ``trim`` + 1 uploads. Source: Yin et al., ICML 2018.
    """

    trim: int = option(
        1,
        "values dropped at each end, which is also the number of hostile clients that it tolerates",
        low=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Payload]) -> Tree:
        _require_uploads(payloads, 2 * self.trim + 1, f"trimmed_mean:{self.trim}")
        return _by_coordinate(payloads, lambda rows: _trimmed_mean(rows, self.trim))


@register_aggregator("krum")
@dataclass(frozen=True)
class Krum:
    """The single upload that is closest to its neighbours.

    The score of an upload is the sum of its squared distances to the K - f - 2 nearest others of K
    clients; the lowest score wins. Raises FczooError with fewer than f + 3 uploads. Source:
    Blanchard et al., NeurIPS 2017.
    """

    hostile: int = option(
        1, "f, hostile clients to tolerate; proven for at least 2f + 3 uploads", low=0
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Payload]) -> Tree:
        best = _by_score(payloads, self.hostile, "krum")[0]
        return {name: value.clone() for name, value in best.items()}


@register_aggregator("multi_krum")
@dataclass(frozen=True)
class MultiKrum:
    """Mean of the K - f uploads with the lowest Krum scores.

    Raises FczooError with fewer than f + 3 uploads. Source: Blanchard et al., NeurIPS 2017.
    """

    hostile: int = option(
        1, "f, hostile clients to tolerate; proven for at least 2f + 3 uploads", low=0
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Payload]) -> Tree:
        best = _by_score(payloads, self.hostile, "multi_krum")[: len(payloads) - self.hostile]
        return _by_coordinate(best, lambda rows: rows.mean(0))


@register_aggregator("norm_clip")
@dataclass(frozen=True)
class NormClip:
    """Mean of the uploads, each clipped to a maximum distance from the coordinate-wise median.

    No upload stays farther from the median than ``factor`` times the median of all distances from
    it. This is centred clipping (Karimireddy et al., ICML 2021) with the median as centre, since an
    aggregator does not see the broadcast state.
    """

    factor: float = option(
        1.0, "maximum distance of an upload from the median, relative to the median distance", low=0
    )

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, payloads: Sequence[Payload]) -> Tree:
        centre = median(payloads)
        distances = []
        for payload in _sort_by_client(payloads):
            squares = [_squared_distance(payload[k], centre[k]) for k in centre]
            distances.append(sum(squares, torch.zeros(())).sqrt())
        distance = torch.stack(distances)  # [K]
        limit = self.factor * distance.sort().values[(len(distance) - 1) // 2]
        share = torch.where(distance > limit, limit / distance, 1.0)

        def clipped_mean(rows: Tensor) -> Tensor:
            middle = _trimmed_mean(rows, (len(rows) - 1) // 2)
            return middle + (share.to(rows).view(-1, *[1] * middle.dim()) * (rows - middle)).mean(0)

        return _by_coordinate(payloads, clipped_mean)


def _by_coordinate(payloads: Sequence[Payload], merge: Callable[[Tensor], Tensor]) -> Tree:
    """Apply ``merge`` to every tensor, stacked [K, ...] over the clients in float64.

    The result has the type of the tensors; for integers it is float64.
    """
    by_client = _sort_by_client(payloads)
    result: Tree = {}
    for name in by_client[0]:
        rows = torch.stack([p[name].double() for p in by_client])
        result[name] = merge(rows).to(mean_dtype(*(p[name].dtype for p in by_client)))
    return result


def _sort_by_client(payloads: Sequence[Payload]) -> list[Payload]:
    """Sort payloads by client, so that no sum depends on the order of arrival."""
    return sorted(payloads, key=lambda p: p.client)


def _trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean over the first dimension without the ``trim`` extreme values on each side."""
    return rows.sort(0).values[trim : len(rows) - trim].mean(0)


def _squared_distance(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).square().sum().cpu()


def _by_score(payloads: Sequence[Payload], hostile: int, name: str) -> list[Payload]:
    """Sort uploads by Krum's score, lowest first."""
    _require_uploads(payloads, hostile + 3, f"{name}:{hostile}")
    by_client, count = _sort_by_client(payloads), len(payloads)
    distance = torch.zeros(count, count, dtype=torch.float64)
    for name in by_client[0]:
        rows = torch.stack([p[name].double().flatten() for p in by_client])
        distance += torch.stack([(rows - row).square().sum(1) for row in rows]).cpu()
    nearest = distance.sort(1).values[:, 1 : count - hostile - 1]  # without itself
    return [by_client[i] for i in nearest.sum(1).argsort(stable=True)]


def _require_uploads(payloads: Sequence[Payload], count: int, name: str) -> None:
    if len(payloads) < count:
        problem = f"{name} needs at least {count} uploads and got {len(payloads)}"
        advice = "tolerate fewer hostile clients, or raise --participation or --clients"
        raise TooFewUploadsError(f"{problem}; {advice}")
